"""Packed documents as padded rows, for models that read a document a row.

Shapes: B batch rows, L tokens, M documents of one pass, n its longest, R their tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import plan_passes


@dataclass(frozen=True)
class Pass:
    """Some documents, a padded row each. positions_Mn: flat indices b*L+t of their tokens, a document's first one on its padding.
    places_R: where in M*n their tokens stand. positions_R: flat indices of these."""

    positions_Mn: Tensor
    places_R: Tensor
    positions_R: Tensor


def plan_documents(document_BL: Tensor, most_tokens: int) -> tuple[Pass, ...]:
    """Return passes over all documents (id >= 0), of at most so many tokens each, padding included; a longer document is alone."""
    L, flat = document_BL.shape[1], document_BL.flatten()
    before = torch.cat([flat.new_full((1,), -1), flat[:-1]])
    begins = (flat != before).logical_or_(torch.arange(len(flat)) % L == 0).nonzero().flatten()
    lengths = torch.diff(begins, append=begins.new_tensor([len(flat)]))
    real = flat[begins] >= 0
    starts, lengths = begins[real], lengths[real]
    passes = []
    for group in plan_passes(lengths.tolist(), most_tokens):
        start_M1, length_M1 = (x[list(group)][:, None] for x in (starts, lengths))
        step_n = torch.arange(int(length_M1.max()))
        real_Mn = step_n < length_M1
        positions_Mn = (start_M1 + step_n).where(real_Mn, start_M1)
        places_R = real_Mn.flatten().nonzero().flatten()
        passes.append(Pass(positions_Mn, places_R, positions_Mn.flatten()[places_R]))
    return tuple(passes)
