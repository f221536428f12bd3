"""The plan: tokens per second of every draft, slice, batch and context, from measured costs and exact acceptance; and its memory.

Acceptance is a property of target, head and text, so it is taken from result.json; costs are a property of the machine, so they
are taken from a table, of this machine or of another one. Their product is what a server would reach:

    tokens/s = batch * tau(K) / (target pass over the draft + drafting K tokens + overhead)

Of running servers a round of K tokens was timed as a whole, which then stands below the line. The accepted length tau counts the
bonus token, so the target alone has tau 1 (Leviathan et al. 2023, section 3.3). K: num_speculative_tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean

from draftsmith.eval.clocks.cost_table import CostPoint, CostTable, between
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.results.metrics import taus_by_k
from draftsmith.eval.results.result import OVERALL, DrafterResult, Measures, Pick, Result, TargetInfo


@dataclass(frozen=True)
class RoundCost:
    """What a round costs, in milliseconds, or in any other unit that all four share.

    alone: a token of the target alone. verify: the target's pass over a draft. draft: proposing it. overhead: everything else between
    two rounds. Where a round was timed as a whole, verify and draft are None and overhead is all of it.
    """

    alone: float
    verify: float | None
    draft: float | None
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """The whole round."""
        return (self.verify or 0) + (self.draft or 0) + self.overhead

    @property
    def tau_needed(self) -> float:
        """The accepted length at which the round is as fast as the target alone."""
        return self.total / self.alone

    def speedup(self, tau: float) -> float:
        """Return decoding speed over that of the target alone."""
        return tau / self.tau_needed

    def slack(self, tau: float, speedup: float) -> float:
        """Return how much more a round may cost for that speedup; negative where it costs too much."""
        return tau * self.alone / speedup - self.total


PAYS = 1.05
"""A draft pays from this speedup on: a smaller gain is hardly worth a second model to serve."""


@dataclass(frozen=True)
class Option:
    """A draft at one place. cost: of its round; tau: its exact accepted length; speedup: over the target alone there."""

    drafter: str
    num_speculative_tokens: int
    cost: RoundCost
    tau: float

    @property
    def speedup(self) -> float:
        """Decoding speed over that of the target alone."""
        return self.cost.speedup(self.tau)


@dataclass(frozen=True)
class Cell:
    """One place: a temperature, a slice, a batch and a context, with every draft that was simulated and timed."""

    temperature: float
    slice: str
    batch: int
    context: int
    alone_ms: float
    options: tuple[Option, ...]

    @property
    def best(self) -> Option:
        """The fastest draft, whether it pays or not."""
        return max(self.options, key=lambda option: option.speedup)

    @property
    def pays(self) -> bool:
        """Whether the fastest draft is worth it."""
        return self.best.speedup >= PAYS

    @property
    def alone_tok_s(self) -> float:
        """Tokens per second of the target alone, all rows together."""
        return 1000 * self.batch / self.alone_ms

    def tok_s(self, option: Option) -> float:
        """Tokens per second with a draft, all rows together."""
        return 1000 * self.batch * option.tau / option.cost.total


@dataclass(frozen=True)
class Plan:
    """Results of one target at several sampling settings, and the costs of a machine. Every drafter of a table that the results
    know is planned for."""

    results: tuple[Result, ...]
    table: CostTable

    @property
    def batch(self) -> int:
        """The batch that the headline is for: that of timed results where the table has it, else the table's smallest."""
        first = self.results[0]
        # In a simulation the batch says how many answers were made together, no more.
        own = first.settings.batch if first.costs is not None else None
        return own if own in self.table.batches else self.table.batches[0]

    @property
    def context(self) -> int:
        """The context that the headline is for: the middle one of those that fit at its batch."""
        return self.table.middle(self.batch).context

    @property
    def slices(self) -> list[str]:
        """The slices, OVERALL first."""
        names = (name for result in self.results for d in result.drafters.values() for name in d.slices)
        return [OVERALL, *dict.fromkeys(names)]

    def cell(
        self, result: Result, slice_name: str = OVERALL, batch: int | None = None, context: int | None = None
    ) -> Cell | None:
        """Return what the drafts bring at one place; None where the costs were not measured, or nothing was simulated."""
        rows, length = batch or self.batch, context or self.context
        if (point := self.table.at(rows, length, result.settings.temperature)) is None:
            return None
        options = tuple(self._options(result, slice_name, point))
        return Cell(result.settings.temperature, slice_name, rows, length, point.alone_ms, options) if options else None

    @property
    def own(self) -> str:
        """The name of the run's own head, which is the first drafter."""
        return next(iter(self.results[0].drafters))

    @property
    def headline(self) -> list[Cell]:
        """The headline's place at every temperature, over all slices."""
        return [cell for result in self.results if (cell := self.cell(result)) is not None]

    def cells(self) -> Iterator[Cell]:
        """Yield every place: temperature, slice, batch, context."""
        for result in self.results:
            for slice_name in self.slices:
                for point in self.table.points:
                    if (cell := self.cell(result, slice_name, point.batch, point.context)) is not None:
                        yield cell

    def _options(self, result: Result, slice_name: str, point: CostPoint) -> Iterator[Option]:
        for name in self.table.drafters:
            if (drafter := result.drafters.get(name)) is None:
                continue
            measures, draft = drafter.at(slice_name), drafter.draft
            lengths = dict(taus(measures, decoded_length(drafter)) if measures else ())
            # What engines draft whatever they are told is all that can be planned.
            if draft is not None and draft.tree is None and draft.engine_tokens in lengths:
                lengths = {k: tau for k, tau in lengths.items() if k == draft.engine_tokens}
            for k, tau in lengths.items():
                cost = round_cost(self.table, point, name, k)
                if cost is not None:
                    yield Option(name, k, cost, tau)

    def over_temperatures(self, batch: int, slice_name: str = OVERALL) -> list[Option]:
        """Return the drafts that every result has at a batch and the headline's context, best first.

        A server has one draft length for all temperatures, so they are sorted by the geometric mean of their speedups. Their tau and
        cost are those of the first result.
        """
        cells = [cell for r in self.results if (cell := self.cell(r, slice_name, batch)) is not None]
        by_key = [{(o.drafter, o.num_speculative_tokens): o for o in cell.options} for cell in cells]
        shared = [key for key in by_key[0] if all(key in one for one in by_key)] if by_key else []
        shared.sort(key=lambda key: -geometric_mean([one[key].speedup for one in by_key]))
        return [by_key[0][key] for key in shared]

    def tree(self, option: Option) -> str | None:
        """Return the name of the tree that an option drafts, None for a chain."""
        draft = self.results[0].drafters[option.drafter].draft
        return None if draft is None else draft.tree

    def size(self, option: Option) -> str:
        """Return in words how much an option drafts."""
        k = option.num_speculative_tokens
        if self.tree(option) is None:
            return f"{k} drafted tokens"
        return f"{self.table.tokens(option.drafter, k) - 1} drafted tokens on {k} level{'s' * (k > 1)}"

    def served_with(self, option: Option, batch: int, slice_name: str = OVERALL) -> list[Option]:
        """Return what a server that was started with an option can draft, best first. A chain can be cut, a tree cannot."""
        name, most, tree = option.drafter, option.num_speculative_tokens, self.tree(option)
        drafts = [o for o in self.over_temperatures(batch, slice_name) if o.drafter == name]
        return [o for o in drafts if (o.num_speculative_tokens <= most if tree is None else same_draft(o, option))]

    def speedups(self, option: Option, batch: int, slice_name: str = OVERALL) -> list[float]:
        """Return the speedup of a draft at each result's temperature."""
        speedups = []
        for result in self.results:
            cell = self.cell(result, slice_name, batch)
            speedups += [o.speedup for o in (cell.options if cell else ()) if same_draft(o, option)]
        return speedups

    def predict(self, result: Result, option: Option, tau: float) -> float:
        """Return the speedup to expect of a timed run at the headline's place, with answers as long as the result's.

        There the drafter also reads every prompt, which the target has read by its first token.
        """
        point, overall = self.table.at(self.batch, self.context), result.drafters[option.drafter].overall
        assert point is not None
        # Greedy repeats are all alike, and acceptance is counted on one.
        answers = overall.prompts * (result.settings.repeats if result.settings.temperature else 1)
        tokens = (overall.tokens or 0) / answers
        # All rows of a batch read their prompts together.
        admitted = point.admit_ms[option.drafter] * tau / tokens if tokens else 0.0
        return replace(option.cost, overhead=option.cost.overhead + admitted).speedup(tau)

    def measured(self, result: Result, option: Option, slice_name: str = OVERALL) -> float | None:
        """Return a draft's measured speedup at the headline's batch; None if it was not timed there on the machine of the costs.

        Other lengths than the decoded one were timed on a few prompts: by as much as the decoded one was faster on all.
        """
        drafter = result.drafters.get(option.drafter)
        if self.table.hardware != result.hardware or self.batch != result.settings.batch or drafter is None:
            return None
        measures = drafter.overall if slice_name == OVERALL else drafter.slices.get(slice_name)
        whole, k = None if measures is None else measures.speedup, decoded_length(drafter)
        if whole is None or k == option.num_speculative_tokens:
            return whole
        pick, own = _picked(result, option), _picked(result, replace(option, num_speculative_tokens=k or 0))
        return whole * pick / own if pick and own and slice_name == OVERALL else None

    def gain_over(self, option: Option, other: Option) -> float:
        """Return the speed of a draft over that of another one, as a geometric mean over temperatures: measured where both were timed in
        turns, on the same prompts, else predicted from costs."""
        ratios = []
        speeds = zip(self.speedups(option, self.batch), self.speedups(other, self.batch), strict=True)
        for result, (first, second) in zip(self.results, speeds, strict=True):
            picks = (_picked(result, option), _picked(result, other)) if self.table.hardware == result.hardware else ()
            ratios.append(picks[0] / picks[1] if len(picks) == 2 and picks[0] and picks[1] else first / second)
        return geometric_mean(ratios)

    def gains(self, option: Option, slice_name: str = OVERALL) -> tuple[list[float], bool]:
        """Return a draft's speedup at each result's temperature, at the headline's place, and whether these are measured.

        They are predicted where not every temperature was timed.
        """
        timed = [self.measured(result, option, slice_name) for result in self.results]
        known = [gain for gain in timed if gain is not None]
        return (known, True) if len(known) == len(timed) else (self.speedups(option, self.batch, slice_name), False)

    def paying(self, option: Option) -> "Plan | None":
        """Return the plan of the temperatures at which a draft pays, from the lowest up to the first where it does not."""
        gains = dict(zip((r.settings.temperature for r in self.results), self.gains(option)[0], strict=True))
        slow = min((t for t in gains if gains[t] < PAYS), default=math.inf)
        results = tuple(r for r in self.results if r.settings.temperature < slow)
        return Plan(results, self.table) if results else None


