"""The figures of training: what an optimizer step sums up, the clock, and where they go (metrics.jsonl, dashboards)."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.training.forecast import Forecast, Point, forecast
from draftsmith.eval.training.history import point_of
from draftsmith.heads.losses.head_loss import LossOutput
from draftsmith.recipe.schema import TrackingSpec
from draftsmith.storage import explain_os_error, write_text
from draftsmith.train.dashboards import Dashboards, read_past


@dataclass
class StepSums:
    """Sums of one optimizer step over micro-batches; step_loss, correct, acceptance and rows by draft step."""

    loss: Tensor
    step_loss: Tensor
    correct: Tensor
    acceptance: Tensor
    rows: Tensor
    tokens: Tensor
    tuned: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> "StepSums":
        """Return sums that are all 0."""
        z = torch.zeros(steps, device=device)
        nothing = torch.zeros((), device=device)
        return cls(nothing.clone(), z, z.clone(), z.clone(), z.clone(), nothing, torch.zeros(4, device=device))

    def add(self, scored: LossOutput, tokens: int) -> None:
        """Add a micro-batch."""
        self.loss += scored.loss_sum.detach()
        self.step_loss += scored.step_loss
        self.correct += scored.step_correct
        self.acceptance += scored.step_acceptance
        self.rows += scored.step_rows
        self.tokens += tokens
        if scored.tuned is not None:
            self.tuned += scored.tuned


def check_finite(became: str, value: Tensor | float | None, step: int) -> None:
    """Raise UserError where `value`, of optimizer step number `step`, is not finite; None, of a launch that reports no value,
    passes. became: the beginning of the sentence."""
    if value is not None and not isfinite(float(value)):
        raise UserError(
            f"{became} {float(value)} at step {step}: lower train.lr and train.muon_lr, or set train.precision to "
            "no; the last checkpoint is unharmed."
        )


def tuned_figures(sums: Tensor) -> dict[str, Any]:
    """Return a record's figures of a tuned target from the sum of `LossOutput.tuned`; nothing where no target is tuned."""
    _, apart, same, rows = sums.tolist()
    return {"tuned": {"kl": apart / rows, "agreement": same / rows}} if rows else {}


@dataclass
class Pace:
    """The clock of this process; its readings never reach files that a resume must reproduce. extra: what else of the last step
    goes to dashboards alone."""

    first_tokens: int
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.perf_counter)
    extra: dict[str, float] = field(default_factory=dict)

    def speed(self, tokens: int) -> float:
        """Return the tokens per second of training since the process began, without evaluations and checkpoints."""
        return (tokens - self.first_tokens) / max(self.seconds, 1e-9)

    def figures(self, tokens: int, device: torch.device) -> dict[str, float]:
        """Return what dashboards get of a step beyond its record: speed, memory (of a GPU the peak) and what was noted beside it."""
        on_gpu = device.type == "cuda"
        used = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        return {"tokens_per_second": self.speed(tokens), "memory_gib": used / 2**30, **self.extra}


class Tracker(Dashboards):
    """The dashboards of a training, with metrics.jsonl, which gets a JSON object per step.

    curve: the evaluations so far, also those before an interruption. The file holds no clock times, so that an interrupted and
    resumed run leaves the same file.
    """

    def __init__(self, folder: Path, spec: TrackingSpec, name: str, config: dict[str, Any], resume_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        # A run that starts over evaluates its initial head again, as step 0.
        past = read_past(self.path, resume_step or -1)
        if self.path.exists():  # what a killed run wrote after its last checkpoint will be written again
            write_text(self.path, b"".join(past.lines).decode())
        self.curve = [point for record in past.records if (point := point_of(record, str(self.path)))]
        super().__init__(folder, spec, name, config, past, fresh=resume_step == 0)

    def foresee(self, record: dict[str, Any], total: int, num_speculative_tokens: int) -> Forecast | None:
        """Add the evaluation in `record` to the curve, and the forecast of tau after `total` steps to the record; return it,
        None where none can be made or the training ends here."""
        point = Point(record["step"], record["tokens"], record["tau"]["overall"])
        self.curve.append(point)
        if not 0 < point.step < total:
            return None
        expected = forecast(self.curve, round(point.tokens * total / point.step), num_speculative_tokens)
        if expected is not None:
            record["forecast"] = asdict(expected)
        return expected

    def log(self, record: Mapping[str, Any], clocks: Mapping[str, float] | None = None) -> None:
        """Log one step; its `clocks` (speeds, memory) go to the dashboards alone."""
        with explain_os_error(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        super().log(record, clocks)
