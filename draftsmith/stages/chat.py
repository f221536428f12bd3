"""`draftsmith chat`: talk with the target while a head drafts, and see in colour what was accepted.

    draftsmith chat --recipe R
    draftsmith chat --recipe R --prompt "What is two plus two?"

Answers go to standard output, everything else to standard error. Behind each answer stand its tokens per second, tau and
speedup; for the last, the target alone answers the same prompt, as far as is needed to see how fast it is.
"""

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rich.console import Console

from draftsmith.data.conversations.show import LiveAnswer, print_legend
from draftsmith.data.conversations.templates import render_prompt, render_text
from draftsmith.decoder.answers import Decoded, Generation, Request, tally_generation
from draftsmith.decoder.decode import decode_batch, decode_live
from draftsmith.decoder.draft import TargetAlone
from draftsmith.errors import UserError, printable
from draftsmith.eval.drafters.system import Way
from draftsmith.progress import say
from draftsmith.stages.drafters import load_fitting, ways_to_draft
from draftsmith.stages.session import Session
from draftsmith.train.process import ENDING, Interrupt, Terminated

ALONE_TOKENS = 32
"""Tokens that the target writes alone after an answer, to see how fast it is."""
_WARM_UP_TOKENS = 16
_COMMANDS = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer"


class Chat:
    """A conversation with the target. Its answers are drafted by the session's head, in the first way of `evaluate.drafts`
    that fits it.

    temperature: None for the first of `evaluate.temperatures`. system: what the conversation begins with. compare: the
    target writes every answer alone, too. Raises UserError where there is no head for the target, and for a system text
    that the chat template refuses or leaves out.
    """

    def __init__(
        self, session: Session, temperature: float | None = None, system: str | None = None, *, compare: bool = False
    ) -> None:
        self.session, self.compare, self.asked = session, compare, 0
        folder, spec = session.head_folder, session.recipe.evaluate
        self.sampling = spec.sampling(spec.temperatures[0] if temperature is None else temperature)
        self.target = session.target_in(spec.dtype)
        self.begin = [] if system is None else [{"role": "system", "content": system}]
        messages, template = [*self.begin, _user("Hello")], self.session.recipe.data.template
        text = render_text(self.session.tokenizer, messages, generation_prompt=True, **template)
        if any(message["content"] not in text for message in self.begin):
            raise UserError(
                f"--system: the chat template of {self.target.path} leaves the system text out: say it in your first question."
            )
        self.reset()
        head = load_fitting(folder, self.target, session.warn)
        ways = ways_to_draft(spec, head.method, head, self.target, session.warn, compared=False)
        if not ways:
            raise UserError(f"evaluate.drafts names no way to draft for the head in {folder}: add {{tree: chain}}.")
        first = ways[0]
        self.name, self.draft_length = first.name, first.num_speculative_tokens
        self.way = first.way(self.target)
        contexts = [self.target.context_length, head.reads.context_length or self.target.context_length]
        self.context = min(contexts) - self.way.drafter.num_speculative_tokens
        self.alone = Way(self.target, TargetAlone())
        self.console = Console()
        # A few tokens both ways, as first passes are slow.
        request = self._request([*self.begin, _user("Hello")], _WARM_UP_TOKENS)
        for way in (self.way, self.alone):
            decode_batch(way.target, way.drafter, [request], self.sampling, way.typical)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self.begin)

    def introduce(self) -> None:
        """Say who drafts for whom, and what the colours mean."""
        way = f"{self.name} drafting {self.draft_length} tokens ahead"
        say(f"{self.session.recipe.target.path}, {way}, temperature {self.sampling.temperature:g}")
        print_legend(self.console, self.draft_length)

    def ask(self, question: str) -> Generation:
        """Answer a question on the screen as the next turn of the conversation, and say what the drafts brought.

        Ctrl-C ends the answer, and what is there of it becomes the turn. Raises UserError where there is no room for an
        answer or the template refuses the turn; the conversation is then as before.
        """
        messages = [*self.messages, _user(question)]
        self.asked += 1
        request = self._request(messages, self.session.recipe.evaluate.max_new_tokens)
        live = LiveAnswer(self.session.tokenizer, self.console, self.target.eos_ids)
        with Interrupt() as interrupt:
            try:
                decoded = self._write(self.way, request, interrupt, live.put)
            finally:
                live.end()
            answer, stopped = decoded.generations[0], bool(interrupt.asked)
            tokens = len(answer.output_ids) if self.compare else min(len(answer.output_ids), ALONE_TOKENS)
            limited = replace(request, max_new_tokens=tokens)
            alone = None if stopped else self._write(self.alone, limited, interrupt)
        if interrupt.asked in ENDING:
            raise Terminated(interrupt.asked)
        self.messages = [*messages, {"role": "assistant", "content": live.text}]
        tau = tally_generation(answer, self.draft_length).tau
        comparable = self.sampling.greedy and self.way.target is self.target
        say(f"[{describe(decoded, tau, alone, comparable=comparable)}{self._why_ended(answer, stopped)}]", kept=True)
        return answer

    def _write(
        self, way: Way, request: Request, interrupt: Interrupt, show: Callable[[int, int | None], None] | None = None
    ) -> Decoded:
        """Decode until the answer ends or is interrupted. show: takes every token with the draft position it was accepted
        at, None for the target's own."""
        shown = 0
        for decoded in decode_live(way.target, way.drafter, request, self.sampling, way.typical):
            answer = decoded.generations[0]
            accepted = answer.rounds[-1].accepted if answer.rounds else 0
            for position, token in enumerate(answer.output_ids[shown:], 1):
                if show is not None:
                    show(token, position if position <= accepted else None)
            shown = len(answer.output_ids)
            if interrupt.asked:
                break
        return decoded

    def _request(self, messages: list[dict[str, str]], most: int) -> Request:
        """Return the next turn as a request for at most `most` tokens. Raises UserError where none fits."""
        session, template = self.session, self.session.recipe.data.template
        ids = render_prompt(session.tokenizer, messages, most=self.context, **template)
        room = self.context - len(ids)
        if room < 1:
            remedy = "/reset begins anew" if len(messages) > len(self.begin) + 1 else "ask in fewer words"
            size = len(ids) if len(ids) <= 2 * self.context else f"over {2 * self.context}"
            raise UserError(
                f"The conversation has {size} tokens, which leaves no room for an answer within the {self.context} that target "
                f"and head read besides a draft: this turn is dropped; {remedy}."
            )
        return Request.seeded(f"chat {self.asked}", "chat", ids, min(most, room), session.recipe.seed)

    def _why_ended(self, answer: Generation, stopped: bool) -> str:
        """Return the end of the line of figures where the answer did not come to its own."""
        most = self.session.recipe.evaluate.max_new_tokens
        if stopped and not answer.finish_reason:
            return "; interrupted"
        if answer.finish_reason != "length":
            return ""
        if answer.request.max_new_tokens < most:
            return f"; cut, as the context of {self.context} tokens is full: /reset begins anew"
        return f"; cut at evaluate.max_new_tokens ({most})"


