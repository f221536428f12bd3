"""What one optimizer step adds up."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.losses.head_loss import LossOutput


@dataclass
class StepSums:
    """What one optimizer step adds up over micro-batches (and, after `reduce`, over processes)."""

    loss: Tensor
    correct: Tensor
    acceptance: Tensor
    rows: Tensor
    tokens: Tensor
    tuned: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "StepSums":
        """Sums of nothing."""
        z = torch.zeros(steps, device=device)
        nothing = torch.zeros((), device=device)
        return cls(nothing.clone(), z.clone(), z.clone(), z.clone(), nothing, torch.zeros(4, device=device))

    def add(self, scored: LossOutput, tokens: int) -> None:
        """Add a micro-batch."""
        self.loss += scored.loss_sum.detach()
        self.correct += scored.step_correct
        self.acceptance += scored.step_acceptance
        self.rows += scored.step_rows
        self.tokens += tokens
        if scored.tuned is not None:
            self.tuned += scored.tuned


def check_finite(became: str, value: Tensor | float | None, step: int) -> None:
    """Raise UserError unless `value`, of optimizer step number `step`, is a number; None is of a launch that tells none.
    became: what begins the sentence."""
    if value is not None and not isfinite(float(value)):
        raise UserError(
            f"{became} {float(value)} at step {step}: lower train.lr and train.muon_lr, or set train.precision to "
            "no; the last checkpoint is unharmed."
        )


def tuned_facts(sums: Tensor) -> dict[str, Any]:
    """Return what a record says of a target that is tuned, from the sum of `LossOutput.tuned`; nothing where none is."""
    _, apart, same, rows = sums.tolist()
    return {"tuned": {"kl": apart / rows, "agreement": same / rows}} if rows else {}
