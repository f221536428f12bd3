"""Time single steps on this machine: a target pass over n tokens, and proposing k tokens.

Each cost is the first quartile of repeats in turns at a context length: drifts of the machine hit all alike, and what else runs on it only
ever adds to a time. Whole rounds are timed a few in a row, as answers are made of them: what a small target left in the processor's
caches, the next round finds there.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.answers import Request
from draftsmith.decoder.cache import KVCache, entry_bytes, layer_shapes
from draftsmith.decoder.captured import Passes
from draftsmith.decoder.draft import DecodeState, Draft, Drafter, NewTokens, Prompts, TargetAlone
from draftsmith.decoder.loop import Loop, Stopwatch
from draftsmith.decoder.sampling import NoiseTable, Sampling
from draftsmith.decoder.slots import run_draft
from draftsmith.eval.clocks.cost_table import ALONE, CostPoint, CostTable, Drafting
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.results.result import Costs, TargetInfo
from draftsmith.machine import available_memory, environment, read_bandwidth
from draftsmith.progress import Bar
from draftsmith.target.target import Target

WARM_UP = 2
"""Times that everything is done before it is timed."""
REPEATS = 31
"""Times that it is timed, at most."""
_PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
"""Tokens of the target passes that a table holds at its smallest batch; between them costs are straight lines."""
_FEWER = (1, 2, 3, 5, 9, 17, 33, 64)
"""The same at larger batches."""
_ROUNDS = 12
"""Rounds of an answer whose rounds are timed whole, at least, and how many of them in a row, behind one that is not timed."""
IN_A_ROW = 3
SECONDS = 1.5
"""In which a place of a table is timed again and again."""
_SAMPLED = "sampled "
"""What begins the names of steps above temperature 0 where they are timed at temperature 0, too."""

Job = Callable[[], object]
Key = tuple[str, str, str]
"""Of what is timed: the step, the drafter ("" for the target alone) and the size ("" where there is but one)."""


@torch.no_grad()
def measure_costs(
    target: Target,
    systems: Sequence[SystemUnderTest],
    context_ids: Sequence[int],
    sampling: Sampling,
    *,
    rows: int = 1,
    repeats: int = REPEATS,
    passes: Sequence[int] | None = None,
) -> Costs:
    """Time every draft length of every drafter, and target passes of the sizes they need, after `context_ids`, for
    `rows` rows. passes: time target passes over so many tokens, and over one, instead."""
    sizes = {1} | ({c.nodes(k) for c in systems for k in c.lengths} if passes is None else {*passes})
    # Short prompts are repeated until the largest draft fits.
    context_ids = (list(context_ids) * (max(sizes) + 1))[: max(len(context_ids), max(sizes) + 1)]
    jobs = _verify_jobs(target, context_ids, rows, sorted(sizes))
    for c in systems:
        prompts = _read(target, c, context_ids, rows)
        jobs |= {("draft", c.name, str(k)): _draft_job(c.make(k), prompts, sampling) for k in c.lengths}
    cost = _by_step(_time(jobs, target.device, repeats))
    return Costs(cost["verify"][ALONE], cost.get("draft", {}), _tree_nodes(systems))


@torch.no_grad()
def measure_table(
    target: Target,
    info: TargetInfo,
    systems: Sequence[SystemUnderTest],
    context_ids: Sequence[int],
    samplings: Sequence[Sampling],
    *,
    places: Set[tuple[int, int]],
    command: str,
    kept: CostTable | None = None,
    seconds: float = SECONDS,
) -> CostTable:
    """Time target passes and drafts at every (batch, context) of `places` that fits in memory; the text is `context_ids`, repeated.

    samplings: one, or that of temperature 0 and then one above it, which cost a drafter and the verdict more. kept: what was timed earlier on this machine, of the same target and drafters, and is not timed again. seconds: for the repeats of
    a batch and context, of which there are 3 to 31. Shows a bar. Drafters that a target tuned with them verifies cost as the untuned
    one does, whose sizes are the same.
    """
    timed = {} if kept is None else {(point.batch, point.context): point for point in kept.points}
    too_large = set() if kept is None else set(kept.too_large)

    def measure(rows: int, context: int) -> CostPoint:
        ids = (list(context_ids) * (context // len(context_ids) + 1))[:context]
        point = _point(target, systems, ids, rows, samplings, seconds)
        values = target.agreed(lambda: asdict(point))
        return CostPoint(**values | {"sampled": values["sampled"] and Drafting(**values["sampled"])})

    missing = sorted(places - timed.keys() - too_large)
    with Bar(total=len(missing), desc="costs", unit="point") as bar:
        for rows, context in missing:
            bar.set_postfix_str(f"batch {rows}, context {context}")
            too_large.add((rows, context))
            # The target alone and every drafter have answers under way while passes are timed.
            if not timed or fits_in_memory(target, rows, context, caches_of(len(samplings), len(systems))):
                try:
                    timed[rows, context] = measure(rows, context)
                    too_large.remove((rows, context))
                except torch.OutOfMemoryError:
                    if target.shares > 1:  # the others are in the middle of the same pass
                        raise
                    torch.cuda.empty_cache()
            bar.update()
    table = CostTable(
        target=info,
        dtype=target.dtype_name,
        points=tuple(point for _, point in sorted(timed.items())),
        nodes=_tree_nodes(systems),
        weights_bytes=target.weight_bytes // target.shares,
        bandwidth=read_bandwidth(target.device) if kept is None else kept.bandwidth,
        command=command,
        **environment(),
        too_large=tuple(sorted(too_large)),
        drafts={c.name: c.info for c in systems},
        temperatures=tuple(sampling.temperature for sampling in samplings),
    )
    table = table.only(places)
    # What was held up shows against the other places, and may no longer be.
    return table.settled(measure, missing)


def caches_of(samplings: int, drafters: int) -> int:
    """Return how many caches are there while a place of the table is timed."""
    return 2 + samplings * (1 + drafters)


def fits_in_memory(target: Target, rows: int, context: int, caches: int = 2) -> bool:
    """Whether `caches` caches, and the states, of a batch take at most half of the memory that is free."""
    cached = entry_bytes(layer_shapes(target))
    states = 8 * target.hidden_size * target.dtype.itemsize
    needed = rows * (context + _PASSES[-1]) * (caches * cached + states)
    return bool(target.agreed(lambda: needed < available_memory(target.device) / 2))


def _point(
    target: Target,
    systems: Sequence[SystemUnderTest],
    ids: Sequence[int],
    rows: int,
    samplings: Sequence[Sampling],
    seconds: float,
) -> CostPoint:
    """Time a batch behind a context. A round's overhead is all that it takes, as the loop runs it, beyond the pass and the draft
    that were timed by themselves: emptied caches and the reading of more tokens are in it, too."""
    largest = max([9, *(c.nodes(k) for c in systems for k in c.lengths)])
    passes = pass_sizes(rows, largest)
    passes |= {c.nodes(c.num_speculative_tokens) for c in systems}
    jobs = _verify_jobs(target, ids, rows, sorted(passes))
    kinds = dict(zip(("", _SAMPLED), samplings, strict=False))
    for kind, sampling in kinds.items():
        jobs[f"{kind}round", ALONE, ""] = _Rounds(target, TargetAlone(), ids, rows, sampling, None)
    for c in systems:
        own, prompts = c.num_speculative_tokens, _read(target, c, ids, rows)
        (reader := c.make(own)).start(rows, len(ids))
        jobs["admit", c.name, ""] = partial(reader.admit, prompts)
        for kind, sampling in kinds.items():
            for k in c.lengths if rows == 1 else sorted({1, 2, 4, own, c.lengths[-1]} & {*c.lengths}):
                jobs[f"{kind}draft", c.name, str(k)] = _draft_job(c.make(k), prompts, sampling)
            answer = _Rounds(c.verified_by(target), c.make(own), ids, rows, sampling, c.typical)
            jobs[f"{kind}round", c.name, ""] = answer
    started = time.perf_counter()
    _time(jobs, target.device, 1)
    once = (time.perf_counter() - started) / (1 + WARM_UP)
    repeats = target.agreed(lambda: repeats_within(seconds, once))
    cost = _by_step(_time(jobs, target.device, repeats))
    verify = cost["verify"][ALONE]

    def drafting(kind: str) -> Drafting:
        draft = cost.get(f"{kind}draft", {})
        parts = {
            c.name: verify[str(c.nodes(k))] + draft[c.name][str(k)] for c in systems if (k := c.num_speculative_tokens)
        }
        whole = {name: ms[""] for name, ms in cost[f"{kind}round"].items()}
        return Drafting(draft, {name: max(0.0, ms - parts.get(name, verify["1"])) for name, ms in whole.items()})

    first = drafting("")
    admit = {name: ms[""] for name, ms in cost.get("admit", {}).items()}
    sampled = drafting(_SAMPLED) if _SAMPLED in kinds else None
    return CostPoint(rows, len(ids), verify, first.draft_ms, admit, first.overhead_ms, sampled=sampled)


def pass_sizes(rows: int, largest: int) -> set[int]:
    """Return the tokens of the target passes that are timed for a batch of `rows`, where drafts have `largest` nodes at most."""
    return {n for n in (_PASSES if rows == 1 else _FEWER) if n <= max(largest, 64 if rows == 1 else 0)} | {largest}


def repeats_within(seconds: float, once: float) -> int:
    """Return how often work that takes `once` seconds is timed in about `seconds`, 3 times at least."""
    return max(3, min(REPEATS, int(seconds / once)))


class _Rounds:
    """A job that runs more rounds of answers as the decoding loop does. `prepare` begins them anew before one ends, so that the
    batch stays whole."""

    def __init__(
        self, target: Target, drafter: Drafter, ids: Sequence[int], rows: int, sampling: Sampling, typical: Any
    ) -> None:
        self._at_once = (1 + IN_A_ROW) * (drafter.num_speculative_tokens + 1)
        tokens = 1 + max(_ROUNDS * (drafter.num_speculative_tokens + 1), self._at_once)
        room = target.context_length - len(ids) - drafter.max_nodes
        limit = max(2, min(tokens, room))
        requests = [Request(str(row), "costs", tuple(ids), limit, row, ignore_eos=True) for row in range(rows)]
        self._begin = lambda: Loop(target, drafter, requests, sampling, typical, rows)
        self._loop: Loop | None = None
        self.rounds = 0

    def prepare(self) -> None:
        """Have rounds to run, with every row at work, and the last one just behind."""
        if self._loop is None or any(answer.tokens_left <= self._at_once for answer in self._loop.rows):
            self._loop = self._begin()
        if all(answer.tokens_left > self._at_once for answer in self._loop.rows):
            self._loop.round()

    def __call__(self) -> None:
        assert self._loop is not None
        self.rounds = 0
        while self.rounds < IN_A_ROW and not any(answer.finish_reason for answer in self._loop.rows):
            self._loop.round()
            self.rounds += 1


def _time(jobs: Mapping[Key, Job], device: torch.device, repeats: int) -> dict[Key, float]:
    """Return the first quartile of the milliseconds of each job over repeats in turns, after a warm-up; of a round where it runs several."""
    times: dict[Key, list[float]] = {key: [] for key in jobs}
    for repeat in range(repeats + WARM_UP):
        for key, job in jobs.items():
            if isinstance(job, _Rounds):
                job.prepare()
            watch = Stopwatch(device)
            job()
            watch.lap("job")
            if repeat >= WARM_UP:
                times[key].append(1000 * watch.seconds["job"] / (job.rounds if isinstance(job, _Rounds) else 1))
    found = {key: sorted(samples)[len(samples) // 4] for key, samples in times.items()}
    # None above that of a larger size of the same kind: less work never takes longer, so that what does was held up.
    least: dict[tuple[str, str], float] = {}
    for step, name, size in sorted((key for key in found if key[2]), key=lambda key: int(key[2]), reverse=True):
        key, of = (step, name, size), (step, name)
        found[key] = least[of] = min(found[key], least.get(of, found[key]))
    return found


def _by_step(times: Mapping[Key, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {step: {drafter: {size: ms}}}."""
    by_step: dict[str, dict[str, dict[str, float]]] = {}
    for (step, name, size), ms in times.items():
        by_step.setdefault(step, {}).setdefault(name, {})[size] = ms
    return by_step


