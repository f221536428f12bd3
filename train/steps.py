"""What an optimizer step finds: summed up on the device, and read and told once the next step is on its way.

The host would else wait for the device in every step, which then stands idle until it is given the next one. A step whose loss or
gradient is not finite changes no weight: that is decided on the device (`leave_out`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.features.behind import HostCopies
from draftsmith.errors import UserError
from draftsmith.eval.training.history import Forecast
from draftsmith.heads.base import DraftHead
from draftsmith.heads.losses.head_loss import LossOutput
from draftsmith.progress import Bar
from draftsmith.train.checkpoints import Progress
from draftsmith.train.dashboards import Tracker


def step_sums(scored: LossOutput) -> Tensor:
    """Return [6 + 4K] what an optimizer step sums up over its micro-batches, in float32: the loss, `LossOutput.tuned` and
    `LossOutput.weights` (zeros where there are none), and by draft step the loss, the right guesses, the acceptance and the rows."""
    some = [x.reshape(-1) for x in (scored.tuned, scored.weights) if x is not None]
    none = scored.loss_sum.new_zeros(5 - sum(len(x) for x in some))
    more = [*some, none] if scored.weights is None else [none, *some]
    by_step = (scored.step_loss, scored.step_correct, scored.step_acceptance, scored.step_rows)
    return torch.cat([part.float() for part in (scored.loss_sum.detach()[None], *more, *by_step)])


@torch.no_grad()
def divide_again(head: DraftHead, sums: Tensor, divisor: Tensor) -> Tensor:
    """Divide the gradients by the sum of D-PACE's weights in `step_sums` of all processes, in place of `divisor`; return that sum.

    A weight is known once its pass is done, and the sum once the last micro-batch's is, when all others have their gradients.
    """
    # Without a label that the head can draft all gradients are zeros, and stay so.
    weights = torch.where(sums[5] > 0, sums[5], 1.0)
    gradients = [p.grad for p in head.parameters() if p.grad is not None]
    # Of sharded gradients a process has its part.
    own = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    torch._foreach_mul_(own, divisor.to(weights.device) / weights)
    return weights


def tuned_figures(apart: float, same: float, rows: float) -> dict[str, Any]:
    """Return a record's figures of a tuned target from the sums of `LossOutput.tuned`; nothing where no target is tuned."""
    return {"tuned": {"kl": apart / rows, "agreement": same / rows}} if rows else {}


@dataclass(frozen=True)
class Found:
    """Figures of a step of all processes on their way to the host. numbers: the norm of the gradient, the loss before and after it is
    divided, three figures of a tuned target, and by draft step the loss, the accuracy and the acceptance. wait: until they are there.
    with_norm: whether the norm is known. scaled: by fp16's scaler, which leaves out a gradient that is not finite without a word."""

    numbers: Tensor
    wait: Callable[[], None]
    with_norm: bool
    scaled: bool

    def read(self, step: int) -> tuple[dict[str, Any], float | None]:
        """Return figures for the record of optimizer step number `step`, and the norm of the gradient where it is a number. Raises
        UserError where the loss or the norm is not finite."""
        self.wait()
        norm, loss_sum, loss, apart, same, rows, *by_step = self.numbers.tolist()
        _check_finite("The loss became", loss_sum, step)
        if not self.scaled:
            _check_finite("The norm of the gradient became", norm, step)
        K = len(by_step) // 3
        step_loss, accuracy, acceptance = (by_step[i * K : (i + 1) * K] for i in range(3))
        figures = {"loss": loss, "step_loss": step_loss, "accuracy": accuracy, "acceptance": acceptance}
        return figures | tuned_figures(apart, same, rows), norm if self.with_norm and isfinite(norm) else None


def collect(
    sums: Tensor, divisor: Tensor, norm: Tensor | float | None, copies: HostCopies, *, scaled: bool
) -> tuple[Found, Tensor]:
    """Return the figures of a step from `step_sums` of all processes and the norm of the gradient, None where nothing tells it, and
    [] float32 on the device, 1 where the loss or the norm is not finite, else 0. The host does not wait."""
    whole, by_step = sums[:6], sums[6:].view(4, -1)
    if isinstance(norm, Tensor) and hasattr(norm, "full_tensor"):  # of sharded gradients
        norm = norm.full_tensor()
    known = norm.detach().float().reshape(1) if isinstance(norm, Tensor) else sums.new_full((1,), norm or 0.0)
    shares = by_step[:3] / by_step[3].clamp(min=1)
    numbers = torch.cat([known, whole[:1], whole[:1] / divisor, whole[2:5], shares.flatten()])
    broken = numbers[:2].isfinite().all().logical_not().float()
    copied, wait = copies.begin({"numbers": numbers})
    return Found(copied["numbers"], wait, norm is not None, scaled), broken


def leave_out(optimizers: Sequence[Any], broken: Tensor) -> None:
    """Let Accelerate's `optimizers` change nothing in their next step where `broken` is 1: they look at it on the device."""
    for optimizer in optimizers:
        optimizer.optimizer.found_inf = broken


def _check_finite(became: str, value: float, step: int) -> None:
    if not isfinite(value):
        raise UserError(
            f"{became} {value} at step {step}: lower train.lr and train.muon_lr, or set train.precision to "
            "no; the last checkpoint is unharmed."
        )


@dataclass
class Step:
    """An optimizer step that was taken. record: its line of metrics.jsonl, in which `found` is still to be filled in; None where
    there is nothing. progress: behind it. clocks: what goes to dashboards alone."""

    record: dict[str, Any]
    progress: Progress
    found: Found | None = None
    clocks: dict[str, float] = field(default_factory=dict)

    def read(self) -> None:
        """Complete the record; the host waits for the device. Raises UserError where the loss or the gradient is not finite."""
        if self.found is not None:
            figures, norm = self.found.read(self.record["step"])
            self.record |= figures
            self.clocks |= {} if norm is None else {"grad_norm": norm}
            self.found = None


class Teller:
    """Tells of every step in metrics.jsonl, on dashboards and on the progress line: once the next one is on its way, or before
    anything is saved. expected: the end as the last evaluation foretells it."""

    def __init__(self, tracker: Tracker | None, bar: Bar) -> None:
        self._tracker, self._bar = tracker, bar
        self._taken: Step | None = None
        self.expected: Forecast | None = None

    def taken(self, step: Step) -> None:
        """Tell of the step before this one."""
        self.rest()
        self._taken = step

    def rest(self) -> None:
        """Tell of the last step. Raises UserError where its loss or gradient is not finite."""
        if self._taken is None:
            return
        step, self._taken = self._taken, None
        step.read()
        if self._tracker:
            self._tracker.log(step.record, step.clocks)
        self._bar.update()
        line = postfix(step.record, step.progress.best_tau, self.expected, step.clocks["tokens_per_second"])
        self._bar.set_postfix_str(line, refresh=False)


def postfix(record: dict[str, Any], best_tau: float, expected: Forecast | None, speed: float) -> str:
    """Return what the progress line says of a step."""
    tau = f"tau {best_tau:.2f}" if best_tau else ""
    tau += f", forecast {expected} at the end " if expected else " " if tau else ""
    learned = ""
    if "loss" in record:
        a_step = f" ({mean(record['step_loss']):.3f} a draft step)" if len(record["step_loss"]) > 1 else ""
        learned = f"loss {record['loss']:.3f}{a_step} acc {record['accuracy'][0]:.2f} "
    return f"{learned}{tau}{speed:.0f} tok/s"
