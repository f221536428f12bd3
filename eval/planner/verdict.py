"""The verdict: switch speculation on or leave it off, with which draft length, the figure that decides, and what speaks against it.

It tells apart what looks alike in a table: a head that learned too little, a draft length that is wrong, costs that no head could
earn back, and a clock that cannot be trusted. K: num_speculative_tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from statistics import geometric_mean

from draftsmith.eval.planner.plan import PAYS, Option, Plan, decoded_length, drafted_at, same_draft
from draftsmith.eval.results.intervals import FEWEST_PROMPTS
from draftsmith.eval.results.result import Result
from draftsmith.eval.training.history import UNTAUGHT

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
    if contradicted := plan.table.contradictions.get((plan.batch, plan.context)):
        yield Flaw(contradicted, costs)


_CLOSE = 0.15
"""A speedup so near to what pays may be on the other side of it on a quiet machine."""
_WORTH_CHANGING = 1.03
"""Another draft length is worth a restart from this gain on."""


class Action(StrEnum):
    """What to do next."""

    DEPLOY = "deploy"
    CHANGE_K = "change the draft length"
    MORE_DATA = "train on more data"
    DO_NOT_DEPLOY = "do not deploy"
    MEASURE_AGAIN = "measure again"


@dataclass(frozen=True)
class Verdict:
    """headline: one sentence with one number. reasons: what it rests on, a sentence each. option: the draft it speaks of; its tau
    and cost are those at the first result's temperature."""

    action: Action
    headline: str
    reasons: tuple[str, ...]
    option: Option


def decide(
    plan: Plan,
    *,
    checks: Sequence[Check] = (),
    doubts: Sequence[str] = (),
    rising: float | None = None,
    heldout: float | None = None,
) -> Verdict | None:
    """Return the verdict at the plan's batch and context; None where no draft was both simulated and timed.

    checks: predicted against measured. doubts: why the clocks of the results cannot be trusted, besides what
    makes flaws. rising: by how much tau is forecast to
    grow with twice the data. heldout: tau of the run's own head on its held-out answers. Both None where nobody knows.
    """
    options = plan.over_temperatures(plan.batch)
    if not options:
        return None
    best = settled(plan, options)
    gains, timed = plan.gains(best)
    flaws = list(find_flaws(plan, best, checks, timed=timed))
    said = {flaw.what for flaw in flaws}
    off = max((c for c in checks if c.far and c.text not in said), key=lambda c: abs(c.difference), default=None)
    doubts = [*doubts, *([off.text] if off else [])]
    reasons = [*_figures(plan, best), *(f"The clock: {doubt}." for doubt in doubts)]
    if others := [text for text in plan.table.contradictions.values() if text not in said]:
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        reasons.append(f"Costs contradict each other: {others[0]}{more}.")
    if doubts and any(abs(gain / PAYS - 1) < _CLOSE for gain in gains):
        # Far from the threshold a busy machine decides nothing.
        flaws.append(Flaw("the clock cannot be trusted, and the speedup is near to what pays", QUIET))
    # A head that learned next to nothing pays by no clock; but few prompts may be unlike those that it learned from.
    taus = [o.tau for cell in plan.headline for o in cell.options]
    # History speaks of the run's own head.
    taught = best.drafter == plan.own and heldout is not None and heldout >= UNTAUGHT
    if flaws and (taught or max(taus) >= UNTAUGHT or max(gains) >= PAYS):
        by_remedy = {flaw.remedy: [f.what for f in flaws if f.remedy == flaw.remedy] for flaw in flaws}
        causes = "; ".join(f"{', '.join(causes_of)} ({remedy})" for remedy, causes_of in by_remedy.items())
        return Verdict(Action.MEASURE_AGAIN, f"Measure again before you decide: {causes}.", tuple(reasons), best)
    reasons += [f"{flaw.what[0].upper()}{flaw.what[1:]}: {flaw.remedy}." for flaw in flaws]
    if (paying := plan.paying(best)) is not None:
        return _deploy(plan, paying, best, options, gains, "measured" if timed else "predicted", reasons)
    temperatures = [result.settings.temperature for result in plan.results]
    reasons += [
        f"At temperature {t:g} alone it would pay ({gain:.2f}x): evaluate with such evaluate.temperatures only to plan for it."
        for gain, t in zip(gains, temperatures, strict=True)
        if gain >= PAYS
    ]
    return _keep_off(plan, best, gains[temperatures.index(min(temperatures))], rising, reasons, taught=taught)


def settled(plan: Plan, options: Sequence[Option]) -> Option:
    """Return the best of some drafts, sorted by what costs predict: of a drafter's lengths that were timed in turns the fastest, of
    drafters that were timed the fastest, and the length that was decoded where another is not worth a restart."""
    first = options[0]
    turns = [
        o
        for o in options
        if o.drafter == first.drafter and any(same_draft(p, o) for r in plan.results for p in r.picks)
    ]
    best = max((first, *turns), key=lambda o: plan.gain_over(o, first))
    own = _decoded(plan, options, best.drafter)
    if own is not None and plan.gains(own)[1]:
        apart = turns and own not in turns  # timed on other prompts than the decoded one
        best = own if apart or plan.gain_over(best, own) < _WORTH_CHANGING else best
    if not plan.gains(best)[1]:
        return best
    decoded = [_decoded(plan, options, name) for name in dict.fromkeys(o.drafter for o in options)]
    timed = [o for o in decoded if o is not None and plan.gains(o)[1]]
    return max((best, *timed), key=lambda o: geometric_mean(plan.gains(o)[0]))


