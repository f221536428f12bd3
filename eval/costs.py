"""What single steps cost on this machine: a target pass over n tokens, and proposing k tokens.

Each cost is the median of interleaved repeats at a typical context length, so that drifts of the machine
hit all sizes alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from draftsmith.eval.cache import KVCache
from draftsmith.eval.clock import Stopwatch
from draftsmith.eval.draft import DecodeState, Draft, Drafter, Fresh
from draftsmith.eval.passes import run_draft
from draftsmith.eval.result import Costs
from draftsmith.eval.sampling import Sampling
from draftsmith.heads.target import Target

DrafterFactory = Callable[[int], Drafter]


@torch.no_grad()
def measure_costs(
    target: Target,
    drafters: Mapping[str, DrafterFactory],
    context_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_k: int,
    rows: int = 1,
    repeats: int = 31,
) -> Costs:
    """Time target passes of 1..max_k+1 tokens and proposals of 1..max_k tokens after `context_ids`, for `rows` rows."""
    # Short prompts are repeated until the largest draft fits.
    context_ids = (list(context_ids) * (max_k + 2))[: max(len(context_ids), max_k + 2)]
    jobs: dict[tuple[str, str], Callable[[], object]] = {}
    for nodes in range(1, max_k + 2):
        jobs["verify", str(nodes)] = _verify_job(target, context_ids, rows, nodes)
    for name, make in drafters.items():
        state = _state(target, make(1), context_ids, rows, sampling)
        for k in range(1, max_k + 1):
            jobs[name, str(k)] = _draft_job(make(k), state, rows, len(context_ids) + max_k + 2)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for repeat in range(repeats + 2):
        for key, job in jobs.items():
            watch = Stopwatch(target.device)
            job()
            watch.lap("job")
            if repeat >= 2:
                times[key].append(1000 * watch.seconds["job"])
    cost = {key: median(values) for key, values in times.items()}
    verify_ms = {size: value for (kind, size), value in cost.items() if kind == "verify"}
    draft_ms = {name: {size: cost[name, size] for kind, size in cost if kind == name} for name in drafters}
    return Costs(verify_ms, draft_ms)


def _prefill(
    target: Target, cache: KVCache, context_ids: Sequence[int], rows: int, layer_ids: tuple[int, ...]
) -> Fresh:
    ids_BL = torch.tensor([list(context_ids)] * rows, device=target.device)
    output = run_draft(target, cache, Draft.chain(ids_BL[:, 0], ids_BL[:, 1:]), layer_ids)
    cache.lengths_B = torch.full_like(cache.lengths_B, ids_BL.shape[1])
    return Fresh(torch.roll(ids_BL, -1, 1), output.aux, output.last, cache.lengths_B)


def _verify_job(target: Target, context_ids: Sequence[int], rows: int, nodes: int) -> Callable[[], object]:
    cache = KVCache(target.num_layers, rows, len(context_ids) + nodes, target.device)
    _prefill(target, cache, context_ids, rows, ())
    ids_BN = torch.tensor([list(context_ids[:nodes])] * rows, device=target.device)

    def job() -> object:
        # All of what a round does between the draft and the verdict; nothing is committed.
        output = run_draft(target, cache, Draft.chain(ids_BN[:, 0], ids_BN[:, 1:]))
        return target.head.logits(output.last)

    return job


def _state(target: Target, drafter: Drafter, context_ids: Sequence[int], rows: int, sampling: Sampling) -> DecodeState:
    """A state as in the middle of an answer, with the whole context still fresh."""
    cache = KVCache(target.num_layers, rows, len(context_ids), target.device)
    fresh = _prefill(target, cache, context_ids, rows, drafter.layer_ids)
    zeros_B = torch.zeros(rows, dtype=torch.long, device=target.device)
    return DecodeState(fresh.tokens_Bn[:, -1], fresh.count_B, zeros_B + 10_000, zeros_B, fresh, sampling)


def _draft_job(drafter: Drafter, state: DecodeState, rows: int, capacity: int) -> Callable[[], object]:
    drafter.start(rows, capacity)
    drafter.propose(state)
    fresh = state.fresh
    count_B = torch.full_like(fresh.count_B, 2)
    last_two = Fresh(fresh.tokens_Bn[:, -2:], fresh.aux_BnF[:, -2:], fresh.last_BnD[:, -2:], count_B)
    typical = replace(state, fresh=last_two)
    return lambda: drafter.propose(typical)
