"""Simulate drafters on finished answers: one pass of the target, and one of each head, give their expected tallies.

Shapes: B answers of a pass, L tokens, A aux layers, H hidden size, K speculative tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import check_samples, compute_features
from draftsmith.decoder.answers import Generation, Tally
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.eval.simulate.acceptance import Acceptance, acceptance, find_answers, simulate
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.target.target import Target

_TEXTS_PER_PASS = 8


@dataclass(frozen=True)
class Simulation:
    """Expected tallies of each generation for K = 1..max_k (entry K-1). off_text: see `Acceptance`."""

    tallies: list[list[Tally]]
    off_text: int


def to_sample(generation: Generation) -> Tokenized:
    """Return an answer as ids and a mask of its output tokens."""
    prompt, output = generation.request.prompt_ids, generation.output_ids
    mask = torch.zeros(len(prompt) + len(output), dtype=torch.bool)
    mask[len(prompt) :] = True
    ids = torch.tensor([*prompt, *output])
    return Tokenized(ids, mask, generation.request.sample_id, generation.request.slice)


@dataclass(frozen=True)
class Simulator:
    """How the acceptance of a drafter follows from passes of the target over finished answers.

    accept: from the target, what a pass gave, the sampling settings and max_k to the acceptance of max_k drafts.
    layer_ids: the aux layers that it reads. levels: tokens at each depth of its tree, None for a chain.
    """

    accept: Callable[[Target, TrainBatch, Sampling, int], Acceptance]
    layer_ids: tuple[int, ...] = ()
    levels: tuple[int, ...] | None = None

    def __call__(self, target: Target, generations: Sequence[Generation], sampling: Sampling, max_k: int) -> Simulation:
        """Simulate drafts of 1..max_k tokens on finished answers, see `simulate_together`."""
        return simulate_together(target, generations, sampling, [(self, max_k)])[0]


def head_simulator(head: DraftHead, *, tree: StaticTree | None = None, greedy_drafts: bool = False) -> Simulator:
    """Return the simulator of chains, or of a static tree cut at depth 1..max_k.

    greedy_drafts: the drafter proposes a chain of argmaxes at every temperature.
    """

    def accept(target: Target, batch: TrainBatch, sampling: Sampling, max_k: int) -> Acceptance:
        vocab_W = head.draft_vocab
        with drafting(head):
            output = head(batch, max_k)
        return acceptance(output, batch, target.head, vocab_W, sampling, tree=tree, greedy_drafts=greedy_drafts)

    return Simulator(accept, head.reads.layer_ids, None if tree is None else tree.levels)


def simulate_generations(
    target: Target,
    head: DraftHead,
    generations: Sequence[Generation],
    sampling: Sampling,
    max_k: int,
    *,
    tree: StaticTree | None = None,
    greedy_drafts: bool = False,
) -> Simulation:
    """Simulate the drafts of `head` on finished answers, see `head_simulator` and `simulate_together`."""
    return head_simulator(head, tree=tree, greedy_drafts=greedy_drafts)(target, generations, sampling, max_k)


@torch.no_grad()
def simulate_together(
    target: Target,
    generations: Sequence[Generation],
    sampling: Sampling,
    drafters: Sequence[tuple[Simulator, int]],
) -> list[Simulation]:
    """Run the target once over finished answers; return the simulation of each drafter for drafts of 1..max_k tokens.

    drafters: each with its max_k. Exact when the text came from this target under `sampling` (from a lossless decoder or
    the target alone).
    """
    order = sorted(range(len(generations)), key=lambda i: len(generations[i].output_ids))
    layers = tuple(sorted({layer for simulator, _ in drafters for layer in simulator.layer_ids}))
    by_index: list[dict[int, list[Tally]]] = [{} for _ in drafters]
    off_text = [0 for _ in drafters]
    for indices, batch in target_passes(target, [to_sample(generations[i]) for i in order], layers):
        answers = find_answers(batch)
        assert len(answers) == len(indices)
        for drafter, (simulator, max_k) in enumerate(drafters):
            accepted = simulator.accept(target, _read(batch, layers, simulator.layer_ids), sampling, max_k)
            off_text[drafter] += accepted.off_text
            by_k = [
                simulate(accepted.c_BLK, answers, k, None if simulator.levels is None else simulator.levels[:k])
                for k in range(1, max_k + 1)
            ]
            by_answer = zip(indices, zip(*by_k, strict=True), strict=True)
            by_index[drafter] |= {order[index]: list(tallies) for index, tallies in by_answer}
    everywhere = range(len(generations))
    return [Simulation([of[i] for i in everywhere], off) for of, off in zip(by_index, off_text, strict=True)]


def _read(batch: TrainBatch, layers: tuple[int, ...], chosen: tuple[int, ...]) -> TrainBatch:
    """Return a batch that has the aux layers `layers` with those that a drafter reads, in its order."""
    if chosen == layers:
        return batch
    aux_BLAH = batch.aux.unflatten(-1, (len(layers), -1))
    return replace(batch, aux=aux_BLAH[:, :, [layers.index(layer) for layer in chosen]].flatten(2))


def target_passes(
    target: Target, samples: Sequence[Tokenized], layer_ids: tuple[int, ...] = ()
) -> Iterator[tuple[range, TrainBatch]]:
    """Run the target over texts, some at once, one per row; yield the indices of these and what a head reads of them. Raises UserError
    for texts that the target cannot read."""
    if samples:
        check_samples(target, samples)
    for start in range(0, len(samples), _TEXTS_PER_PASS):
        indices = range(start, min(start + _TEXTS_PER_PASS, len(samples)))
        some = samples[indices.start : indices.stop]
        features = compute_features(target, some, layer_ids, target.dtype)
        yield indices, collate([[f] for f in features], max(len(s.ids) for s in some)).to(target.device)
