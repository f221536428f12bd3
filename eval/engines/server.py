"""Measure running servers from outside: which model each serves, what its counters say, when each round of an answer ends, and the costs
that follow, where one serves the target alone and each of the others drafts its own number of tokens in every round.

vLLM and llama.cpp's llama-server, through /v1/models, /metrics and streamed /v1/completions. Checked with vLLM 0.32.0 and the
llama.cpp of the sdist llama-cpp-python 0.3.36. Whole rounds are timed while all rows of a batch are at work, from the end of one round
to the end of a later one. The time of a round does not depend on what is accepted, so any text will do. K: num_speculative_tokens.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from statistics import median
from threading import Barrier
from typing import Any, NoReturn

import draftsmith
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import ALONE, CostPoint, CostTable, TimedServer
from draftsmith.eval.results.result import TargetInfo
from draftsmith.foreign.server import LLAMA_CPP, VLLM, ModelServer
from draftsmith.machine import environment
from draftsmith.progress import Bar

_PREFIXES = {VLLM: "vllm", LLAMA_CPP: "llamacpp"}
"""How the names of an engine's counters begin."""
_GENERATED = {VLLM: "generation_tokens_total", LLAMA_CPP: "tokens_predicted_total"}
_DRAFTS, _DRAFTED = "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"
_BUSY = {
    VLLM: ("num_requests_running", "num_requests_waiting"),
    LLAMA_CPP: ("requests_processing", "requests_deferred"),
}
_ANSWERS = "/v1/completions"
_SETTLES = 10.0
"""Seconds within which counters show what was answered."""
_MERGED = 1.5
"""With so many rounds in a chunk, or more, the chunks' times no longer say when rounds ended."""


@dataclass(frozen=True)
class Event:
    """The end of a round of one answer, when its chunk arrived. at: seconds of the clock. tokens, rounds: of the answer so far; reading
    the prompt is round 0 and gives the first token. drafted: tokens so far, 0 where the server does not say."""

    at: float
    tokens: int
    rounds: float
    drafted: int = 0


@dataclass(frozen=True)
class Batch:
    """Answers to requests that were sent together. started: seconds of the clock. answers: their rounds. draft_length: mean number of
    tokens that a round drafts; 0 for the target alone."""

    started: float
    answers: tuple[tuple[Event, ...], ...]
    draft_length: float


@dataclass(frozen=True)
class _Counters:
    """What a server counts since its start. requests: that it works on now."""

    generated: float
    rounds: float
    drafted: float
    requests: float


