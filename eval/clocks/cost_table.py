"""costs.json: what single steps cost on one machine, by batch and context, to plan for that machine anywhere.

Acceptance does not depend on the machine and costs do not depend on the text, so that a table made where the head will be
served (`draftsmith costs`) decides together with acceptance that was measured elsewhere. This decoder's steps are timed one by one; of
running servers (`draftsmith costs --server`) only whole rounds can be timed.
"""

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations, product
from pathlib import Path

import numpy as np

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.results.result import Result, TargetInfo
from draftsmith.fields import LATER
from draftsmith.foreign.records import read_current
from draftsmith.foreign.text import read_json
from draftsmith.machine import Hardware
from draftsmith.storage import write_json

ALONE = ""
"""The name of the target alone among drafters."""
_APART = 0.25
"""The share of a round from which on two costs that cannot both be right contradict each other: smaller ones are noise."""

TABLE_MARK = r'\A\{\n  "schema_version": .*"points": '
"""How a table's text is known."""


@dataclass(frozen=True)
class Drafting:
    """What depends on the temperature: draft_ms and overhead_ms as in `CostPoint`."""

    draft_ms: dict[str, dict[str, float]]
    overhead_ms: dict[str, float]


@dataclass(frozen=True)
class CostPoint:
    """Milliseconds of steps for `batch` rows, each behind `context` tokens; sizes are text keys, as JSON has no others.

    verify_ms: {"n": one target pass over n new tokens a row}. draft_ms: {drafter: {"k": proposing k tokens, or a tree of depth k}}.
    admit_ms: {drafter: reading a prompt of `context` tokens before its first draft}, which the target alone need not do.
    overhead_ms: {drafter: what a round spends on neither}, "" for the target alone.
    round_ms: {drafter: {"k": a whole round that drafts k tokens}}, "" for the target alone, which drafts "0": where it is given nothing
    is known of a round's parts, so that verify_ms, draft_ms and overhead_ms are empty.
    sampled: drafts and overhead above temperature 0, where draft_ms and overhead_ms are of temperature 0; else None.
    """

    batch: int
    context: int
    verify_ms: dict[str, float]
    draft_ms: dict[str, dict[str, float]]
    admit_ms: dict[str, float]
    overhead_ms: dict[str, float]
    round_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    sampled: Drafting | None = field(default=None, metadata=LATER)

    def at(self, temperature: float) -> "CostPoint":
        """Return the costs at a temperature."""
        if self.sampled is None or temperature == 0:
            return self
        return replace(self, draft_ms=self.sampled.draft_ms, overhead_ms=self.sampled.overhead_ms, sampled=None)

    @property
    def alone_ms(self) -> float:
        """A round of the target alone: one token for each row."""
        return self.round_ms[ALONE]["0"] if self.round_ms else self.verify(1) + self.overhead_ms[ALONE]

    @property
    def drafters(self) -> list[str]:
        """The drafters that were timed."""
        return [name for name in self.round_ms or self.draft_ms if name != ALONE]

    def verify(self, tokens: int) -> float:
        """Return the target's pass over `tokens` tokens a row, between measured sizes by straight lines."""
        return between(self.verify_ms, tokens)

    def draft(self, drafter: str, k: int) -> float:
        """Return what proposing takes, between measured lengths by straight lines."""
        return between(self.draft_ms[drafter], k)

    @property
    def total_ms(self) -> float:
        """All costs together, to compare with those of another measurement of the same place."""
        kinds = (self.verify_ms, self.admit_ms, self.overhead_ms, *self.draft_ms.values(), *self.round_ms.values())
        own = sum(ms for costs in kinds for ms in costs.values())
        return own if self.sampled is None else own + self.at(1.0).total_ms


def between(costs: dict[str, float], size: int) -> float:
    """Return the cost of a size, by a straight line between the measured ones beside it."""
    sizes = sorted(map(int, costs))
    return float(np.interp(size, sizes, [costs[str(n)] for n in sizes]))


