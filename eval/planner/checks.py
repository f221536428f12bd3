"""What speaks against a decision: predictions that a clock disproved, speeds that cannot be, and too few prompts or repeats.

K: num_speculative_tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftsmith.eval.planner.plan import Option, Plan, same_draft
from draftsmith.eval.results.metrics import FEWEST_PROMPTS
from draftsmith.eval.results.result import Result

QUIET = "--redo evaluate on a quiet machine, with more evaluate.repeats"
"""The remedy for times that cannot be trusted."""
# From where on a clock is doubted: shares of the cores, of the target's speed, of the ideal, and of the time to a first token.
_BUSY, _DRIFT, _IDEAL, _TTFT = 0.15, 0.15, 0.05, 0.25
_ROUNDING = 0.02  # so much above tau a speedup may be
_FAR = 0.1
"""A time that is off by more says that the costs or the turns were held up."""


@dataclass(frozen=True)
class Check:
    """A draft that was planned and then timed. predicted, measured: speedups on the same prompts; spread: of the repeats."""

    temperature: float
    drafter: str
    num_speculative_tokens: int
    predicted: float
    measured: float
    spread: tuple[float, float]

    @property
    def difference(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the prediction is within 5%, or within the spread of the repeats where that is wider."""
        low, high = self.spread
        return abs(self.difference) <= 0.05 or low <= self.predicted <= high

    @property
    def far(self) -> bool:
        """Whether plan and clock contradict each other."""
        return not self.holds and abs(self.difference) > _FAR

    @property
    def text(self) -> str:
        """By how much the plan was off, a clause."""
        how = f"predicted {self.predicted:.2f}x, measured {self.measured:.2f}x"
        return f"the plan is off by {100 * self.difference:+.0f}% for {self.drafter} with K = {self.num_speculative_tokens}, {how}"


@dataclass(frozen=True)
class Flaw:
    """Why nothing can be decided yet, a clause, and what to change."""

    what: str
    remedy: str


def make_checks(plan: Plan) -> list[Check]:
    """Return predicted and measured speedup of the drafts that were timed on the plan's machine: those that the evaluation timed to
    check its plan, or, without any, the decoded ones."""
    checks = []
    for result in plan.results:
        cell, settings = plan.cell(result, batch=result.settings.batch), result.settings
        if cell is None or plan.table.hardware != result.hardware:
            continue
        for option in cell.options:
            key = (settings.temperature, option.drafter, option.num_speculative_tokens)
            picks = [pick for pick in result.picks if same_draft(pick, option)]
            timed = [(pick.tau_simulated, pick.speedup, pick.spread) for pick in picks]
            overall, draft = (getattr(result.drafters[option.drafter], name) for name in ("overall", "draft"))
            if not result.picks and draft is not None and draft.num_speculative_tokens == option.num_speculative_tokens:
                timed = [(option.tau, overall.speedup, overall.speedup_spread)]
            for tau, speedup, spread in timed:
                if tau is not None and speedup is not None and spread is not None:
                    checks.append(Check(*key, plan.predict(result, option, tau), speedup, spread))
    return checks


def clock_faults(result: Result) -> list[tuple[str, bool]]:
    """Why the times of a result should not be quoted, a clause each, and whether it is so far off that nothing can be decided on
    them; empty where nothing is known against them."""
    gains = [(n, d.overall.speedup, d.overall.tau or d.overall.tau_simulated) for n, d in result.drafters.items()]
    gains += [(f"{p.drafter} with K = {p.num_speculative_tokens}", p.speedup, p.tau_simulated) for p in result.picks]
    faults = [
        # A round takes no less than a token of the target alone.
        (f"{name} was faster than its tau allows ({gain:.2f}x at tau {tau:.2f})", True)
        for name, gain, tau in gains
        if gain and tau and gain > (1 + _ROUNDING) * tau
    ]
    if result.clocks is not None and (busy := result.clocks.others) is not None and busy > _BUSY:
        faults.append((f"other programs used {100 * busy:.0f}% of the cores while it was timed", False))
    for name, drafter in result.drafters.items():
        m = drafter.overall
        if m.baseline_tok_s and m.baseline_tok_s_spread:
            low, high = m.baseline_tok_s_spread
            if (drift := (high - low) / m.baseline_tok_s) > _DRIFT:
                faults.append((f"the target alone varied by {100 * drift:.0f}% between repeats", False))
        if m.speedup and m.ideal_speedup and (share := m.speedup / m.ideal_speedup) > 1 + _IDEAL:
            text = f"{name} was faster than its costs allow ({100 * share:.0f}% of the ideal)"
            faults.append((text, share > 1 + _FAR))
        # In a larger batch rows finish at other rounds with drafts, so that other prompts share a prefill.
        alone = result.settings.batch == 1
        if alone and m.ttft_s and m.ttft_baseline_s and abs(m.ttft_s / m.ttft_baseline_s - 1) > _TTFT:
            moved = f"{100 * (m.ttft_s / m.ttft_baseline_s - 1):+.0f}%"
            faults.append(
                (f"the time to the first token moved by {moved} with {name}, which drafting cannot do", False)
            )
    return list(dict.fromkeys(faults))


def find_flaws(plan: Plan, option: Option, checks: Sequence[Check], *, timed: bool) -> Iterator[Flaw]:
    """Yield what makes it too early to decide on a draft. timed: it is decided on by how fast it was."""
    prompts = min(result.drafters[option.drafter].overall.prompts for result in plan.results)
    if prompts < FEWEST_PROMPTS:
        yield Flaw(
            f"{prompts} prompt{'s are' if prompts > 1 else ' is'} too few",
            f"raise evaluate.per_slice or give more evaluate.prompts, for {FEWEST_PROMPTS} at least",
        )
    here = [result for result in plan.results if result.hardware == plan.table.hardware]
    if any(r.settings.repeats == 1 and d.overall.speedup is not None for r in here for d in r.drafters.values()):
        yield Flaw("every system was timed once", "set evaluate.repeats to 3")
    seen = dict.fromkeys(text for result in here for text, far in clock_faults(result) if far)
    own = (option.drafter, option.num_speculative_tokens)
    # What was timed itself does not rest on the predictions of other drafts.
    if far := [c for c in checks if c.far and (not timed or (c.drafter, c.num_speculative_tokens) == own)]:
        seen[max(far, key=lambda check: abs(check.difference)).text] = None
    for text in seen:
        yield Flaw(text, QUIET)
    costs = "measure the costs again on a quiet machine (remove costs.json and evaluate, or draftsmith costs)"
    for one in (o for cell in plan.headline for o in cell.options if same_draft(o, option)):
        if one.speedup > (1 + _ROUNDING) * one.tau:
            name = f"{one.drafter} with K = {one.num_speculative_tokens}"
            yield Flaw(
                f"by its costs {name} would be faster than its tau allows ({one.speedup:.2f}x at tau {one.tau:.2f})",
                costs,
            )
            break
    yield from (Flaw(one.text, costs) for one in plan.table.contradictions if one.place == (plan.batch, plan.context))