def _tree_nodes(systems: Sequence[SystemUnderTest]) -> dict[str, dict[str, int]]:
    return {c.name: {str(k): c.nodes(k) for k in c.lengths} for c in systems if c.tree or c.most_nodes}


def _prefill(
    target: Target, cache: KVCache, context_ids: Sequence[int], rows: int, layer_ids: tuple[int, ...]
) -> Prompts:
    """Read the context into every row of the cache; return it as prompts for a drafter."""
    ids_BL = torch.tensor([list(context_ids)] * rows, device=target.device)
    output = run_draft(target, cache, Draft.chain(ids_BL[:, 0], ids_BL[:, 1:]), layer_ids, longest=0)
    cache.append(ids_BL.shape[1])
    new_tokens = NewTokens(torch.roll(ids_BL, -1, 1), output.aux, output.last, cache.lengths_B)
    return Prompts(torch.arange(rows, device=target.device), ids_BL, cache.lengths_B, new_tokens)


def _verify_jobs(target: Target, context_ids: Sequence[int], rows: int, sizes: Sequence[int]) -> dict[Key, Job]:
    """Return a job for a target pass of each size. They share a cache, as nothing is committed."""
    passes = Passes.of(target, rows, len(context_ids) + max(sizes), max(sizes))
    _prefill(target, passes.cache, context_ids, rows, ())

    def pass_over(ids_BN: Tensor) -> object:
        # All of what a round does between the draft and the verdict.
        return passes(Draft.chain(ids_BN[:, 0], ids_BN[:, 1:]), len(context_ids)).logits_BNV

    texts = {n: torch.tensor([(list(context_ids) * n)[:n]] * rows, device=target.device) for n in sizes}
    return {("verify", ALONE, str(n)): partial(pass_over, ids_BN) for n, ids_BN in texts.items()}


