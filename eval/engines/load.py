"""Let running servers answer the same chats in turns, several at once, and time what somebody who reads along sees.

Any OpenAI-compatible server that streams /v1/chat/completions. Requests have a deadline each and together: one that fails or stalls is
counted and named, never waited for longer. Checked with vLLM 0.32.0 and the llama.cpp of the sdist llama-cpp-python 0.3.36.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.ledger.counts import Counts
from draftsmith.eval.ledger.sources import Told, read_answer, read_server
from draftsmith.eval.results.served import Failure
from draftsmith.foreign.server import LLAMA_CPP, SGLANG, TENSORRT, VLLM, ModelServer, ServerError
from draftsmith.progress import Bar

_CHATS = "/v1/chat/completions"
_OFF = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_ALONE = {
    VLLM: _OFF | {"repetition_penalty": 1.0},
    SGLANG: _OFF | {"repetition_penalty": 1.0},
    LLAMA_CPP: _OFF | {"repeat_penalty": 1.0},
}
"""What leaves the distribution as it is: of what a request leaves out, vLLM and SGLang take the target's generation_config.json, and
llama-server values of its own (top_k 40, top_p 0.95, min_p 0.05)."""


@dataclass(frozen=True)
class Chat:
    """A request. body: what is asked, `messages` and `max_tokens` among it."""

    id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer, in seconds since it was asked for. first, last: when its first and its last text came. waits: between its chunks. tokens:
    as the server counts them. counts: of its drafts, None where the server does not tell them with the answer."""

    first: float
    last: float
    waits: tuple[float, ...]
    tokens: int
    counts: Counts | None

    @property
    def after_first(self) -> tuple[float, int] | None:
        """Seconds and tokens after the first one; None where no time passed."""
        return (self.last - self.first, self.tokens - 1) if self.tokens > 1 and self.last > self.first else None


class ChatServer(ModelServer):
    """A server at `url` that answers chats by one of the `names` of its model, by its first where there are none.

    Raises UserError where it does not answer, or serves another model.
    """

    def __init__(self, url: str, names: Sequence[str] = ()) -> None:
        super().__init__(url, "--url")
        self.model = self.find_model(names, "name it with --model")
        self._kind, version = self.find_engine()
        self.engine = f"{self._kind} {version}" if self._kind else "another engine"
        self._asked = count()

    def chat(self, chat: Chat, seconds: float) -> Answer:
        """Return the answer to a chat. Raises UserError where the server refuses, sends something else, or has not sent all of it within
        `seconds`."""
        # Every prompt is read anew: it was read at another concurrency before.
        salt: dict[str, Any] = {"cache_salt": f"draftsmith {time.time_ns()} {next(self._asked)}"}
        fresh = {VLLM: salt, SGLANG: salt, LLAMA_CPP: {"cache_prompt": False}}.get(self._kind, {})
        how = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **fresh}
        body = _ALONE.get(self._kind, {}) | chat.body | how
        text, begun = json.dumps(body).encode(), time.perf_counter()
        times, last, tokens, counts = list[float](), 0.0, None, None
        for line in self.stream(_CHATS, text, seconds):
            at, data = time.perf_counter() - begun, line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                break
            if not line.startswith(b"data:"):
                continue
            chunk = self.parse(data, "a chunk of its answer")
            if "error" in chunk:
                raise ServerError(f"{self.url} broke off an answer: it says {str(chunk['error'])[:300]!r}.", again=True)
            choices, usage = chunk.get("choices"), chunk.get("usage")
            deltas = [one.get("delta") for one in choices or () if isinstance(one, dict)]
            last = at if deltas else last
            if any(text for one in deltas if isinstance(one, dict) for key, text in one.items() if key != "role"):
                times.append(at)
            tokens = usage.get("completion_tokens", tokens) if isinstance(usage, dict) else tokens
            counts = read_answer(chunk, self.url) or counts
        else:
            raise ServerError(
                f"{self.url} hung up in the middle of an answer, after {len(times)} chunks of text: see its log for why.",
                again=True,
            )
        if type(tokens) is not int or not 0 < tokens < 2**31 or not last:
            raise UserError(
                f"{self.url} does not say how many tokens an answer has (usage, with stream_options): name the address of the engine itself."
            )
        times = times or [last]
        return Answer(times[0], last, tuple(b - a for a, b in pairwise(times)), tokens, counts)

    def counted(self) -> Told | None:
        """Return what the server counts of drafts, None where it counts none, or shows ratios alone."""
        try:
            told = read_server(self)
        except UserError:
            return None
        return None if told.counts.rounded else told