def same_draft(one: Option | Pick, other: Option | Pick) -> bool:
    """Whether two are of the same drafter with the same draft length."""
    return (one.drafter, one.num_speculative_tokens) == (other.drafter, other.num_speculative_tokens)


def _picked(result: Result, option: Option) -> float | None:
    """Return the speedup of a draft if the evaluation timed it to check its plan, else None."""
    return next((pick.speedup for pick in result.picks if same_draft(pick, option)), None)


def decoded_length(drafter: DrafterResult) -> int | None:
    """Return the draft length that a drafter was decoded with, None where that is not recorded."""
    return drafter.draft.num_speculative_tokens if drafter.draft else None


def taus(measures: Measures, decoded_k: int | None) -> list[tuple[int, float]]:
    """Return (K, tau) of a drafter: for every simulated K; without a simulation, for the K that was decoded."""
    simulated = [*taus_by_k(measures).items()]
    if not simulated and measures.tau is not None and decoded_k is not None:
        return [(decoded_k, measures.tau)]
    return simulated


def round_cost(table: CostTable, point: CostPoint, drafter: str, k: int) -> RoundCost | None:
    """Return the cost of a round that drafts k tokens at one batch and context; None outside of what was timed.

    Steps were timed up to a largest pass and a longest draft. Whole rounds, of servers, were timed from a shortest to a longest
    draft; those between follow by straight lines.
    """
    if rounds := point.round_ms.get(drafter):
        lengths = sorted(map(int, rounds))
        measured = lengths[0] <= k <= lengths[-1]
        return RoundCost(point.alone_ms, None, None, between(rounds, k)) if measured else None
    tokens = table.tokens(drafter, k)
    if tokens > max(map(int, point.verify_ms)) or k > max(map(int, point.draft_ms[drafter])):
        return None
    return RoundCost(point.alone_ms, point.verify(tokens), point.draft(drafter, k), point.overhead_ms[drafter])