class MeasuredServer(ModelServer):
    """A server at `url` whose rounds are timed; one of `names` is the target that it must serve.

    Raises UserError where it does not answer, is of another engine, hides its counters or serves another model.
    """

    def __init__(self, url: str, names: Sequence[str]) -> None:
        super().__init__(url, "--server")
        page = self.metrics()
        self._engine = next((name for name, prefix in _PREFIXES.items() if f"{prefix}:{_GENERATED[name]}" in page), "")
        if not self._engine:
            raise UserError(
                f"{self.url} shows no counters of vLLM or llama.cpp at /metrics, and only these tell its rounds: start llama-server with "
                "--metrics, vLLM without --disable-log-stats; other engines are not measured."
            )
        self.model = self.find_model(names, "name it with --model")
        self.engine = " ".join(self.find_engine())
        self._asked = count()

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Batch:
        """Let the server answer all prompts at once, `tokens` tokens each.

        Raises UserError where it refuses, ends an answer early, or works for others meanwhile.
        """
        before = self._counters(0)
        ready = Barrier(len(prompts))
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(self._stream, prompt, tokens, temperature, ready) for prompt in prompts]
            streams = [one.result() for one in asked]
        started = min(stream[0][0] for stream in streams)
        chunks = [self._read(stream[1:]) for stream in streams]
        if early := [rows for rows in chunks if not rows or rows[-1].tokens < tokens]:
            raise UserError(
                f"{self.url} ended an answer after {early[0][-1].tokens if early[0] else 0} of {tokens} tokens behind a prompt of "
                f"{len(prompts[0])}: give it a longer context (vLLM --max-model-len, llama-server -c), or lower evaluate.plan_contexts."
            )
        own = sum(rows[-1].tokens for rows in chunks)
        counted = self._counters(before.generated + own)
        # llama-server prints six digits.
        if (others := counted.generated - before.generated - own) > counted.generated * 1e-5:
            self._busy(f"generated {others:.0f} tokens for others meanwhile")
        rounds, drafted = counted.rounds - before.rounds, counted.drafted - before.drafted
        if self._engine == VLLM:
            return Batch(started, self._by_chunks(chunks, rounds), drafted / rounds if rounds else 0.0)
        # The last rounds of an answer are left out, as llama-server drafts no more than the answer has room for.
        drafts = [(tokens - a.tokens - 1, b.drafted - a.drafted) for rows in chunks for a, b in pairwise(rows)]
        most = max((drafted for _, drafted in drafts), default=0)
        whole = [drafted for room, drafted in drafts if room >= most]
        return Batch(started, tuple(chunks), sum(whole) / len(whole) if whole else 0.0)

    def _read(self, lines: Sequence[tuple[float, bytes]]) -> tuple[Event, ...]:
        """Read the rounds of an answer from the lines of its stream, with the seconds at which they came."""
        events: list[Event] = []
        for at, line in lines:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            chunk = self.parse(line.removeprefix(b"data:"), "a chunk of its answer")
            if "error" in chunk:
                raise UserError(f"{self.url} broke off an answer: it says {str(chunk['error'])[:300]!r}.")
            try:
                event = _READERS[self._engine](at, chunk, len(events))
            except (KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self.url} sends its answers in other chunks than {self.engine} does: name the address of the engine itself."
                ) from error
            last = events[-1] if events else Event(at, 0, -1)
            if event is not None and event.tokens > last.tokens and event.rounds > last.rounds:
                events.append(event)
        return tuple(events)

    def _by_chunks(self, chunks: Sequence[tuple[Event, ...]], rounds: float) -> tuple[tuple[Event, ...], ...]:
        """Return vLLM's chunks as rounds. The target alone makes a token in each round. With drafts a chunk is a round, unless two
        were sent together: then each chunk counts as the mean number of rounds. rounds: of all answers, by the engine's counters."""
        if not rounds:
            return tuple(tuple(Event(e.at, e.tokens, e.tokens - 1) for e in rows) for rows in chunks)
        sent = sum(len(rows) - 1 for rows in chunks)
        if sent * _MERGED < rounds:
            raise UserError(
                f"{self.url} sent {rounds:.0f} rounds in {sent} chunks, so when they ended is not known: start it without "
                "--stream-interval, and measure from a machine near to it."
            )
        each = max(1.0, rounds / sent)
        return tuple(tuple(Event(e.at, e.tokens, e.rounds * each) for e in rows) for rows in chunks)

    def _stream(
        self, prompt: Sequence[int], tokens: int, temperature: float, ready: Barrier
    ) -> list[tuple[float, bytes]]:
        """Return the lines of an answer, each with the second at which it arrived; the first, empty one is the request's."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},  # vLLM's tokens so far
            "timings_per_token": True,  # llama-server's
            # Every prompt is read anew.
            "cache_salt": f"draftsmith {time.time_ns()} {next(self._asked)}",
            "cache_prompt": False,
        }
        text = json.dumps(body).encode()
        ready.wait()
        lines = [(time.perf_counter(), b"")]
        lines += ((time.perf_counter(), line) for line in self.stream(_ANSWERS, text))
        return lines

    def _counters(self, generated: float) -> _Counters:
        """Wait until the server is idle and has counted `generated` tokens, up to rounding; return its counters. Raises UserError where
        that does not happen in time."""
        deadline = time.monotonic() + _SETTLES
        while (counted := self._read_counters()).requests or counted.generated * (1 + 1e-5) < generated:
            if time.monotonic() <= deadline:
                time.sleep(0.05)
            elif counted.requests:
                self._busy(f"works on {counted.requests:.0f} requests of others")
            else:
                raise UserError(
                    f"{self.url} counts {counted.generated:.0f} generated tokens at /metrics {_SETTLES:g} seconds after it sent "
                    f"{generated:.0f}, so its rounds are not known: name the address of one engine itself, not of a proxy before several."
                )
        return counted

    def _read_counters(self) -> _Counters:
        """Read the counters, those of several engines in one server together. Raises UserError for one that is no number."""
        names = (_GENERATED[self._engine], _DRAFTS, _DRAFTED, *_BUSY[self._engine])
        found = self.sums(self.metrics(), [f"{_PREFIXES[self._engine]}:{name}" for name in names])
        generated, rounds, drafted, *requests = found
        return _Counters(generated, rounds, drafted, sum(requests))

    def _busy(self, what: str) -> NoReturn:
        raise UserError(f"{self.url} {what}, which its times would show: measure when nobody else uses it.")


def _read_vllm(at: float, chunk: dict[str, Any], chunks: int) -> Event | None:
    """Read a chunk of vLLM: a round, with the answer's tokens so far. The last chunk holds totals alone and has no choices."""
    return Event(at, _count(chunk["usage"]["completion_tokens"]), chunks) if chunk["choices"] else None


