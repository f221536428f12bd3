"""What the loss needs to know of a batch before its logits are there: which positions the teacher is asked about, which rows each piece
has, and what divides the sum.

Shapes: B batch rows, L tokens, R_k rows of step k (flat indices b*L+t), U teacher positions of all steps, S steps.

Pieces go by positions, so that each is asked about once; with D-PACE by blocks, the steps of one row, whose weights depend on each other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.plan import LossPlan


def plan_loss(rows: Sequence[Tensor], offsets: Sequence[int], batch: TrainBatch, spec: LossSpec) -> LossPlan:
    """Return the plan of rows [R_k] and offsets of steps, those of a tuned target (offset -1) behind the others. All on the CPU."""
    asked = [at + 1 + offset for at, offset in zip(rows, offsets, strict=True)]
    positions_U, inverse = torch.unique(torch.cat(asked), return_inverse=True)
    indices = inverse.split([len(at) for at in asked])
    assert all((index.diff() >= 0).all() for index in indices), "the rows of a step ascend"
    weights = None
    if spec.normalize == "sequence":
        counts, key = document_rows(batch, rows[0])
        weights = counts.clamp_min(1.0).reciprocal()[key]
    depths = [spec.step_weight(offset) for offset in offsets if offset >= 0]
    known, blocks = tuple(index.numpy() for index in indices), tuple[Tensor, ...]()
    if spec.dpace:
        blocks = torch.unique(torch.cat([*rows]), return_inverse=True)[1].split([len(at) for at in rows])
    known_blocks = tuple(index.numpy() for index in blocks)
    counts_S = torch.tensor([len(at) for at in rows[: len(depths)]])
    of_steps = (torch.tensor(depths), counts_S, torch.eye(len(depths), dtype=torch.float64))
    return LossPlan(positions_U, indices, known, blocks, known_blocks, weights, *of_steps)


def divisor_of(rows: Sequence[Tensor], batch: TrainBatch, spec: LossSpec) -> Tensor:
    """Return the divisor of `loss_divisor` from the rows of the steps, those of all steps for "weights"."""
    if spec.normalize == "positions":
        return torch.tensor(batch.ids.numel())
    if spec.normalize == "weights":
        counts = torch.tensor([len(at) for at in rows])
        return (counts * torch.tensor([spec.step_weight(k) for k in range(len(rows))], dtype=torch.float32)).sum()
    if spec.normalize == "sequence":
        return document_rows(batch, rows[0])[0].count_nonzero()
    return torch.tensor(len(rows[0]))


def document_rows(batch: TrainBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the rows each document has, and each flat position's document number in that count."""
    marked = torch.zeros(batch.ids.numel(), device=rows.device).index_fill(0, rows, 1.0)
    row = torch.arange(len(batch.ids), device=rows.device)[:, None]
    key = (row * (batch.document.max() + 2) + batch.document + 1).flatten()
    return torch.bincount(key, marked), key
