"""How loud a head that reads raw embeddings beside the target's states hears them, for EAGLE-1 and Hydra.

A target's embeddings are a tenth of its states and less. Where both enter one matrix as they are, a step of any optimizer
changes what the head makes of the state far more than what it makes of the token it goes on from, so it learns the latter
late. A new head therefore reads embeddings times a number, which is multiplied into the matrix where it is exported.
"""

import torch
from torch import Tensor

from draftsmith.heads.probe import probe_ids
from draftsmith.heads.target import Target


@torch.no_grad()
def token_scale(target: Target) -> float:
    """Return what brings the target's embeddings to the size of its last states: the next power of two, with which exports
    hold the same numbers. Medians over some random tokens are taken, as single ones have states a thousand times larger."""
    ids = probe_ids(target)
    state, token = target.forward(ids).last, target.embedding[ids]
    sizes = [x.float().square().mean(-1).sqrt().median() for x in (state, token)]
    return float(2 ** (sizes[0] / sizes[1].clamp_min(1e-9)).log2().round())


def fold(weight: Tensor, tokens: slice, scale: float) -> Tensor:
    """A matrix that reads scaled embeddings in the columns `tokens` -> the one that reads them as they are."""
    folded = weight.clone()
    folded[:, tokens] *= scale
    return folded
