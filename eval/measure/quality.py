"""Measure how a lossy decoder or a tuned target changes texts: perplexity under the target, and how far the distributions
of two targets differ.

Shapes: B rows, L tokens, R answer tokens, V target vocab.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from draftsmith.data.features.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.eval.decode.answers import Generation
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.heads.target.target import Target

_ANSWERS_PER_PASS = 8


@dataclass(frozen=True)
class Change:
    """agreement: share of answer tokens where two targets' likeliest choice is the same. kl: mean of KL(one || other) per
    token, in nats, at temperature 1."""

    agreement: float
    kl: float


def perplexities(target: Target, generations: Sequence[Generation]) -> dict[str, float]:
    """Return exp of the mean -log p per answer token, per slice and as "overall"; p is the target's distribution at temperature 1.

    A repetitive text has a low perplexity too: compare with the target's own texts at the same sampling setting.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for generation, logits_RV in _answer_logits(target, generations):
        ids_R = torch.tensor(generation.output_ids, device=logits_RV.device)
        losses_R = torch.nn.functional.cross_entropy(logits_RV, ids_R, reduction="none")
        _add(sums, generation, [float(losses_R.double().sum()), len(ids_R)])
    return {scope: exp(total / count) for scope, (total, count) in sums.items() if count}


def compare_targets(original: Target, tuned: Target, generations: Sequence[Generation]) -> dict[str, Change]:
    """Let both targets read the same answers; return how their distributions of each answer token differ, per slice and as
    "overall"."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    pairs = zip(_answer_logits(original, generations), _answer_logits(tuned, generations), strict=True)
    for (generation, ours_RV), (_, theirs_RV) in pairs:
        log_p_RV, log_q_RV = ours_RV.double().log_softmax(-1), theirs_RV.double().log_softmax(-1)
        apart_R = (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)
        same = (ours_RV.argmax(-1) == theirs_RV.argmax(-1)).sum()
        _add(sums, generation, [float(same), float(apart_R.sum()), len(apart_R)])
    return {scope: Change(same / count, apart / count) for scope, (same, apart, count) in sums.items() if count}


def _add(sums: dict[str, list[float]], generation: Generation, values: Sequence[float]) -> None:
    """Add an answer's values to its slice's and to those of all."""
    for scope in ("overall", generation.request.slice):
        sums[scope] = [a + b for a, b in zip(sums[scope], values, strict=True)]


@torch.no_grad()
def _answer_logits(target: Target, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Tensor]]:
    """Yield each answer with the logits [R, V] from which the target would have chosen its tokens, shortest first."""
    order = sorted(generations, key=lambda g: len(g.output_ids))
    for start in range(0, len(order), _ANSWERS_PER_PASS):
        group = order[start : start + _ANSWERS_PER_PASS]
        samples = [to_sample(g) for g in group]
        features = compute_features(target, samples, (), target.dtype)
        batch = collate([[f] for f in features], max(len(s.ids) for s in samples)).to(target.device)
        for row, (generation, sample) in enumerate(zip(group, samples, strict=True)):
            first, length = len(generation.request.prompt_ids), len(sample.ids)
            yield generation, target.head.logits(batch.last[row, first - 1 : length - 1])
