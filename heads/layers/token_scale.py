"""How loud a head that reads raw embeddings beside the target's states hears them, for EAGLE-1 and Hydra.

A target's embeddings are a tenth of its states and less. Where both enter one matrix as they are, a step of any optimizer
changes what the head makes of the state far more than what it makes of the token it goes on from, so it learns the latter
late. A new head therefore reads embeddings times a number, which is multiplied into the matrix where it is exported.
"""

import torch
from torch import Tensor

from draftsmith.heads.target.probe import probe_ids
from draftsmith.heads.target.target import Target


def token_scale(target: Target) -> float:
    """Return what brings the target's embeddings to the size of its last states: the next power of two, with which exports
    hold the same numbers."""
    state, token = sizes(target)
    return float(2 ** (state / token.clamp_min(1e-9)).log2().round())


@torch.no_grad()
def sizes(target: Target) -> tuple[Tensor, Tensor]:
    """Return the root mean squares of the target's last states and of its embeddings: medians over some random tokens, as
    single ones have states a thousand times larger."""
    ids = probe_ids(target)
    state, token = (
        x.float().square().mean(-1).sqrt().median() for x in (target.forward(ids).last, target.embedding[ids])
    )
    return state, token


def fold(weight: Tensor, tokens: slice, scale: float) -> Tensor:
    """A matrix that reads scaled embeddings in the columns `tokens` -> the one that reads them as they are."""
    folded = weight.clone()
    folded[:, tokens] *= scale
    return folded
