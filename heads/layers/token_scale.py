"""The embedding scale: what EAGLE-1 and Hydra multiply the target's embeddings by where they read them beside its states.

A target's embeddings have a tenth of its states' size or less. If one matrix reads both as they are, an optimizer step changes
the head's response to the state far more than its response to the token, which it then learns late. A new head therefore
reads scaled embeddings; an export multiplies the scale into the matrix.
"""

import torch
from torch import Tensor

from draftsmith.heads.target.probe import probe_ids
from draftsmith.heads.target.target import Target


def token_scale(target: Target) -> float:
    """Return the scale that brings the target's embeddings to the size of its last states, rounded to a power of two, so that
    exports hold the same numbers."""
    state, token = sizes(target)
    return float(2 ** (state / token.clamp_min(1e-9)).log2().round())


@torch.no_grad()
def sizes(target: Target) -> tuple[Tensor, Tensor]:
    """Return the root mean squares of the target's last states and of its embeddings: medians over random tokens, since
    the states of single tokens can be a thousand times larger."""
    ids = probe_ids(target)
    state, token = (
        x.float().square().mean(-1).sqrt().median() for x in (target.forward(ids).last, target.embedding[ids])
    )
    return state, token


def fold(weight: Tensor, tokens: slice, scale: float) -> Tensor:
    """Return the matrix that reads embeddings as they are, from one that reads scaled ones in the columns `tokens`."""
    folded = weight.clone()
    folded[:, tokens] *= scale
    return folded
