"""Simulate the errors of `draftsmith watch`: python -m scripts.bench.drift --answers answers.jsonl --output docs/results/drift.json

Every run draws a baseline and a day of stationary traffic, and counts alarms; then traffic whose tau falls or rises after some requests,
and counts how many come until the alarm. Traffic: answers of a finished answers stage, drafted by prompt lookup on their own tokens
(--answers); the prompts of committed evaluations, drawn again and again; and made-up kinds that are hard for such a test.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.eval.results.intervals import wilson
from draftsmith.eval.results.result import read_result
from draftsmith.eval.watch.sequential import HIGH, LARGEST, LOW, Observation, Watched, share_of
from draftsmith.foreign.text import read_json_lines
from draftsmith.progress import Bar
from draftsmith.storage import write_json
from scripts.bench.commands import facts_of, keep

Array = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
"""Rounds and tokens [n] of n answers."""
K = 5
CHANGES = {"fall of 5%": 0.95, "fall of 10%": 0.9, "fall of 20%": 0.8, "rise of 10%": 1.1}
BEFORE, AFTER = 300, 3000
"""Requests before a change and after it."""
RESULTS = "docs/results/smollm2/drafters/simulated/t0.7/result.json"
SLICES = ("chat", "rag")
"""Slices of the answers that are simulated alone: those of the least spread and of the most."""
PER_INTERVAL = 20
"""Answers in an interval of counters, on average."""


def looked_up(prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
    """Return rounds and tokens of an answer whose drafts are the K tokens behind the last place with the same two tokens."""
    text, known, rounds = [*prompt, *answer], len(prompt) + 1, 0
    places: dict[tuple[int, int], int] = {}
    noted = 2
    while known < len(text):
        for end in range(noted, known):
            places[text[end - 2], text[end - 1]] = end
        noted = max(noted, known)
        place, accepted = places.get((text[known - 2], text[known - 1]), known), 0
        # The bonus token is the target's own, so the last token of an answer is never a drafted one.
        while accepted < K and place + accepted < known and known + accepted < len(text) - 1:
            if text[place + accepted] != text[known + accepted]:
                break
            accepted += 1
        known, rounds = known + accepted + 1, rounds + 1
    return rounds, len(answer) - 1


def resampled(rows: Sequence[tuple[float, float]]) -> Draw:
    """Return traffic that draws answers of `rows`, each independent of the last."""
    table = np.array([row for row in rows if row[0]], float)

    def draw(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        taken = table[rng.integers(0, len(table), n)]
        return taken[:, 0], taken[:, 1]

    return draw


def made_up(length: float, alpha: float, spread: float = 0.0, together: int = 1, loops: float = 0.0) -> Draw:
    """Return traffic of geometric lengths (mean `length` tokens) whose acceptance of a token is `alpha`, its log-odds normal with
    `spread` over prompts; `together` answers in a row share theirs, and a share of `loops` are long and accept 95%."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        odds = np.repeat(rng.normal(np.log(alpha / (1 - alpha)), spread, -(-n // together)), together)[:n]
        loop = rng.random(n) < loops
        p = np.where(loop, 0.95, 1 / (1 + np.exp(-odds)))
        tokens = np.where(loop, 8 * length, 1 + rng.geometric(1 / length, n))
        tau = (1 - p ** (K + 1)) / (1 - p)
        rounds = np.maximum(1, np.round(tokens / tau))
        # Rounds are geometric, cut off at K: the sum of many has about this variance.
        accepted = rng.normal(rounds * (tau - 1), np.sqrt(rounds * p * (1 - p**K)) / (1 - p) * 0.7).round()
        return rounds, rounds + accepted.clip(0, K * rounds)

    return draw


