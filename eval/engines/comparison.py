"""What servers that took turns at the same chats come to: percentiles, acceptance, the speedup with its interval, and what was predicted.

With rates at the end that make an engine accept as a hypothetical head would, so that a better head can be timed before it is trained.
vLLM (config/speculative.py, v1/sample/rejection_sampler.py) and llama.cpp (common/speculative.cpp) take the share of all rounds that
accept the i-th drafted token, never rising, one for each; so tau is 1 plus their sum. SGLang (speculative/spec_utils.py) takes tau alone.
Texts are then worth nothing: drafted tokens stay whatever the target says. vLLM 0.32's CPU build refuses (utils/cpu_triton_utils.py);
llama.cpp never accepts a drafted end of text (tools/server/server-context.cpp).
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.engines.load import Answer, Tally
from draftsmith.eval.ledger.counts import LEDGER
from draftsmith.eval.planner.plan import decoded_length, round_cost, taus
from draftsmith.eval.results.intervals import Percentiles, bootstrap_tau
from draftsmith.eval.results.result import DrafterResult
from draftsmith.eval.results.served import Served, ServedAcceptance, ServedLevel, ServedSide
from draftsmith.progress import say

_DIGITS = 6
"""Of injected rates."""
Predict = Callable[[int, ServedAcceptance], tuple[float, float] | None]
"""(concurrency, what a server accepted) -> tau and speedup to expect of it, None where nothing is known of its drafts."""


def make_level(concurrency: int, tallies: Sequence[Tally], predict: Predict | None) -> ServedLevel:
    """Return what a concurrency comes to; the first tally is what the others are compared with."""
    return ServedLevel(concurrency, tuple(_side(concurrency, one, tallies[0], predict) for one in tallies))


def _side(concurrency: int, tally: Tally, first: Tally, predict: Predict | None) -> ServedSide:
    answers = [answer for of_chat in tally.answers.values() for answer in of_chat]
    tokens, timed = sum(a.tokens for a in answers), [a.after_first for a in answers]
    accepted = _acceptance(tally, answers)
    both = [] if tally is first else [(_pace(first, name), _pace(tally, name)) for name in first.answers]
    pairs = [(a, b) for a, b in both if a and b]
    told = predict(concurrency, accepted) if predict and accepted and tally is not first else None
    return ServedSide(
        asked=len(answers) + len(tally.failures) + tally.unfinished,
        answered=len(answers),
        unfinished=tally.unfinished,
        failures=tuple(tally.failures),
        tokens=tokens,
        seconds=tally.seconds,
        tok_s=tokens / tally.seconds if tokens and tally.seconds else None,
        ttft_s=Percentiles.of([a.first for a in answers]),
        latency_s=Percentiles.of([a.last for a in answers]),
        token_s=Percentiles.of([one[0] / one[1] for one in timed if one]),
        wait_s=Percentiles.of([wait for a in answers for wait in a.waits]),
        acceptance=accepted,
        paired=len(pairs),
        speedup=sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None,
        speedup_interval=bootstrap_tau(pairs),
        predicted=told and told[1],
        predicted_tau=told and told[0],
    )


def _pace(tally: Tally, name: str) -> float | None:
    """Return seconds per token after the first of all answers to a chat, None where there are none."""
    timed = [one for answer in tally.answers.get(name, ()) if (one := answer.after_first)]
    return sum(seconds for seconds, _ in timed) / sum(tokens for _, tokens in timed) if timed else None


def _acceptance(tally: Tally, answers: Sequence[Answer]) -> ServedAcceptance | None:
    """Return what a server accepted, as its answers tell it, else its counters; both may know of positions what the other does not."""
    told = [answer.counts for answer in answers if answer.counts is not None]
    counts = sum(told[1:], told[0]) if told else tally.counts
    if counts is None or counts.tau is None:
        return None
    return ServedAcceptance(
        rounds=counts.rounds,
        tau=counts.tau,
        tau_interval=LEDGER[0].interval(told) if told else None,
        drafted=None if counts.drafted is None else counts.drafted / counts.rounds,
        acceptance_at=counts.acceptance_at or (tally.counts.acceptance_at if tally.counts else None),
        by_answers=bool(told),
    )


def predictor(
    costs: CostTable | Served, drafter: str, report: DrafterResult | None, temperature: float = 0.0
) -> Predict:
    """Return what tells the speedup to expect. costs: a table, of the drafter of that name, of its first where that is empty; or servers
    that accepted by injected rates, whose rounds cost the same at every tau. report: whose tau is taken, that which was served where
    there is none. temperature: of the requests.

    Warns of a table that tells nothing of the drafter or the temperature, by which nothing is predicted."""
    known = {} if report is None else dict(taus(report.overall, decoded_length(report)))
    if isinstance(costs, CostTable) and drafter not in costs.drafters:  # or of its weights rounded, or its window
        drafter = next((name for name in costs.drafters if name.startswith(f"{drafter}, ")), drafter)
    fits = isinstance(costs, Served) or _tells(costs, drafter, temperature)

    def tau_needed(rows: int, k: int) -> float | None:
        if isinstance(costs, Served):
            sides = [side for level in costs.levels if level.concurrency == rows for side in level.sides]
            known = [(a, side.speedup) for side in sides if (a := side.acceptance) and side.speedup]
            found = [a.tau / speedup for a, speedup in known if _length(a) == k]
            return median(found) if found else None
        if not fits or rows not in costs.batches:
            return None
        cost = round_cost(costs, costs.middle(rows).at(temperature), drafter or costs.drafters[0], k)
        return None if cost is None else cost.tau_needed

    def predict(rows: int, accepted: ServedAcceptance) -> tuple[float, float] | None:
        k = _length(accepted)
        needed = None if k is None else tau_needed(rows, k)
        tau = accepted.tau if report is None else known.get(k or 0)
        return (tau, tau / needed) if tau and needed else None

    return predict


def _tells(costs: CostTable, drafter: str, temperature: float) -> bool:
    """Return whether a table holds the costs of a drafter at a temperature; else warn."""
    there, what = costs.drafters, ""
    if not there or drafter not in ("", *there):
        what = f"of {', '.join(there) or 'no drafter'} and not of {drafter or 'any'}"
    elif not costs.times(temperature):
        timed = " and ".join(f"{t:g}" for t in costs.temperatures)
        what = f"of temperature {timed} and not of {temperature:g}"
    if what:
        say(
            f"warning: the costs are {what}, so that no speedup is predicted: measure them with the recipe of the head (draftsmith costs)."
        )
    return not what


def _length(accepted: ServedAcceptance) -> int | None:
    """Return how many tokens a round drafts."""
    return None if accepted.drafted is None else round(accepted.drafted)


def rates_for(tau: float, shape: Sequence[float]) -> tuple[float, ...]:
    """Return the share of rounds that accept each drafted token, 1 + their sum is `tau`: those of `shape`, all raised to one power.

    shape: shares that never rise; of 0.5, 0.25, 0.125, ... come those of a head that accepts every token with the same probability. Raises
    UserError for a tau that no power gives.
    """
    low, high = 0.0, 1.0  # the power is middle / (1 - middle), so that all from 0 to infinity are between
    for _ in range(50):
        middle = (low + high) / 2
        raised = [share ** (middle / (1 - middle)) if share else 0.0 for share in shape]
        low, high = (middle, high) if 1 + sum(raised) > tau else (low, middle)
    falling = all(after <= before for before, after in pairwise((1.0, *shape)))
    if not falling or abs(1 + sum(raised) - tau) > 1e-6:
        most = 1 + sum(share > 0 for share in shape)
        why = (
            f"with {most - 1} drafted tokens it is from 1 to {most}"
            if falling
            else "the report's shares of positions rise"
        )
        raise UserError(f"tau {tau:g} cannot be injected, as {why}: name another --tau, or another --draft-length.")
    return tuple(round(share, _DIGITS) for share in raised)


def start_lines(tau: float, rates: Sequence[float]) -> dict[str, str]:
    """Return by engine what is added where it is started with a draft."""
    shown, k = [float(f"{rate:.{_DIGITS}f}") for rate in rates], len(rates)
    vllm = {"num_speculative_tokens": k, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": shown}
    return {
        "vLLM": f"in --speculative-config: {json.dumps(vllm)[1:-1]}",
        "llama.cpp": f"--spec-draft-n-max {k} --spec-draft-n-min 0 --spec-draft-p-min 0 --spec-synth-rates {','.join(f'{r:g}' for r in shown)}",
        "SGLang": f"in the environment: SGLANG_SIMULATE_ACC_LEN={tau:g} SGLANG_SIMULATE_ACC_METHOD=match-expected (its own rates)",
    }
