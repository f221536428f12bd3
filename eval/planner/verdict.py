"""The verdict: switch speculation on or leave it off, with which draft length, and the figure that decides.

It tells apart what looks alike in a table: a head that learned too little, a draft length that is wrong, costs that no head could
earn back, and a clock that cannot be trusted. K: num_speculative_tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from draftsmith.eval.planner.checks import QUIET, Check, Flaw, find_flaws
from draftsmith.eval.planner.plan import PAYS, Option, Plan, same_draft
from draftsmith.eval.training.history import UNTAUGHT

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
    best = options[0]
    gains, timed = plan.gains(best)
    flaws = list(find_flaws(plan, best, checks, timed=timed))
    said = {flaw.what for flaw in flaws}
    off = max((c for c in checks if c.far and c.text not in said), key=lambda c: abs(c.difference), default=None)
    doubts = [*doubts, *([off.text] if off else [])]
    reasons = [*_figures(plan, best), *(f"The clock: {doubt}." for doubt in doubts)]
    if others := [one.text for one in plan.table.contradictions if one.text not in said]:
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
    if max(gains) >= PAYS:
        return _deploy(plan, best, options, gains, "measured" if timed else "predicted", reasons)
    return _keep_off(plan, best, max(gains), rising, reasons, taught=taught)


def _deploy(
    plan: Plan, best: Option, options: Sequence[Option], gains: Sequence[float], how: str, reasons: list[str]
) -> Verdict:
    temperatures = [r.settings.temperature for r in plan.results]
    speeds = (
        ", ".join(f"{gain:.2f}x at temperature {t:g}" for gain, t in zip(gains, temperatures, strict=True))
        + f" ({how})"
    )
    name, k = best.drafter, best.num_speculative_tokens
    reasons += [
        f"At temperature {t:g} it is slower than the target alone ({gain:.2f}x): leave it off there."
        for gain, t in zip(gains, temperatures, strict=True)
        if gain < 1
    ]
    crossing = next((batch for batch in plan.table.batches if not _pays(plan, name, batch)), None)
    if crossing is not None:
        reasons.append(f"From batch {crossing} on the target alone is as fast: see the table by batch.")
    own = next((o for o in options if o.drafter == name and o.num_speculative_tokens == _used(plan, name)), None)
    gain = 1.0 if own is None else plan.gain_over(best, own)
    if own is not None and not same_draft(own, best) and gain >= _WORTH_CHANGING:
        way = "Lower" if k < own.num_speculative_tokens else "Raise"
        how = f"{way} the draft length of {name} to {k} and deploy it"
        if plan.tree(best) is not None:
            how = f"Cut {name} to {plan.size(best)} and deploy it"
        text = f"{how}: {speeds}; {gain:.2f} times as fast as with {own.num_speculative_tokens}."
        return Verdict(Action.CHANGE_K, text, tuple(reasons), best)
    return Verdict(Action.DEPLOY, f"Deploy {name} with {plan.size(best)}: {speeds}.", tuple(reasons), best)


def _pays(plan: Plan, drafter: str, batch: int) -> bool:
    """Return whether a drafter pays at a batch, as far as that was measured."""
    options = [o for o in plan.over_temperatures(batch) if o.drafter == drafter]
    return not options or max(plan.speedups(options[0], batch)) >= PAYS


def _used(plan: Plan, drafter: str) -> int | None:
    """Return the draft length that the results were decoded with."""
    draft = plan.results[0].drafters[drafter].draft
    return draft.num_speculative_tokens if draft is not None else None


def _keep_off(
    plan: Plan, best: Option, gain: float, rising: float | None, reasons: list[str], *, taught: bool
) -> Verdict:
    """Leave speculation off, and say which tau or which cost would make the best draft pay."""
    cost, k, tau = best.cost, best.num_speculative_tokens, best.tau
    needed = max(PAYS * cost.tau_needed, tau * PAYS / gain)  # also where it was timed slower than its costs say
    reasons.append(f"To pay ({PAYS}x), tau at K = {k} would have to be {needed:.2f}; it is {tau:.2f}.")
    if cost.verify is None or cost.draft is None:
        reasons.append(f"Or a round {cost.total_at_most(tau, PAYS):.3g} ms; it takes {cost.total:.3g}.")
    else:
        verify, draft = cost.verify_at_most(tau, PAYS), cost.draft_at_most(tau, PAYS)
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
