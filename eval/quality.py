"""What a lossy decoder did to the text: its perplexity under the target, beside that of the target's own text.

Shapes: B rows, L tokens, R answer tokens, V target vocab.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import exp

import torch

from draftsmith.data.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.eval.decode import Generation
from draftsmith.eval.teacher_forced import to_sample
from draftsmith.heads.target import Target

_ANSWERS_PER_PASS = 8


@torch.no_grad()
def perplexities(target: Target, generations: Sequence[Generation]) -> dict[str, float]:
    """Return exp of the mean -log p per answer token, per slice and as "overall"; p is the target's law at temperature 1.

    A repetitive text has a low perplexity too: compare with the target's own texts at the same sampling setting.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    order = sorted(generations, key=lambda g: len(g.output_ids))
    for start in range(0, len(order), _ANSWERS_PER_PASS):
        group = order[start : start + _ANSWERS_PER_PASS]
        samples = [to_sample(g) for g in group]
        features = compute_features(target, samples, (), target.dtype)
        batch = collate([[f] for f in features], max(len(s.ids) for s in samples)).to(target.device)
        for row, (generation, sample) in enumerate(zip(group, samples, strict=True)):
            first, length = len(generation.request.prompt_ids), len(sample.ids)
            logits_RV = target.head.logits(batch.last[row, first - 1 : length - 1])
            losses_R = torch.nn.functional.cross_entropy(logits_RV, batch.ids[row, first:length], reduction="none")
            for scope in ("overall", generation.request.slice):
                sums[scope][0] += float(losses_R.double().sum())
                sums[scope][1] += length - first
    return {scope: exp(total / count) for scope, (total, count) in sums.items() if count}
