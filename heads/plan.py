"""What a training pass needs to know of a batch's tokens, masks and documents: found on the CPU, before the step, so that the step has
nothing to ask of the device.

Shapes: B batch rows, L tokens, R_k rows of step k (flat indices b*L+t).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.data.documents import Pass
from draftsmith.heads.layers.row_plan import RowPlan, plan_rows
from draftsmith.heads.losses.plan import LossPlan


@dataclass(frozen=True)
class Plan:
    """What `DraftHead.plan` found; it travels with the batch.

    Attributes:
        made_for: the number of steps asked for, and whether the head was in training mode.
        rows: [R_k] of each step, ascending: those that `DraftHead.supervised` names.
        among: [R_k] of each step, where its rows stand among those that the method computed before.
        queries: the rows whose attention is computed, by pieces or by steps.
        passes: the documents, for a model that reads them unpacked.
        tuned: [R] the rows of a tuned target's loss.
        draw: what seeds dropout inside of others' layers.
        loss: what the loss needs to know, where its settings were known.
    """

    made_for: tuple[int, bool]
    rows: tuple[Tensor, ...]
    among: tuple[Tensor, ...] = ()
    queries: tuple[RowPlan, ...] = ()
    passes: tuple[Pass, ...] = ()
    tuned: Tensor | None = None
    draw: int | None = None
    loss: LossPlan | None = None

    def laid_out(self, device: torch.device) -> "Plan":
        """Return the plan with what the kernels of a device need besides."""
        if device.type != "cuda":
            return self
        return replace(self, queries=tuple(queries.pack() for queries in self.queries))


def flat_rows(mask_BL: Tensor) -> Tensor:
    """Return the flat indices [R] of the rows marked in a mask, ascending."""
    return mask_BL.flatten().nonzero().flatten()


def plan_queries(batch: TrainBatch, rows: Tensor) -> RowPlan:
    """Return the plan whose query rows are the flat indices `rows`."""
    needed = torch.zeros(batch.ids.numel(), dtype=torch.bool).index_fill(0, rows, True)
    return plan_rows(batch.document, needed.view_as(batch.ids))
