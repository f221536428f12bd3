"""Measure costs from running servers: one serves the target alone, each of the others drafts its own number of tokens in every round.

Whole rounds are timed while all rows of a batch are at work, from the end of one round to the end of a later one. The time of a round
does not depend on what is accepted, so any text will do. K: num_speculative_tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median

import draftsmith
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import ALONE, CostPoint, CostTable, TimedServer
from draftsmith.eval.engines.server import Batch, MeasuredServer
from draftsmith.eval.results.result import TargetInfo
from draftsmith.machine import environment
from draftsmith.progress import Bar

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