@dataclass
class Tally:
    """What one server did at one concurrency. answers: by the chat's id. unfinished: chats that were not asked, or not answered, when the
    time was up. seconds: while it was asked. counts: of its drafts meanwhile, by its counters, None where it has none."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unfinished: int = 0
    seconds: float = 0.0
    counts: Counts | None = None


@dataclass(frozen=True)
class Limits:
    """Seconds that one request may take, and that everything may."""

    request: float
    whole: float


def take_turns(
    servers: Sequence[ChatServer], chats: Sequence[Chat], concurrencies: Sequence[int], repeats: int, limits: Limits
) -> dict[int, list[Tally]]:
    """Return by concurrency what each server did with all `chats`, `repeats` times.

    The servers take turns in short blocks of the same chats, each time another one first, so that what else changes on the machine falls on
    all of them. Shows a bar. Raises UserError where a server answers nothing of a block.
    """
    ends = time.monotonic() + limits.whole
    for server in servers:  # which warms it up, and says at once what is wrong
        server.chat(chats[0], min(limits.request, limits.whole))
    found = {rows: [Tally() for _ in servers] for rows in concurrencies}
    with Bar(total=len(concurrencies) * repeats * len(chats) * len(servers), desc="served", unit="answer") as bar:
        for rows, tallies in found.items():
            before = [server.counted() for server in servers]
            blocks = max(1, len(chats) // (2 * rows))  # of about the same size, two rounds of `rows` or more
            cut = [chats[len(chats) * i // blocks : len(chats) * (i + 1) // blocks] for i in range(blocks)]
            for number, block in enumerate(cut * repeats):
                for place in range(len(servers)):
                    turn = (place + number) % len(servers)
                    _ask(servers[turn], block, rows, limits.request, ends, tallies[turn])
                    bar.update(len(block))
            for server, tally, earlier in zip(servers, tallies, before, strict=True):
                if (now := server.counted()) is not None and now.engine == TENSORRT:
                    tally.counts = now.counts  # which are those since it was asked before
                else:
                    tally.counts = now.counts.since(earlier.counts) if now and earlier else None
    return found


def _ask(server: ChatServer, chats: Sequence[Chat], rows: int, seconds: float, ends: float, tally: Tally) -> None:
    """Ask a server a block of chats, `rows` at once, and add what comes to the tally."""
    waiting: SimpleQueue[Chat] = SimpleQueue()
    replies: dict[str, Answer | UserError] = {}
    for chat in chats:
        waiting.put(chat)

    def work() -> None:
        while (left := ends - time.monotonic()) > 0:
            try:
                chat = waiting.get_nowait()
            except Empty:
                return
            try:
                replies[chat.id] = server.chat(chat, min(left, seconds))
            except UserError as error:
                if time.monotonic() < ends:
                    replies[chat.id] = error

    begun = time.monotonic()
    threads = [Thread(target=work, daemon=True) for _ in range(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.seconds += time.monotonic() - begun
    tally.unfinished += len(chats) - len(replies)
    failed = {name: reply for name, reply in replies.items() if isinstance(reply, UserError)}
    if failed and len(failed) == len(replies):
        raise UserError(
            f"{server.url} answered none of {len(failed)} requests, {rows} at once: {next(iter(failed.values()))}"
        )
    for name, reply in replies.items():
        if isinstance(reply, UserError):
            tally.failures.append(Failure(name, str(reply)))
        else:
            tally.answers.setdefault(name, []).append(reply)