def converse(chat: Chat) -> None:
    """Answer the lines of standard input until it ends."""
    if sys.stdin is None:
        raise UserError("chat reads its questions from standard input, which is closed: ask with --prompt.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    typed = sys.stdin.isatty()
    if typed and sys.stdout.isatty():
        with suppress(ImportError):  # which some builds of Python lack
            import readline  # noqa: F401 - input() then edits lines and remembers them
    say(_COMMANDS)
    while True:
        try:
            line = input("\n> " if typed else "").strip()
        except EOFError:
            if typed:
                say("")  # the shell's prompt begins a line
            return
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated) or not typed:
                raise
            say(f"\n{_COMMANDS}")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
        elif line.startswith("/") and " " not in line:
            say(f"There is no {printable(line)}: {_COMMANDS}.", kept=True)
        elif line:
            try:
                chat.ask(line)
            except UserError as error:
                say(str(error), kept=True)


def describe(decoded: Decoded, tau: float | None, alone: Decoded | None, *, comparable: bool) -> str:
    """Return an answer's figures in words.

    tau: of the drafted answer. alone: what the target wrote of it alone, None where it did not. comparable: whether its
    text must be the same, up to rounding.
    """
    ids, speed = decoded.generations[0].output_ids, rate(decoded)
    parts = [f"{len(ids)} token{'s' if len(ids) > 1 else ''}"]
    if speed is None or tau is None:
        return parts[0]
    parts += [f"{speed:.3g} tok/s", f"tau {tau:.2f}"]
    if alone is not None and (slow := rate(alone)) is not None:
        written = alone.generations[0].output_ids
        whole = len(written) == len(ids)
        what = [f"{slow:.3g} tok/s" + ("" if whole else f" in {len(written)} tokens")]
        if comparable:
            what.append("the same text" if written == ids[: len(written)] else "its text differs")
        parts.append(f"{'' if whole else '≈ '}{speed / slow:.2f}x the target alone ({', '.join(what)})")
    return ", ".join(parts)


def rate(decoded: Decoded) -> float | None:
    """Return the tokens after the first over the seconds after it, of one answer; None where there is no other."""
    tokens = len(decoded.generations[0].output_ids) - 1
    seconds = sum(spent for part, spent in decoded.seconds.items() if part != "ttft")
    return tokens / seconds if tokens else None


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