def _read_llama(at: float, chunk: dict[str, Any], chunks: int) -> Event | None:
    """Read a chunk of llama-server: a token, with the tokens that were drafted and accepted so far.

    A round makes one token of the target's own, and some accepted ones. So tokens minus accepted tokens count the rounds, and that
    number grows only with the last token of a round."""
    said = chunk["timings"]
    tokens = _count(said["predicted_n"])
    return Event(at, tokens, tokens - 1 - _count(said.get("draft_n_accepted", 0)), _count(said.get("draft_n", 0)))


def _count(value: Any) -> int:
    """Return a number of tokens. Raises TypeError for what is none."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise TypeError
    return value


_READERS: dict[str, Callable[[float, dict[str, Any], int], Event | None]] = {VLLM: _read_vllm, LLAMA_CPP: _read_llama}
"""By engine: from a chunk's arrival, the chunk, and the number of rounds before it to a round, which may not be complete."""


TOKENS = 96
"""Tokens of an answer; of twice as many, and again, where fewer rounds than LEAST_ROUNDS are timed."""
_MOST_TOKENS = 8 * TOKENS
LEAST_ROUNDS = 24
"""Rounds of every row between which a batch is timed."""
REPEATS = 3
"""Times that a batch is answered, in turns with the other servers; the median counts."""


@dataclass(frozen=True)
class Timing:
    """A batch as it was answered. round_ms: a round with all rows at work. first_ms: until every row had its first token. rounds: the
    fewest that a row had while all were at work."""

    round_ms: float
    first_ms: float
    rounds: float


def time_batch(batch: Batch) -> Timing:
    """Time the rounds of a batch between the moment when its last row has its first token, and the one when its first row is done.

    Rows that end early, or wait, would make rounds look cheaper, or dearer, than those of the whole batch.
    """
    start, end = max(rows[0].at for rows in batch.answers), min(rows[-1].at for rows in batch.answers)
    inside = [[event for event in rows if start <= event.at <= end] or [rows[0]] for rows in batch.answers]
    rounds = [rows[-1].rounds - rows[0].rounds for rows in inside]
    seconds = sum(rows[-1].at - rows[0].at for rows in inside)
    return Timing(1000 * seconds / (sum(rounds) or 1), 1000 * (start - batch.started), min(rounds))