def _read(target: Target, system: SystemUnderTest, context_ids: Sequence[int], rows: int) -> Prompts:
    """Read the context as prompts for a drafter."""
    cache = KVCache.for_target(target, rows, len(context_ids))
    return _prefill(target, cache, context_ids, rows, system.make(1).layer_ids)


def _draft_job(drafter: Drafter, prompts: Prompts, sampling: Sampling) -> Job:
    """Return a job that proposes as in the middle of an answer, with two new tokens."""
    rows, length = prompts.ids_bL.shape
    drafter.start(rows, length)
    drafter.admit(prompts)
    new = prompts.new_tokens
    tokens_B2, aux_B2F, last_B2D = (x[:, -2:] for x in (new.tokens_Bn, new.aux_BnF, new.last_BnD))
    last_two = NewTokens(tokens_B2, aux_B2F, last_B2D, torch.full_like(new.count_B, 2))
    zeros_B, lengths, room = torch.zeros_like(prompts.length_b), prompts.length_b.tolist(), 10_000
    noise = NoiseTable([0] * rows, lengths, zeros_B.device)
    places = new.tokens_Bn[:, -1], prompts.length_b, zeros_B + room, zeros_B
    state = DecodeState(*places, last_two, sampling, tuple(lengths), (room,) * rows, noise)
    return lambda: drafter.propose(state)
