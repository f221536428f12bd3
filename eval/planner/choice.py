"""Choose the draft lengths that are timed: the fastest by costs and simulated acceptance, and its neighbours.

K: num_speculative_tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.decoder.answers import Request, total
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.clocks.costs import fits_in_memory
from draftsmith.eval.drafters.system import SystemUnderTest, simulate_systems
from draftsmith.eval.planner.plan import round_cost
from draftsmith.eval.simulate.answers import SIMULATED_BATCH, answer_alone
from draftsmith.foreign.records import Journal
from draftsmith.progress import say
from draftsmith.target.target import Target


@dataclass(frozen=True)
class Candidate:
    """A draft length to time. drafter: the name of the drafter whose length it is; system: drafts so, under a name of its own."""

    drafter: str
    system: SystemUnderTest

    @classmethod
    def of(cls, system: SystemUnderTest, k: int) -> "Candidate":
        """Return a drafter with another draft length; of a tree, with another depth."""
        return cls(system.name, replace(system, name=f"{system.name}, K = {k}", num_speculative_tokens=k))


def choose_lengths(
    target: Target,
    systems: Sequence[SystemUnderTest],
    requests: Sequence[Request],
    sampling: Sampling,
    table: CostTable,
    journal: Journal,
    *,
    batch: int,
    repeats: int,
) -> list[Candidate]:
    """Return the draft that is fastest by costs and simulated acceptance, and its neighbours, of a tree the same one with a level
    more or less; say how long decoding in `batch` rows, `repeats` times, will take.

    The target alone answers in large batches for that, which is not timed. Empty where nothing can be simulated, or has a cost.
    """
    if (kept := journal.get("picks")) is not None:
        return [Candidate.of(c, k) for name, k in kept for c in systems if c.name == name]
    simulated = [c for c in systems if c.simulate and c.fixed_length and c.verifier is None]
    if not simulated or batch not in table.batches:
        return []
    say(f"evaluate: choosing a draft length at T={sampling.temperature:g}")
    point, longest = table.middle(batch), max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    rows = next((n for n in (SIMULATED_BATCH, 8, 2) if fits_in_memory(target, n, longest)), 1)
    answers = answer_alone(target, requests, sampling, journal, rows)
    speedups: dict[tuple[SystemUnderTest, int], float] = {}
    for c, simulation in zip(simulated, simulate_systems(target, simulated, answers, sampling), strict=True):
        for k in range(1, c.max_k + 1):
            tau, cost = total((t[k - 1] for t in simulation.tallies), k).tau, round_cost(table, point, c.name, k)
            if tau is not None and cost is not None:
                speedups[c, k] = cost.speedup(tau)
    if not speedups:
        return []
    best, k = max(speedups, key=lambda key: speedups[key])
    lengths = [n for n in (k - 1, k, k + 1) if (best, n) in speedups]
    journal.add("picks", [[best.name, n] for n in lengths])
    # What was not simulated is taken to be as fast as the target alone.
    speeds = [1.0, *(speedups.get((c, c.num_speculative_tokens), 1.0) for c in systems)]
    tokens = sum(len(g.output_ids) for g in answers) * repeats
    minutes = tokens * point.alone_ms / batch * sum(1 / speed for speed in speeds) / 60_000
    what = f"{'token' if best.tree is None else 'level'}{'s' if k > 1 else ''}"
    say(
        f"evaluate: by simulation and costs {best.name} drafting {k} {what} is "
        f"{speedups[best, k]:.2f}x as fast as the target alone; decoding will take about {max(1, round(minutes))} min"
    )
    return [Candidate.of(best, n) for n in lengths]