def summed(draw: Draw) -> Draw:
    """Return the intervals of counters over such traffic."""

    def intervals(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        counts = 1 + rng.poisson(PER_INTERVAL - 1, n)
        starts = np.concatenate(([0], counts.cumsum()[:-1]))
        rounds, tokens = draw(rng, int(counts.sum()))
        return np.add.reduceat(rounds, starts), np.add.reduceat(tokens, starts)

    return intervals


def rows_of(rounds: Array, tokens: Array, after: float, per_day: float, interval: bool) -> list[Observation]:
    """Return observations at a steady rate, the first behind `after` days."""
    step, each = 1 / per_day, float(PER_INTERVAL if interval else 1)
    return [
        Observation(r, x, after + i * step, each, "", interval)
        for i, (r, x) in enumerate(zip(rounds.tolist(), tokens.tolist(), strict=True), 1)
    ]


def learned(draw: Draw, rng: np.random.Generator, per_day: float, interval: bool, slices: int) -> Watched:
    """Return a slice whose baseline is learned."""
    first = 250 if interval else 1000
    one = Watched(share_of(slices - 1), first, first * LARGEST)
    while one.baseline is None:
        one.take(rows_of(*draw(rng, one.size - one.observations), one.at, per_day, interval))
    return one


def measure(draw: Draw, runs: int, requests: int, slices: int, interval: bool, bar: Any) -> dict[str, Any]:
    """Return what happens to one kind of traffic, in the last of so many slices."""
    rng, each = np.random.default_rng(0), PER_INTERVAL if interval else 1
    per_day = requests / each
    alarms, sizes, expected = {LOW: 0, HIGH: 0}, list[int](), list[float]()
    delays: dict[str, list[float]] = {name: [] for name in CHANGES}
    for run in range(runs):
        fresh = learned(draw, rng, per_day, interval, slices)
        one = deepcopy(fresh)
        assert one.baseline is not None
        sizes.append(one.observations * each)
        expected.append(one.baseline.low.within * each)
        one.take(rows_of(*draw(rng, int(per_day)), one.at, per_day, interval))
        if one.alarm is not None:
            alarms[one.alarm] += 1
        for name, factor in CHANGES.items() if run < runs // 4 else ():
            one = deepcopy(fresh)
            rounds, tokens = draw(rng, (BEFORE + AFTER) // each)
            changed = np.concatenate((tokens[: BEFORE // each], tokens[BEFORE // each :] * factor))
            start = one.observations + BEFORE // each
            one.take(rows_of(rounds, changed, one.at, per_day, interval))
            right = one.alarm == (LOW if factor < 1 else HIGH) and one.alarmed > start
            delays[name].append((one.alarmed - start) * each if right else np.inf)
        bar.update(1)
    found = sum(alarms.values())
    return {
        "days": runs,
        "false_alarms": alarms,
        "share_of_days": found / runs,
        "share_at_most": wilson(found / runs, runs)[1],
        "baseline_requests": float(np.median(sizes)),
        "expected_requests": float(np.median(expected)),
        "changes": {name: delay(values) for name, values in delays.items()},
    }


def delay(values: Sequence[float]) -> dict[str, float | None]:
    """Return median and 95th percentile of the requests until an alarm, None where it did not come, and the share within 2,000."""
    ordered = np.sort(values)
    marks = {name: float(ordered[int(share * (len(ordered) - 1))]) for name, share in (("median", 0.5), ("p95", 0.95))}
    within = float((ordered <= 2000).mean())
    return {**{name: value if np.isfinite(value) else None for name, value in marks.items()}, "within_2000": within}


def kinds(answers: Path | None) -> dict[str, Draw]:
    """Return every kind of traffic by name."""
    found: dict[str, Draw] = {}
    if answers is not None:
        by_slice: dict[str, list[tuple[float, float]]] = {}
        for _, row in read_json_lines(answers, "give the answers.jsonl of an answers stage"):
            by_slice.setdefault(row["slice"], []).append(looked_up(row["prompt_ids"], row["output_ids"]))
        found |= {f"prompt lookup, {name}": resampled(rows) for name, rows in by_slice.items() if name in SLICES}
        found["prompt lookup, all slices untagged"] = resampled([row for rows in by_slice.values() for row in rows])
    prompts = read_result(RESULTS).drafters["eagle3"].prompts.values()
    found["EAGLE-3, 40 prompts of a result"] = resampled([(one.rounds_simulated or 0, one.tokens) for one in prompts])
    return found | {
        "answers of 10 tokens": made_up(10, 0.6, 0.3),
        "prompts that differ much": made_up(100, 0.6, 0.6),
        "one in ten a loop": made_up(60, 0.5, loops=0.1),
        "ten alike in a row": made_up(100, 0.6, 0.3, together=10),
    }


def main(argv: list[str]) -> int:
    """Run the simulation; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.drift", description=__doc__)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--runs", type=int, default=150)
    parser.add_argument("--requests", type=int, default=4000, help="a day")
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    traffic = kinds(own.answers)
    facts = facts_of("drift", argv) | {"requests_per_day": own.requests, "traffic": {}}
    rows = [(name, draw, 1, False) for name, draw in traffic.items()]
    mixed = "prompts that differ much"
    rows += [(f"{mixed}, third slice", traffic[mixed], 3, False)]
    rows += [(f"{mixed}, counters", summed(traffic[mixed]), 1, True)]
    with Bar(total=own.runs * len(rows), desc="drift", unit="day") as bar:
        for name, draw, slices, interval in rows:
            facts["traffic"][name] = measure(draw, own.runs, own.requests, slices, interval, bar)
            if own.output:  # what an interruption leaves
                write_json(own.output, facts)
    return keep(own.output, facts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
