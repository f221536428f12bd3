"""A run directory: run.json records what every stage was made from, so that finished stages are reused.

runs/<name>/run.json  answers.jsonl  features/  train/  evaluation/t0/ t1/  export/
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import UserError
from draftsmith.files import claim, fingerprint, write_json
from draftsmith.recipe.schema import Recipe

STAGES = ("answers", "features", "train", "evaluate", "simulate", "export")
DATA_STAGES = ("answers", "features")
"""The stages in a recipe's data_dir, which runs may share; the others are in the run directory."""

FILES = {
    "answers": ("answers.jsonl", "answers.jsonl.partial"),
    "features": ("features",),
    "train": ("train",),
    "evaluate": ("evaluation",),
    "simulate": ("simulation",),
    "export": ("export",),
}
"""What each stage leaves in the run directory, the finished thing first."""

FOLLOWERS = {
    "answers": STAGES,
    "features": STAGES[1:],
    "train": STAGES[2:],
    "evaluate": ("evaluate",),
    "simulate": ("simulate",),
    "export": ("export",),
}
"""The stages that are removed with a stage, itself included, as they were made from it."""

COMMAND_STAGES = {
    "run": ("answers", "features", "train", "evaluate", "export"),
    "regenerate": ("answers",),
    "extract": ("answers", "features"),
    "train": ("answers", "features", "train"),
    "evaluate": ("evaluate",),
    "evaluate --no-decode": ("simulate",),
    "export": ("export",),
}
"""The stages that commands make where they are missing."""


@dataclass(frozen=True)
class StageRecord:
    """What run.json holds of a stage. inputs: the settings it was made from, flat. state: "running" or "done".
    facts: figures it reported (counts, seconds, tokens per second)."""

    inputs: dict[str, Any]
    fingerprint: str
    state: str
    facts: dict[str, Any]


class RunDirectory:
    """A run directory and its run.json. stages: those that are made here.

    In a data_dir that several runs share, the other stages belong to one of these runs and are left alone.
    """

    def __init__(self, path: Path, stages: Sequence[str] = STAGES) -> None:
        self.path, self._stages = path, stages
        self._key = "--output_dir" if "train" in stages else "--data_dir"
        self._file = path / "run.json"
        self._locked: TextIO | None = None

    def record(self, stage: str) -> StageRecord | None:
        """Return what run.json holds of a stage, None where it holds nothing."""
        entry = self._read().get(stage)
        return StageRecord(**entry) if entry else None

    def begin(self, stage: str, inputs: dict[str, Any], *, redo: bool = False) -> bool:
        """Return True if the stage is already done with the same inputs; else mark it as running.

        Raises UserError naming what changed if its files were made with other inputs (`redo` removes them first), and
        where another process is making a stage in this directory.
        """
        if redo:
            self._lock()
            self.remove(stage)
        self.check_unchanged(stage, inputs)
        if self.holds(stage, inputs):
            return True
        self._lock()
        flat = _plain(inputs)
        self._write(stage, StageRecord(flat, fingerprint(flat), "running", {}))
        return False

    def check_unchanged(self, stage: str, inputs: dict[str, Any]) -> None:
        """Raise UserError, which names the settings that changed, where a stage's files were made from other inputs."""
        flat, known = _plain(inputs), self.record(stage)
        if known is None or known.fingerprint == fingerprint(flat) or not self._has_work(stage):
            return
        before = known.inputs
        keys = sorted(flat.keys() | before)
        # A setting that is left out and an empty one are the same.
        now, then = (
            {key: None if one.get(key) in ([], {}, "") else one.get(key) for key in keys} for one in (flat, before)
        )
        changed = [key for key in keys if now[key] != then[key]] or keys
        changed.sort(key=lambda key: key != "method")  # first, as other options come with it
        shown = "; ".join(f"{key} was {_short(before.get(key))}, is {_short(flat.get(key))}" for key in changed[:3])
        raise UserError(
            f"The stage '{stage}' in {self.path} was made with other settings ({shown}): choose another {self._key}, "
            f"or add --redo {stage} to remove it and what follows from it."
        )

    def _lock(self) -> None:
        """Lock the directory against other processes that make stages, until `finish` or the end of this process."""
        if self._locked is None and os.environ.get("RANK", "0") == "0":
            self._locked = claim(self.path / ".lock")

    def holds(self, stage: str, inputs: dict[str, Any]) -> bool:
        """Return whether a stage is done with these inputs; nothing is changed."""
        known = self.record(stage)
        made = known is not None and known.state == "done" and known.fingerprint == fingerprint(_plain(inputs))
        return made and (self.path / FILES[stage][0]).exists()

    def _has_work(self, stage: str) -> bool:
        """Return whether a stage left files that took work: a training that failed before its first checkpoint did not."""
        if stage == "train":
            return any(self.path.glob("train/best")) or any(self.path.glob("train/step_*"))
        return any((self.path / name).exists() for name in FILES[stage])

    def finish(self, stage: str, facts: dict[str, Any]) -> None:
        """Mark a stage as done, with the figures it reports."""
        known = self.record(stage)
        assert known is not None
        self._write(stage, StageRecord(known.inputs, known.fingerprint, "done", facts))
        self._release()

    def clear(self, stage: str) -> None:
        """Remove a stage as `remove` does, for another process to make it. Raises UserError where one is making a stage here."""
        self._lock()
        self.remove(stage)
        self._release()

    def _release(self) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    def remove(self, stage: str) -> None:
        """Remove a stage and all that are made here and follow from it."""
        entries = self._read()
        for later in (name for name in FOLLOWERS[stage] if name in self._stages):
            for name in FILES[later]:
                path = self.path / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            entries.pop(later, None)
        if self._file.exists():
            write_json(self._file, entries)

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {}
        try:
            entries = json.loads(self._file.read_text(encoding="utf-8"))
            for entry in entries.values():
                StageRecord(**entry)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._file} cannot be read ({error}): it was changed by hand or written by another version of "
                f"draftsmith; restore it or choose another {self._key}."
            ) from error
        return entries

    def _write(self, stage: str, record: StageRecord) -> None:
        write_json(self._file, self._read() | {stage: vars(record)})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return inputs as run.json keeps them, so that they compare equal: flat, by the dotted keys of recipes and overrides."""
    flat: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, dict) and value:
            flat |= _plain(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value, default=str))
    return flat


def check_redo(names: Sequence[str], command: str, recipe: Recipe) -> None:
    """Refuse to remove what is no stage, and what `draftsmith COMMAND` would not make again with this recipe."""
    absent = {"answers": not recipe.answers.regenerate, "features": recipe.features.source == "online"}
    made = [stage for stage in COMMAND_STAGES.get(command, ()) if not absent.get(stage)]
    for name in names:
        if name not in STAGES:
            raise UserError(f"--redo {name}: the stages are {', '.join(STAGES)}.")
        if name not in made:
            others = f"only {', '.join(made)}" if made else "nor any other"
            raise UserError(
                f"--redo {name}: `draftsmith {command}` does not make that stage here, {others}: leave --redo {name} out."
            )
