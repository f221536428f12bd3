"""Draw a sample of each document's rows that does not depend on how documents are packed.

Shapes: B batch rows, L tokens, n marked rows.
"""

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.noise import SAMPLE, uniforms


def sample_rows(batch: TrainBatch, rows_BL: Tensor, count: int) -> Tensor:
    """Return [B, L] bool: `count` of each document's marked rows (all of them, if there are fewer), drawn by the seed of
    the document and the position of the row alone."""
    marked_n = rows_BL.flatten().nonzero().flatten()
    line_BL = torch.arange(len(rows_BL), device=rows_BL.device)[:, None]
    document_n = (batch.document + line_BL * (batch.document.max() + 1)).flatten()[marked_n]
    seeds_n, position_n = (x.flatten()[marked_n] for x in (batch.seeds, batch.position))
    drawn_n = uniforms(seeds_n, position_n, SAMPLE, 1)[:, 0]
    order_n = drawn_n.argsort(stable=True)
    order_n = order_n[document_n[order_n].argsort(stable=True)]
    sorted_n = document_n[order_n]
    place_n = torch.arange(len(sorted_n), device=sorted_n.device) - torch.searchsorted(sorted_n, sorted_n)
    chosen = torch.zeros(rows_BL.numel(), dtype=torch.bool, device=rows_BL.device)
    chosen[marked_n[order_n[place_n < count]]] = True
    return chosen.view_as(rows_BL)