def break_even_tokens(plan: Plan, option: Option) -> int | None:
    """Return the shortest answer, in tokens, for which drafting saves time, as the drafter must read the prompt first.

    Of several temperatures the one with the longest such answer counts. None where drafting is slower at any of them.
    """
    point = plan.table.at(plan.batch, plan.context)
    fewest: list[int] = []
    for cell in plan.headline:
        for own in (o for o in cell.options if same_draft(o, option)):
            if point is None or own.speedup <= 1:
                return None
            saved = cell.alone_ms * (1 - 1 / own.speedup)
            fewest.append(2 + int(point.admit_ms[option.drafter] / saved))
    return max(fewest, default=None)


def by_batch(plan: Plan, chosen: Option) -> list[tuple[int, int, int]]:
    """Return (first batch, last batch, K) as vLLM takes them, with K = 0 where the target alone is faster.

    A batch between two measured ones gets the K of the larger, which is never too long. chosen: the draft of the plan's own batch.
    No batch gets a longer one, and a tree is drafted whole or not at all.
    """
    table: list[tuple[int, int, int]] = []
    first = 1
    for batch, k in drafted_at(plan, chosen).items():
        if table and table[-1][2] == k:
            table[-1] = (table[-1][0], batch, k)
        else:
            table.append((first, batch, k))
        first = batch + 1
    return table