@dataclass(frozen=True)
class TimedServer:
    """A running server that costs were measured from. engine: with its version. model: the name that it serves the target by.
    num_speculative_tokens: that it drafts in every round, 0 for the target alone."""

    url: str
    engine: str
    model: str
    num_speculative_tokens: int


@dataclass(frozen=True)
class CostTable:
    """Costs of a target and its drafters on one machine.

    dtype: of both. nodes: {drafter: {"k": tokens of the target's pass}} for trees, whose pass does not read k + 1 tokens.
    weights_bytes: of the target, read in every pass, of each process where several share it. bandwidth: bytes per second that this machine reads memory with, measured.
    too_large: the (batch, context) that did not fit in memory, which nobody need try again.
    command, commit, date, hardware, versions: as in result.json. servers: that whole rounds were measured from, none where steps were
    timed here; dtype, weights_bytes and hardware of servers are not known. drafts: {drafter: how it drafts}, as far as that is known.
    temperatures: that steps were timed at, of each point's draft_ms and overhead_ms, then of `sampled`; empty where that is not known.
    """

    target: TargetInfo
    dtype: str | None
    points: tuple[CostPoint, ...]
    nodes: dict[str, dict[str, int]]
    weights_bytes: int | None
    bandwidth: float | None
    hardware: Hardware | None
    versions: dict[str, str]
    command: str
    commit: str | None
    date: str
    servers: tuple[TimedServer, ...] = ()
    too_large: tuple[tuple[int, int], ...] = ()
    drafts: dict[str, DraftInfo] = field(default_factory=dict)
    temperatures: tuple[float, ...] = field(default=(), metadata=LATER)
    schema_version: int = 4

    @property
    def place(self) -> str:
        """Where the costs are of, in words."""
        if self.hardware is not None:
            return self.hardware.gpu or self.hardware.cpu
        return f"running servers ({', '.join(f'{one.engine} at {one.url}' for one in self.servers)})"

    @property
    def batches(self) -> list[int]:
        """The batch sizes, ascending."""
        return sorted({point.batch for point in self.points})

    @property
    def contexts(self) -> list[int]:
        """The contexts, ascending."""
        return sorted({point.context for point in self.points})

    @property
    def drafters(self) -> list[str]:
        """The drafters that were timed at every point."""
        return [name for name in self.points[0].drafters if all(name in point.drafters for point in self.points)]

    @property
    def contradictions(self) -> dict[tuple[int, int], str]:
        """The (batch, context) whose times cannot be right, as another context at the same batch shows, ascending, and how, a clause.

        A pass and a draft take no less time behind more tokens. What a round spends besides grows no faster than they do. What else
        runs on the machine only adds time, so the dearer of the two places is the wrong one.
        """
        dearer: dict[tuple[int, int], str] = {}
        for batch, name in product(self.batches, (ALONE, *self.drafters)):
            points = [point for point in self.points if point.batch == batch]
            costs = [(point, *self._parts(points, point, name)) for point in points]
            for (one, parts, rest), (other, fewer, less) in permutations(costs, 2):
                whose = f"{name}'s" if name else "the target alone's"
                if one.context < other.context and parts > (1 + _APART) * fewer:
                    what, ms = f"{whose} round", (parts, fewer)
                elif rest - less > _APART * (fewer + less) + max(0.0, parts - fewer):
                    what, ms = f"{whose} overhead", (rest, less)
                else:
                    continue
                text = f"{what} takes {ms[0]:.3g} ms behind {one.context} tokens and {ms[1]:.3g} behind {other.context}"
                dearer.setdefault((batch, one.context), f"at batch {batch} {text}")
        return dict(sorted(dearer.items()))

    def _parts(self, points: Sequence[CostPoint], point: CostPoint, name: str) -> tuple[float, float]:
        """Return what the steps of a round take at a point, of the longest draft that all `points` have, and what the rest does."""
        if point.round_ms:
            return point.round_ms[name][max(point.round_ms[name], key=int)], 0.0
        if name == ALONE:
            return point.verify(1), point.overhead_ms[name]
        k = min(max(map(int, one.draft_ms[name])) for one in points)
        return point.verify(self.tokens(name, k)) + point.draft(name, k), point.overhead_ms[name]

    def at(self, batch: int, context: int, temperature: float = 0.0) -> CostPoint | None:
        """Return the costs at a measured batch and context, None where these did not fit."""
        return next((p.at(temperature) for p in self.points if (p.batch, p.context) == (batch, context)), None)

    def times(self, temperature: float) -> bool:
        """Return whether steps were timed as that temperature needs them: at 0, or anywhere above it. True where nobody knows."""
        return not self.temperatures or any((t > 0) == (temperature > 0) for t in self.temperatures)

    def lacks(self, places: Set[tuple[int, int]]) -> bool:
        """Return whether a (batch, context) of `places` was never tried."""
        return bool(places - {(p.batch, p.context) for p in self.points} - set(self.too_large))

    def settled(self, measure: Callable[[int, int], CostPoint], places: Collection[tuple[int, int]]) -> "CostTable":
        """Return the table with those of `places` that contradict others measured again, where that found them cheaper."""
        again = {place: measure(*place) for place in self.contradictions if place in places}
        points = (min(p, again.get((p.batch, p.context), p), key=lambda p: p.total_ms) for p in self.points)
        return replace(self, points=tuple(points))

    def only(self, places: Set[tuple[int, int]]) -> "CostTable":
        """Return the table without what it holds of other (batch, context)."""
        points = tuple(point for point in self.points if (point.batch, point.context) in places)
        return replace(self, points=points, too_large=tuple(place for place in self.too_large if place in places))

    def middle(self, batch: int) -> CostPoint:
        """Return the costs at the middle one of the contexts that were measured at a batch of the table."""
        points = sorted((point for point in self.points if point.batch == batch), key=lambda point: point.context)
        return points[len(points) // 2]

    def tokens(self, drafter: str, k: int) -> int:
        """Return the tokens of the target's pass over a draft of length `k`, the root included."""
        return self.nodes.get(drafter, {}).get(str(k), k + 1)

    @property
    def share_of_bandwidth(self) -> float | None:
        """How near the target alone is to its floor at the smallest batch and context: the time it takes to read its weights
        once, over its pass. Far below 1, a slow baseline flatters every speedup."""
        first = self.at(self.batches[0], self.contexts[0])
        if self.bandwidth is None or self.weights_bytes is None or first is None:
            return None
        return 1000 * self.weights_bytes / self.bandwidth / first.verify(1)


def read_cost_table(path: str | Path) -> CostTable:
    """Read and check a costs.json. Raises UserError for what is none, and for costs that are no positive numbers."""
    value = read_json(path, "give the path of a table that `draftsmith costs` wrote")
    table = read_current(CostTable, value, str(path), "write the table again with `draftsmith costs --output FILE`")
    if not table.points:
        raise UserError(f"{path}: 'points' is empty: write the table again with `draftsmith costs --output FILE`.")
    if bool(table.servers) == (table.hardware is not None):
        raise UserError(f"{path} is of a machine or of 'servers', one of the two: write the table again.")
    for number, point in enumerate(table.points):
        if flaw := next(_flaws(point, whole=bool(table.servers)), None):
            raise UserError(f"{path}: 'points[{number}]' {flaw}: write the table again with `draftsmith costs`.")
    if table.bandwidth is not None and table.bandwidth <= 0:
        raise UserError(f"{path}: 'bandwidth' is {table.bandwidth:g}, which no memory has: write the table again.")
    return table


def _flaws(point: CostPoint, *, whole: bool) -> Iterator[str]:
    """Yield, a clause each, which costs are no positive numbers, or lack a part: `whole` rounds, or verify_ms and the others."""
    if point.batch < 1 or point.context < 1:
        yield f"is for batch {point.batch} and context {point.context}, which must be at least 1"
    if point.sampled is not None:
        yield from _flaws(point.at(1.0), whole=whole)
    kinds = {f"{kind}.{n}".rstrip("."): c for kind in ("draft_ms", "round_ms") for n, c in getattr(point, kind).items()}
    for name, costs in (kinds if whole else {"verify_ms": point.verify_ms, **kinds}).items():
        least = 0 if name == "round_ms" else 1  # the target alone
        for size in costs:
            if not (size.isascii() and size.isdecimal() and int(size) >= least):
                yield f"has {name} by {size!r}"
        if not costs:
            yield f"has no {name}"
        for size, ms in costs.items():
            if ms <= 0:
                yield f"says that {name} of {size} takes {ms:g} ms, which is no time"
    parts = point.verify_ms or point.draft_ms or point.overhead_ms
    if bool(parts) == whole or bool(point.round_ms) != whole:
        yield f"must have {'round_ms alone' if whole else 'no round_ms'}, as the table's 'servers' say"
    alone = "0" in point.round_ms.get(ALONE, {}) if whole else "1" in point.verify_ms and ALONE in point.overhead_ms
    if not alone:
        yield "lacks the costs of the target alone"
    for kind in ("admit_ms",) if whole else ("admit_ms", "overhead_ms"):
        held: dict[str, float] = getattr(point, kind)
        for name in sorted(set(point.drafters) - held.keys()):
            yield f"lacks {kind} of {name}"
        for name, ms in held.items():
            if ms < 0:
                yield f"says that {kind} of {name!r} is {ms:g} ms, below zero"


def write_cost_table(path: Path, table: CostTable) -> None:
    """Write the table atomically."""
    values = asdict(table)
    write_json(path, {"schema_version": values.pop("schema_version"), **values})


def check_fits(table: CostTable, source: str, result: Result) -> None:
    """Raise UserError where a table is of another target or dtype than a result, was not timed as warm as it, knows none of its
    drafters, or another one under the same name."""
    target, dtype, drafters = result.target, result.settings.dtype, result.drafters
    if table.target.fingerprint != target.fingerprint:
        raise UserError(
            f"{source} holds the costs of another target ({table.target.path}, {table.target.fingerprint}) than the result "
            f"({target.path}, {target.fingerprint}): measure them again with `draftsmith costs`."
        )
    if table.dtype is not None and table.dtype != dtype:
        raise UserError(
            f"{source} holds the costs in {table.dtype}, but the result was measured in {dtype}: measure the costs with "
            f"--evaluate.dtype {dtype}, or evaluate in {table.dtype}."
        )
    if not table.times(temperature := result.settings.temperature):
        known, both = " and ".join(f"{t:g}" for t in table.temperatures), sorted({*table.temperatures, temperature})
        raise UserError(
            f"{source} was timed at temperature {known} alone, but the result is of temperature {temperature:g}, where drafting costs "
            f"something else: measure the costs of both with `draftsmith costs --evaluate.temperatures '{both}'`."
        )
    if not set(table.drafters) & set(drafters):
        raise UserError(
            f"{source} holds the costs of {', '.join(table.drafters) or 'no drafter'}, but the result is of "
            f"{', '.join(drafters)}: measure the costs with the same evaluate.drafts."
        )
    for name, timed in table.drafts.items():
        draft = drafters[name].draft if name in drafters else None
        if draft is not None and (apart := timed.unlike(draft)):
            raise UserError(
                f"{source} holds the costs of another {name} than the result's: it has {apart}. Measure the costs with the head of "
                "the result (`draftsmith costs`, with its recipe), or evaluate the other head."
            )