def _decoded(plan: Plan, options: Sequence[Option], name: str) -> Option | None:
    """Return a drafter's draft of the length that it was decoded with."""
    used = decoded_length(plan.results[0].drafters[name])
    return next((o for o in options if (o.drafter, o.num_speculative_tokens) == (name, used)), None)


def _deploy(
    plan: Plan,
    paying: Plan,
    best: Option,
    options: Sequence[Option],
    gains: Sequence[float],
    how: str,
    reasons: list[str],
) -> Verdict:
    """paying: the plan of the temperatures at which the best draft pays."""
    temperatures = [r.settings.temperature for r in plan.results]
    speeds = (
        ", ".join(f"{gain:.2f}x at temperature {t:g}" for gain, t in zip(gains, temperatures, strict=True))
        + f" ({how})"
    )
    name, k = best.drafter, best.num_speculative_tokens
    pays = {r.settings.temperature for r in paying.results}
    reasons += [
        f"At temperature {t:g} it is slower than the target alone ({gain:.2f}x): leave it off there."
        if gain < 1
        else f"At temperature {t:g} leave it off ({gain:.2f}x), as it does not pay there or at a lower one."
        for gain, t in zip(gains, temperatures, strict=True)
        if t not in pays
    ]
    drafted = drafted_at(paying, best)
    if below := list(takewhile(lambda batch: batch < plan.batch and not drafted[batch], drafted)):
        reasons.append(f"Up to batch {below[-1]} the target alone is as fast: see the table by batch.")
    crossing = next((batch for batch, tokens in drafted.items() if batch > plan.batch and not tokens), None)
    if crossing is not None:
        reasons.append(f"From batch {crossing} on the target alone is as fast: see the table by batch.")
    own = _decoded(plan, options, name)
    gain = 1.0 if own is None else plan.gain_over(best, own)
    if own is not None and not same_draft(own, best) and gain >= _WORTH_CHANGING:
        way = "Lower" if k < own.num_speculative_tokens else "Raise"
        how = f"{way} the draft length of {name} to {k} and deploy it"
        if plan.tree(best) is not None:
            how = f"Cut {name} to {plan.size(best)} and deploy it"
        text = f"{how}: {speeds}; {gain:.2f} times as fast as with {own.num_speculative_tokens}."
        return Verdict(Action.CHANGE_K, text, tuple(reasons), best)
    return Verdict(Action.DEPLOY, f"Deploy {name} with {plan.size(best)}: {speeds}.", tuple(reasons), best)


def _keep_off(
    plan: Plan, best: Option, gain: float, rising: float | None, reasons: list[str], *, taught: bool
) -> Verdict:
    """Leave speculation off, and say which tau or which cost would make the best draft pay."""
    cost, k, tau = best.cost, best.num_speculative_tokens, best.tau
    needed = max(PAYS * cost.tau_needed, tau * PAYS / gain)  # also where it was timed slower than its costs say
    reasons.append(f"To pay ({PAYS}x), tau at K = {k} would have to be {needed:.2f}; it is {tau:.2f}.")
    if cost.verify is None or cost.draft is None:
        reasons.append(f"Or a round {cost.total + cost.slack(tau, PAYS):.3g} ms; it takes {cost.total:.3g}.")
    else:
        verify, draft = (part + cost.slack(tau, PAYS) for part in (cost.verify, cost.draft))
        if verify > cost.alone:
            reasons.append(
                f"Or a target pass over {plan.table.tokens(best.drafter, k)} tokens {verify:.3g} ms; it takes {cost.verify:.3g}, "
                f"where a token alone takes {cost.alone:.3g}."
            )
        reasons.append(
            f"Or drafting {draft:.3g} ms; it takes {cost.draft:.3g}."
            if draft > 0
            else "No draft would be cheap enough at this tau: the target's pass and the loop cost more than it saves."
        )
    where = f"batch {plan.batch}"
    if tau < UNTAUGHT and not taught:
        text = f"Do not deploy {best.drafter}: it has learned next to nothing (tau {tau:.2f})."
        return Verdict(Action.MORE_DATA, text, tuple(reasons), best)
    # A forecast is of the run's own head; no draft of K tokens has a tau above K + 1.
    if best.drafter == plan.own and rising is not None and min(tau + rising, k + 1) >= needed:
        text = (
            f"Train on more data before you deploy: tau is still rising, and {gain:.2f}x at {where} does not pay yet."
        )
        reasons.append(f"Twice the data are forecast to bring {rising:+.2f} tau.")
        return Verdict(Action.MORE_DATA, text, tuple(reasons), best)
    return Verdict(
        Action.DO_NOT_DEPLOY,
        f"Do not deploy: the best draft, {best.drafter} with {plan.size(best)}, reaches {gain:.2f}x at {where}.",
        tuple(reasons),
        best,
    )


def _figures(plan: Plan, best: Option) -> list[str]:
    cost, table = best.cost, plan.table
    if cost.verify is None or cost.draft is None:
        parts = f"as a whole, measured from {table.place}"
    else:
        parts = f"(target {cost.verify:.3g}, draft {cost.draft:.3g}, the rest {cost.overhead:.3g})"
    lines = [
        f"{best.drafter} with K = {best.num_speculative_tokens} has tau {best.tau:.2f}; a round costs {cost.total:.3g} ms {parts}, a "
        f"token of the target alone {cost.alone:.3g} ms."
    ]
    share = table.share_of_bandwidth
    if share is not None:
        flatters = share < 0.5
        lines.append(
            f"The target's own pass reaches {100 * share:.0f}% of the speed at which this machine could read its weights"
            + (": a slow baseline, which flatters every speedup." if flatters else ".")
        )
    return lines