class _Prompts:
    """Cuts prompts of any length out of one text, each from another start."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._place = list(ids), count()

    def take(self, rows: int, length: int) -> list[list[int]]:
        """Return `rows` prompts of `length` tokens."""
        starts = [next(self._place) % len(self._ids) for _ in range(rows)]
        return [(self._ids[start:] + self._ids * (length // len(self._ids) + 1))[:length] for start in starts]


def measure_served(
    servers: Sequence[MeasuredServer],
    target: TargetInfo,
    drafter: str,
    text_ids: Sequence[int],
    temperature: float,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    command: str,
) -> CostTable:
    """Time rounds of every server at every batch and context; prompts are cut from `text_ids`.

    drafter: the name in results of what the servers draft with. Shows a bar. Raises UserError where none serves the target alone, none
    drafts, two draft alike, or a batch is never answered as a whole.
    """
    prompts = _Prompts(text_ids)
    by_length = _by_draft_length(servers, prompts.take(1, min(contexts)), temperature)
    points: list[CostPoint] = []
    with Bar(total=len(batches) * len(contexts), desc="costs", unit="point") as bar:
        # What a server has no room for shows at once.
        for rows in sorted(batches, reverse=True):
            for context in sorted(contexts, reverse=True):
                bar.set_postfix_str(f"batch {rows}, context {context}")
                points.insert(0, _point(by_length, drafter, prompts, temperature, rows, context))
                bar.update()
    made = environment()
    table = CostTable(
        target=target,
        dtype=None,
        points=tuple(points),
        nodes={},
        weights_bytes=None,
        bandwidth=None,
        hardware=None,
        versions={"draftsmith": draftsmith.__version__},
        command=command,
        commit=made["commit"],
        date=made["date"],
        servers=tuple(TimedServer(one.url, one.engine, one.model, k) for k, one in by_length.items()),
    )
    places = [(point.batch, point.context) for point in points]
    return table.settled(partial(_point, by_length, drafter, prompts, temperature), places)


def _by_draft_length(
    servers: Sequence[MeasuredServer], prompts: Sequence[Sequence[int]], temperature: float
) -> dict[int, MeasuredServer]:
    """Return the servers by K, ascending, as their first answer shows it."""
    by_length: dict[int, MeasuredServer] = {}
    for server in servers:
        k = _whole(server, server.answer(prompts, TOKENS, temperature))
        if k in by_length:
            what = f"both draft {k} tokens a round" if k else "both serve the target alone"
            raise UserError(f"{by_length[k].url} and {server.url} {what}: name one server for each number.")
        by_length[k] = server
    if 0 not in by_length or len(by_length) == 1:
        lacking = "none serves the target alone" if 0 not in by_length else "none drafts"
        raise UserError(
            f"Of the servers {', '.join(one.url for one in servers)} {lacking}: name one without speculation, to compare with, and one "
            "for each number of drafted tokens."
        )
    return dict(sorted(by_length.items()))


def _whole(server: MeasuredServer, batch: Batch) -> int:
    """Return K of a batch. Raises UserError where its rounds drafted different numbers of tokens, so that no one cost is theirs."""
    k = round(batch.draft_length)
    if abs(batch.draft_length - k) > 0.01:
        raise UserError(
            f"{server.url} drafted {batch.draft_length:.2f} tokens a round on average, not one number in every round: start it with a "
            "fixed one (llama-server: --spec-draft-p-min 0 --spec-draft-n-min 0; vLLM: no numbers by batch size, and no n-grams)."
        )
    return k


def _point(
    by_length: dict[int, MeasuredServer], drafter: str, prompts: _Prompts, temperature: float, rows: int, context: int
) -> CostPoint:
    """Time a batch behind a context on every server in turns. A drafter reads the prompt in the time by which its first tokens come
    later than those of the target alone."""
    tokens = {k: _tokens_needed(server, prompts, temperature, rows, context) for k, server in by_length.items()}
    timings: dict[int, list[Timing]] = {k: [] for k in by_length}
    for _ in range(REPEATS):
        for k, server in by_length.items():
            batch = server.answer(prompts.take(rows, context), tokens[k], temperature)
            if (now := _whole(server, batch)) != k:
                raise UserError(
                    f"{server.url} drafts {k} tokens a round at batch 1, but {now} at batch {rows}: start it with one number for all."
                )
            timings[k].append(time_batch(batch))
    round_ms = {k: median(timing.round_ms for timing in batches) for k, batches in timings.items()}
    first_ms = {k: median(timing.first_ms for timing in batches) for k, batches in timings.items()}
    later = max(ms - first_ms[0] for k, ms in first_ms.items() if k)
    whole = {ALONE: {"0": round_ms[0]}, drafter: {str(k): ms for k, ms in round_ms.items() if k}}
    return CostPoint(rows, context, {}, {}, {drafter: max(0.0, later)}, {}, whole)


def _tokens_needed(server: MeasuredServer, prompts: _Prompts, temperature: float, rows: int, context: int) -> int:
    """Return how many tokens answers need for enough rounds with all rows at work; asks for them, which warms the server up."""
    tokens = TOKENS
    while True:
        timing = time_batch(server.answer(prompts.take(rows, context), tokens, temperature))
        if timing.rounds >= LEAST_ROUNDS:
            return tokens
        if tokens >= _MOST_TOKENS:
            raise UserError(
                f"{server.url} answered {rows} prompts of {context} tokens together for {max(0, timing.rounds):.0f} rounds only, in "
                f"answers of {tokens} tokens, and {LEAST_ROUNDS} are timed: let it work on {rows} requests at once (vLLM --max-num-seqs, "
                "llama-server -np), or lower evaluate.plan_batches or evaluate.plan_contexts."
            )
        tokens *= 2
