"""Simulate a drafter on finished answers: one pass of the target and one of the head give its expected tallies.

Shapes: B answers of a pass, L tokens, K speculative tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftsmith.data.batch import Tokenized, TrainBatch
from draftsmith.data.features.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.eval.decode.answers import Generation, Tally
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.trees import StaticTree
from draftsmith.eval.simulate.acceptance import Acceptance, acceptance, find_answers, simulate
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.heads.target.target import Target

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
    """Simulate chains of 1..max_k drafts on finished answers, or a static tree cut at depth 1..max_k.

    greedy_drafts: the drafter proposes a chain of argmaxes at every temperature.
    Exact when the text came from this target under `sampling` (from a lossless decoder or the target alone).
    """

    def accept(batch: TrainBatch) -> Acceptance:
        vocab_W = head.draft_vocab
        with drafting(head):
            output = head(batch, max_k)
        return acceptance(output, batch, target.head, vocab_W, sampling, tree=tree, greedy_drafts=greedy_drafts)

    return simulate_texts(
        target, generations, max_k, accept, head.reads.layer_ids, None if tree is None else tree.levels
    )


@torch.no_grad()
def simulate_texts(
    target: Target,
    generations: Sequence[Generation],
    max_k: int,
    accept: Callable[[TrainBatch], Acceptance],
    layer_ids: tuple[int, ...] = (),
    levels: tuple[int, ...] | None = None,
) -> Simulation:
    """Run the target over finished answers and turn the acceptance that `accept` computes into tallies.

    accept: gives the acceptance of max_k drafts. layer_ids: the aux layers it reads. levels: tokens at each depth.
    """
    order = sorted(range(len(generations)), key=lambda i: len(generations[i].output_ids))
    found: dict[int, list[Tally]] = {}
    off_text = 0
    for places, batch in target_passes(target, [to_sample(generations[i]) for i in order], layer_ids):
        accepted, answers = accept(batch), find_answers(batch)
        off_text += accepted.off_text
        assert len(answers) == len(places)
        by_k = [
            simulate(accepted.c_BLK, answers, k, None if levels is None else levels[:k]) for k in range(1, max_k + 1)
        ]
        found |= {order[place]: list(tallies) for place, tallies in zip(places, zip(*by_k, strict=True), strict=True)}
    return Simulation([found[i] for i in range(len(generations))], off_text)


def target_passes(
    target: Target, samples: Sequence[Tokenized], layer_ids: tuple[int, ...] = ()
) -> Iterator[tuple[range, TrainBatch]]:
    """Run the target over texts, some at once, one per row; yield the places of these and what a head reads of them."""
    for start in range(0, len(samples), _TEXTS_PER_PASS):
        places = range(start, min(start + _TEXTS_PER_PASS, len(samples)))
        some = samples[places.start : places.stop]
        features = compute_features(target, some, layer_ids, target.dtype)
        yield places, collate([[f] for f in features], max(len(s.ids) for s in some)).to(target.device)
