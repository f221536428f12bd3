"""Simulated acceptance of a head on finished answers: one pass of the target, one of the head.

Shapes: K speculative tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.eval.decode import Generation
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.simulate import acceptance, find_answers, simulate
from draftsmith.eval.tally import Tally
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.base import DraftHead
from draftsmith.heads.target import Target

_ANSWERS_PER_PASS = 8


@dataclass(frozen=True)
class Simulation:
    """tallies: per generation its expected tallies for K = 1..max_k (entry K-1). off_text: see Acceptance."""

    tallies: list[list[Tally]]
    off_text: int


def to_sample(generation: Generation) -> Tokenized:
    """Return an answer as ids and mask."""
    prompt, output = generation.request.prompt_ids, generation.output_ids
    mask = torch.zeros(len(prompt) + len(output), dtype=torch.bool)
    mask[len(prompt) :] = True
    ids = torch.tensor([*prompt, *output])
    return Tokenized(ids, mask, generation.request.sample_id, generation.request.slice)


@torch.no_grad()
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
    order = sorted(range(len(generations)), key=lambda i: len(generations[i].output_ids))
    found: dict[int, list[Tally]] = {}
    off_text = 0
    for start in range(0, len(order), _ANSWERS_PER_PASS):
        places = order[start : start + _ANSWERS_PER_PASS]
        samples = [to_sample(generations[i]) for i in places]
        features = compute_features(target, samples, head.layer_ids, target.dtype)
        batch = collate([[f] for f in features], max(len(s.ids) for s in samples)).to(target.device)
        output = head(batch, max_k)
        found_c = acceptance(
            output, batch, target.head, head.draft_vocab, sampling, tree=tree, greedy_drafts=greedy_drafts
        )
        off_text += found_c.off_text
        answers = find_answers(batch)
        assert len(answers) == len(places)
        by_k = [
            simulate(found_c.c_BLK, answers, k, None if tree is None else tree.levels[:k]) for k in range(1, max_k + 1)
        ]
        for place, tallies in zip(places, zip(*by_k, strict=True), strict=True):
            found[place] = list(tallies)
    return Simulation([found[i] for i in range(len(generations))], off_text)
