"""What feeds a step: micro-batches with all that is known of them before it."""

from dataclasses import dataclass, replace

import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead, count_rows
from draftsmith.heads.losses.plan import divisor_of, plan_loss
from draftsmith.heads.losses.spec import LossSpec


@dataclass(frozen=True)
class Fed:
    """A batch with its plan. divisor: its share of `loss_divisor`. rows: its rows of step 0 that count, each for a token to learn. covered:
    these tokens that some block predicts, for a head that samples blocks; else all. tokens: without padding."""

    batch: TrainBatch
    divisor: float
    rows: int
    covered: int
    tokens: int


def plan_batch(batch: TrainBatch, head: DraftHead, loss: LossSpec, device: torch.device) -> Fed:
    """Return a batch on the CPU with the plan of a training step on `device`. head: in training mode."""
    bare = batch.without_states()
    plan = head.plan(bare, head.trains.steps)
    scored = [*enumerate(plan.rows), *([] if plan.tuned is None else [(-1, plan.tuned)])]
    offsets, rows = zip(*scored, strict=True)
    plan = replace(plan.laid_out(device), loss=plan_loss(rows, offsets, bare, loss))
    divisor, count = float(divisor_of(plan.rows, bare, loss)), int(count_rows(bare))
    covered = len(torch.cat([at + k for k, at in enumerate(plan.rows)]).unique()) if head.trains.blocks else count
    return Fed(replace(batch, plan=plan), divisor, count, covered, int((batch.document >= 0).sum()))