def drafted_at(plan: Plan, chosen: Option) -> dict[int, int]:
    """Return how much a server that was started with `chosen` drafts at each batch that was measured, 0 where that does not pay."""
    drafted = {}
    for batch in plan.table.batches:
        if options := plan.served_with(chosen, batch):
            best = chosen if batch == plan.batch else options[0]
            pays = batch == plan.batch or geometric_mean(plan.speedups(best, batch)) >= PAYS
            drafted[batch] = best.num_speculative_tokens if pays else 0
    return drafted


@dataclass(frozen=True)
class Memory:
    """Bytes held while a batch is decoded. What passes work with (states, logits, masks) comes on top.

    target, drafter: weights; a head's are those that it was trained with, as what it shares with the target is the target's.
    target_cache: B * (L + 1) * c, a text and the token read next. draft_entries: B * N * c, which the target's cache holds for a
    draft. draft_cache: B * (L + S) * d.
    """

    target: int
    target_cache: int
    draft_entries: int
    drafter: int
    draft_cache: int

    @property
    def alone(self) -> int:
        """What the target takes without speculation."""
        return self.target + self.target_cache

    @property
    def drafted(self) -> int:
        """What both take together."""
        return self.alone + self.draft_entries + self.drafter + self.draft_cache


def memory_at(target: TargetInfo, draft: DraftInfo | None, batch: int, context: int) -> Memory | None:
    """Return the memory at a batch of texts that are `context` tokens long with their answers; None where a size was not recorded."""
    if draft is None or target.weight_bytes is None or target.cache_bytes is None:
        return None
    if draft.weight_bytes is None or draft.cache_bytes is None or draft.cache_slots is None:
        return None
    return Memory(
        target=target.weight_bytes,
        target_cache=batch * (context + 1) * target.cache_bytes,
        draft_entries=batch * draft.nodes * target.cache_bytes,
        drafter=draft.weight_bytes,
        draft_cache=batch * (context + draft.cache_slots) * draft.cache_bytes,
    )
