"""Ask a running server for the prompts of a parity bundle, at temperature 0: vLLM, llama.cpp's llama-server, or SGLang.

Prompts go as token ids, so that no template and no tokenizer lies between; then, where they are of messages, these are sent for the number of
tokens that the server makes of them. Checked with vLLM 0.32.0 and the llama.cpp of the sdist llama-cpp-python 0.3.36; SGLang's names were
read in its source.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import EngineRound
from draftsmith.eval.engines.llama_cpp import UNSEEN, greedy_body
from draftsmith.eval.ledger.sources import read_answer
from draftsmith.eval.parity.bundle import Bundle, ParityPrompt
from draftsmith.eval.parity.diagnose import Seen
from draftsmith.foreign.server import LLAMA_CPP, SGLANG, VLLM, ModelServer, ServerError, as_asked
from draftsmith.progress import say

_SETTLES = 2.0
"""Seconds within which /metrics shows what was answered."""
_COUNTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
"""vLLM's counters of drafted and of accepted tokens."""


class AskedServer(ModelServer):
    """The server at `url`, which must serve a model called one of `names`. engine: its name and version.

    Raises UserError where it does not answer, is of an unknown engine or serves another model.
    """

    def __init__(self, url: str, names: Sequence[str]) -> None:
        super().__init__(url, "--url")
        self.kind, version = self.find_engine()
        if self.kind not in (VLLM, LLAMA_CPP, SGLANG):
            raise UserError(
                f"{self.url} is neither vLLM nor llama-server nor SGLang by what it says of itself, and only these tell token ids and drafts: "
                "name the address of the engine itself."
            )
        self.engine = f"{self.kind} {version}"
        self.model = self.find_model(names, "name it with --model")

    def ask_all(self, bundle: Bundle) -> list[Seen]:
        """Return what it gives for every prompt, one after the other, and warn where its users' requests would be rendered otherwise.
        Raises UserError where it tells no token ids or no drafts."""
        asks = {VLLM: self._vllm, LLAMA_CPP: self._llama, SGLANG: self._sglang}
        seen = [self._with_messages(asks[self.kind](prompt), prompt, bundle.template) for prompt in bundle.prompts]
        asked = next((prompt for prompt in bundle.prompts if prompt.messages is not None), None)
        if bundle.template and asked is not None:
            plain = self._with_messages(Seen(asked.id, ()), asked, {})
            if (differs := plain.rendered_otherwise(asked)) is not None:
                say(
                    f"warning: a request without chat_template_kwargs is rendered otherwise than what the head learned from ({differs}): start the "
                    f"server with {json.dumps(bundle.template)} (vLLM's --default-chat-template-kwargs, llama-server's --chat-template-kwargs), or send "
                    "that with every request."
                )
        return seen

    def _vllm(self, prompt: ParityPrompt) -> Seen:
        body = {"model": self.model, "prompt": list(prompt.prompt_ids), "max_tokens": prompt.max_new_tokens}
        before = self._counters()
        # What a request leaves out vLLM takes from the target's generation_config.json.
        plain = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        reply = self.post("/v1/completions", body | plain | {"return_token_ids": True})
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        seen = Seen(prompt.id, self._ids(choice.get("token_ids"), "return_token_ids (vLLM 0.10.2 and later)"))
        metrics = reply.get("metrics")
        told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(told, dict):
            steps = told.get("per_step_drafted"), told.get("per_step_accepted")
            counts = read_answer(reply, self.url)
            if all(isinstance(one, list) for one in steps):
                pairs = zip(*(self._ids(one, "numbers") for one in steps), strict=False)
                return replace(seen, rounds=tuple(EngineRound((UNSEEN,) * drafted, kept) for drafted, kept in pairs))
            if counts is not None and counts.drafted is not None:
                return replace(seen, drafted=int(counts.drafted), accepted=int(counts.accepted))
        # They are read until they no longer move.
        deadline, last = time.monotonic() + _SETTLES, None
        while (
            (after := self._counters()) is not None
            and time.monotonic() < deadline
            and (after == before or after != last)
        ):
            last = after
            time.sleep(0.1)
        if before is None or after is None:
            raise UserError(
                f"{self.url} tells nothing of its drafts, neither with an answer nor at /metrics: start it with --per-request-spec-decode-metrics summary "
                "(or detailed, which tells every round), or without --disable-log-stats."
            )
        drafted, accepted = (int(b - a) for a, b in zip(before, after, strict=True))
        return replace(seen, drafted=drafted, accepted=accepted)

    def _llama(self, prompt: ParityPrompt) -> Seen:
        reply = self.post("/completion", greedy_body(prompt.prompt_ids, prompt.max_new_tokens))
        ids, timings = self._ids(reply.get("tokens"), "return_tokens"), reply.get("timings")
        if not isinstance(timings, dict):
            raise UserError(
                f"{self.url} sends no timings with its answers, which tell its drafts: use a newer llama-server."
            )
        drafted, accepted = self._ids([timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)], "whole counts")
        return Seen(prompt.id, ids, None, drafted, accepted)

    def _sglang(self, prompt: ParityPrompt) -> Seen:
        wanted = {"temperature": 0.0, "repetition_penalty": 1.0, "max_new_tokens": prompt.max_new_tokens}
        reply = self.post("/generate", {"input_ids": list(prompt.prompt_ids), "sampling_params": wanted})
        ids, counts = self._ids(reply.get("output_ids"), "output_ids"), read_answer(reply, self.url)
        if counts is None:
            return Seen(prompt.id, ids, None, 0, 0)
        return Seen(prompt.id, ids, None, None if counts.drafted is None else int(counts.drafted), int(counts.accepted))

    def _with_messages(self, seen: Seen, prompt: ParityPrompt, template: dict[str, Any]) -> Seen:
        """Add how many tokens the server makes of the messages of a prompt, where it takes messages."""
        if prompt.messages is None:
            return seen
        body = {"model": self.model, "messages": [*as_asked(prompt.messages)], "max_tokens": 1, "temperature": 0.0}
        body |= {"chat_template_kwargs": template} if template else {}
        try:
            reply = self.post("/v1/chat/completions", body | {"return_token_ids": True})
        except ServerError as error:  # as without a chat template
            say(
                f"warning: {error} So whether chats are rendered as the head learned them is not known: start the server with the target's (--chat-template)."
            )
            return seen
        usage, ids = reply.get("usage"), reply.get("prompt_token_ids")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        known = self._ids(ids, "prompt_token_ids") if isinstance(ids, list) else None
        return replace(seen, prompt_ids=known, prompt_tokens=tokens if type(tokens) is int else None)

    def _ids(self, value: Any, option: str) -> tuple[int, ...]:
        """Return a list of whole numbers. Raises UserError for anything else. option: what makes a server send it."""
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise UserError(
                f"{self.url} does not send {option}, so its answers cannot be compared token by token: use a newer one."
            )
        return tuple(value)

    def _counters(self) -> tuple[float, float] | None:
        """Return vLLM's counts of drafted and accepted tokens, zeros where it drafts none; None where it hides its counters."""
        if "vllm:generation_tokens_total" not in (page := self.metrics()):
            return None
        drafted, accepted = self.sums(page, _COUNTED)
        return drafted, accepted
