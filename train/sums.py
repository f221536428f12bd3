"""What one optimizer step adds up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.heads.losses import LossOutput


@dataclass
class StepSums:
    """What one optimizer step adds up over micro-batches (and, after `reduce`, over processes)."""

    loss: Tensor
    correct: Tensor
    acceptance: Tensor
    rows: Tensor
    tokens: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "StepSums":
        """Sums of nothing."""
        z = torch.zeros(steps, device=device)
        return cls(torch.zeros((), device=device), z.clone(), z.clone(), z.clone(), torch.zeros((), device=device))

    def add(self, scored: LossOutput, tokens: int) -> None:
        """Add a micro-batch."""
        self.loss += scored.loss_sum.detach()
        self.correct += scored.step_correct
        self.acceptance += scored.step_acceptance
        self.rows += scored.step_rows
        self.tokens += tokens
