"""D-PACE: weights of the slots of a block by how much each adds to the accepted length.

"D-PACE" (arXiv 2605.18810). Shapes: R rows of all slots, N blocks, S slots.

A slot's draft is accepted with about the probability q that the head gives to its label, smoothed: q' = (1 - alpha) q + alpha. The draft
gets as far as slot j with C_j = q'_1 .. q'_j, so that the accepted length is the sum of C_j. Its gradient by log q'_j is the weight of
slot j: the sum of C_m over m >= j. A slot that is not trained is passed over.
"""

import torch
from torch import Tensor

from draftsmith.heads.losses.spec import LossSpec


@torch.no_grad()
def dpace(chance_R: Tensor, block_R: Tensor, slot_R: Tensor, blocks: int, slots: int, spec: LossSpec) -> Tensor:
    """Return the weights [R] of rows.

    chance_R: the probability of each row's label. block_R, slot_R: the numbers of its block and of its slot, each pair once. blocks,
    slots: how many there are.
    """
    place_R = block_R * slots + slot_R
    flat = torch.full((blocks * slots,), -1.0, device=chance_R.device)
    chance_NS = flat.index_copy(0, place_R, chance_R.float()).view(blocks, slots)
    trained_NS = chance_NS >= 0
    smoothed_NS = torch.where(trained_NS, (1 - spec.dpace_alpha) * chance_NS + spec.dpace_alpha, 1.0)
    reached_NS = smoothed_NS.cumprod(1)
    further_NS = trained_NS.float()  # C_m / C_j, summed: without a division, as C_j may underflow
    for slot in reversed(range(slots - 1)):
        further_NS[:, slot] += smoothed_NS[:, slot + 1] * further_NS[:, slot + 1]
    weights = {
        "dpace": reached_NS * further_NS,
        "dpace_confidence": reached_NS,
        "dpace_continuation": further_NS,
    }
    return weights[spec.slot_weights].flatten()[place_R]
