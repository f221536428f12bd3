"""Time single steps on this machine: a target pass over n tokens, and proposing k tokens.

Each cost is the median of repeats in turns at a typical context length, so that drifts of the machine hit all alike.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from draftsmith.eval.decode.cache import KVCache, run_draft
from draftsmith.eval.decode.clock import Stopwatch
from draftsmith.eval.decode.draft import DecodeState, Draft, Drafter, NewTokens, Prompts
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.result import Costs
from draftsmith.heads.target.target import Target


@torch.no_grad()
def measure_costs(
    target: Target,
    systems: Sequence[SystemUnderTest],
    context_ids: Sequence[int],
    sampling: Sampling,
    *,
    rows: int = 1,
    repeats: int = 31,
    passes: Sequence[int] | None = None,
) -> Costs:
    """Time every draft length of every drafter, and target passes of the sizes they need, after `context_ids`, for
    `rows` rows. passes: time target passes over so many tokens, and over one, instead."""
    sizes = {1} | ({c.nodes(k) for c in systems for k in c.lengths} if passes is None else {*passes})
    # Short prompts are repeated until the largest draft fits.
    context_ids = (list(context_ids) * (max(sizes) + 1))[: max(len(context_ids), max(sizes) + 1)]
    jobs: dict[tuple[str, str], Callable[[], object]] = {}
    for nodes in sorted(sizes):
        jobs["verify", str(nodes)] = _verify_job(target, context_ids, rows, nodes)
    for c in systems:
        cache = KVCache.for_target(target, rows, len(context_ids))
        prompts = _prefill(target, cache, context_ids, rows, c.make(1).layer_ids)
        for k in c.lengths:
            jobs[c.name, str(k)] = _draft_job(c.make(k), prompts, sampling)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for repeat in range(repeats + 2):
        for key, job in jobs.items():
            watch = Stopwatch(target.device)
            job()
            watch.lap("job")
            if repeat >= 2:
                times[key].append(1000 * watch.seconds["job"])
    cost: dict[str, dict[str, float]] = {"verify": {}, **{c.name: {} for c in systems}}
    for (kind, size), values in times.items():
        cost[kind][size] = median(values)
    tree_nodes = {c.name: {str(k): c.nodes(k) for k in c.lengths} for c in systems if c.tree is not None}
    return Costs(cost.pop("verify"), cost, tree_nodes)


def _prefill(
    target: Target, cache: KVCache, context_ids: Sequence[int], rows: int, layer_ids: tuple[int, ...]
) -> Prompts:
    """Read the context into every row of the cache; return it as prompts for a drafter."""
    ids_BL = torch.tensor([list(context_ids)] * rows, device=target.device)
    output = run_draft(target, cache, Draft.chain(ids_BL[:, 0], ids_BL[:, 1:]), layer_ids)
    cache.append(ids_BL.shape[1])
    new_tokens = NewTokens(torch.roll(ids_BL, -1, 1), output.aux, output.last, cache.lengths_B)
    return Prompts(torch.arange(rows, device=target.device), ids_BL, cache.lengths_B, new_tokens)


def _verify_job(target: Target, context_ids: Sequence[int], rows: int, nodes: int) -> Callable[[], object]:
    cache = KVCache.for_target(target, rows, len(context_ids) + nodes)
    _prefill(target, cache, context_ids, rows, ())
    ids_BN = torch.tensor([list(context_ids[:nodes])] * rows, device=target.device)

    def job() -> object:
        # All of what a round does between the draft and the verdict; nothing is committed.
        output = run_draft(target, cache, Draft.chain(ids_BN[:, 0], ids_BN[:, 1:]))
        return target.head.logits(output.last)

    return job


def _draft_job(drafter: Drafter, prompts: Prompts, sampling: Sampling) -> Callable[[], object]:
    """Return a job that proposes as in the middle of an answer, with two new tokens."""
    rows, length = prompts.ids_bL.shape
    drafter.start(rows, length)
    drafter.admit(prompts)
    new_tokens = prompts.new_tokens
    last_two = NewTokens(
        new_tokens.tokens_Bn[:, -2:],
        new_tokens.aux_BnF[:, -2:],
        new_tokens.last_BnD[:, -2:],
        torch.full_like(new_tokens.count_B, 2),
    )
    zeros_B = torch.zeros_like(prompts.length_b)
    state = DecodeState(new_tokens.tokens_Bn[:, -1], prompts.length_b, zeros_B + 10_000, zeros_B, last_two, sampling)
    return lambda: drafter.propose(state)
