"""The figures of training: what an optimizer step sums up, the clock, and where they go (metrics.jsonl, Weights & Biases)."""

import json
import time
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.measure.forecast import Forecast, Point, forecast
from draftsmith.eval.measure.history import point_of
from draftsmith.files import explain_os_error, write_text
from draftsmith.foreign.files import read_lines
from draftsmith.foreign.json import parse_json
from draftsmith.heads.losses.head_loss import LossOutput
from draftsmith.recipe.schema import TrackingSpec
from draftsmith.train.stopping import code_of


@dataclass
class StepSums:
    """Sums of one optimizer step over micro-batches (and, after `reduce`, over processes)."""

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
        return cls(nothing.clone(), z.clone(), z.clone(), z.clone(), z.clone(), nothing, torch.zeros(4, device=device))

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
    """The clock of this process; its readings never reach files that a resume must reproduce."""

    first_tokens: int
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.perf_counter)

    def speed(self, tokens: int) -> float:
        """Return the tokens per second of training since the process began, without evaluations and checkpoints."""
        return (tokens - self.first_tokens) / max(self.seconds, 1e-9)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested mappings and lists into `a/b` and `a/0` keys, as dashboards want them."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (list, tuple)):
            flat |= flatten({str(i): v for i, v in enumerate(value)}, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


class Tracker:
    """Append one JSON object per line to metrics.jsonl and mirror it to W&B, whose run ends as the training does.

    curve: the evaluations so far, also those before an interruption. The file holds no clock times, so that an interrupted and resumed run leaves the same file.
    """

    def __init__(self, folder: Path, spec: TrackingSpec, name: str, config: dict[str, Any], resume_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        # A run that starts over evaluates its initial head again, as step 0.
        kept = self._cut_after(resume_step or -1)
        self.curve = [point for record in kept if (point := point_of(record, str(self.path)))]
        self._run: Any = None
        if spec.wandb == "disabled":
            return
        import wandb

        identity = self._run_id(folder, new=resume_step == 0)
        before = sorted((folder / "wandb").glob(f"offline-run-*-{identity}"))
        try:
            self._run = wandb.init(
                project=spec.project,
                name=name,
                id=identity,
                resume="allow" if spec.wandb == "online" else None,
                config=config,
                dir=str(folder),
                mode=spec.wandb,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"Weights & Biases did not start ({' '.join(str(error).split())}): run `wandb login`, or set "
                "tracking.wandb to offline or disabled."
            ) from error
        if spec.wandb == "offline":
            # `wandb sync` takes no file for the continuation of another: this one holds all steps, the others leave its sight.
            for values in kept:
                self._run.log(flatten(values), step=values["step"])
            for old in before:
                old.rename(old.with_name(old.name.replace("offline-run", "continued-run")))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else code_of(error))

    def _run_id(self, folder: Path, *, new: bool) -> str:
        """Return the run's id on W&B: a resumed run keeps that of the interrupted one, so that both are one dashboard; a run
        that starts over has a new one, as W&B takes no step twice."""
        path = folder / "wandb_id"
        if new or not path.exists():
            write_text(path, uuid4().hex[:12])
        return path.read_text(encoding="utf-8")

    def _cut_after(self, step: int) -> list[dict[str, Any]]:
        """Drop lines that a killed run wrote after its last checkpoint, which will be written again; return the others."""
        if not self.path.exists():
            return []
        kept: list[bytes] = []
        records: list[dict[str, Any]] = []
        remedy = "remove that line, or add --redo train to begin again"
        for number, line in enumerate(read_lines(self.path, remedy), start=1):
            if not line.endswith(b"\n"):
                break
            place = f"{self.path}, line {number}"
            record = parse_json(line, place, remedy)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise UserError(f"{place} holds no step of a training: {remedy}.")
            if record["step"] > step:
                break
            kept.append(line)
            records.append(record)
        write_text(self.path, b"".join(kept).decode())
        return records

    def foresee(self, record: dict[str, Any], total: int, num_speculative_tokens: int) -> Forecast | None:
        """Add the evaluation in `record` to the curve, and the forecast of tau after `total` steps to the record; return it,
        None where none can be made or the training ends here."""
        point = Point(record["step"], record["tokens"], record["tau"]["overall"])
        self.curve.append(point)
        if not 0 < point.step < total:
            return None
        found = forecast(self.curve, round(point.tokens * total / point.step), num_speculative_tokens)
        if found is not None:
            record["forecast"] = asdict(found)
        return found

    def log(self, values: dict[str, Any], extra: dict[str, float] | None = None) -> None:
        """Log one step; `extra` (speeds) goes to W&B only."""
        with explain_os_error(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._run is not None:
            self._run.log(flatten(values) | (extra or {}), step=values["step"])
