"""What run.json holds of the stages of a run."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

STAGES = ("answers", "features", "train", "evaluate", "simulate", "export")

FOLLOWERS = {
    "answers": STAGES,
    "features": STAGES[1:],
    "train": STAGES[2:],
    "evaluate": ("evaluate",),
    "simulate": ("simulate",),
    "export": ("export",),
}
"""The stages that are made again with a stage, itself included, as they were made from it."""


@dataclass(frozen=True)
class StageRecord:
    """What run.json holds of a stage. inputs: the settings it was made from, flat. state: "running", "done", "removing", or "aside"
    where only its earlier version is there. earlier: the record of that one, whose files are in `.earlier` beside their places
    until the stage is done again. redo: the stage of --redo, with which it is put back, "" for never.
    facts: figures it reported (counts, seconds, tokens per second). files: path in the run directory -> size
    and, where that takes no time, SHA-256 of what it left; none in records of earlier versions. recipe: the whole recipe, flat, to
    tell by its keys what changed in inputs that are hashes; empty in records of earlier versions."""

    inputs: dict[str, Any]
    fingerprint: str
    state: str
    facts: dict[str, Any]
    files: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] | None = None
    redo: str = ""

    @property
    def there(self) -> bool:
        """Whether the stage has files of its own."""
        return self.state in ("running", "done")


def plain(record: StageRecord) -> dict[str, Any]:
    """Return a record as run.json holds it, without what only a stage that is made again has."""
    return {key: value for key, value in vars(record).items() if value or key not in ("earlier", "redo")}


def aside(known: dict[str, Any] | None, redo: str) -> StageRecord:
    """Return the record of a stage whose only version is set aside. known: that version's."""
    return StageRecord({}, "", "aside", {}, earlier=known, redo=redo)


def as_record(name: str, entry: Any) -> StageRecord:
    """Return an entry of run.json. Raises TypeError or ValueError for what is none."""
    record = StageRecord(**entry)
    if (
        name not in STAGES
        or not isinstance(record.inputs, dict)
        or not isinstance(record.facts, dict)
        or not isinstance(record.recipe, dict)
    ):
        raise ValueError(f"{name!r} is no stage with inputs and facts")
    if record.earlier is not None:
        as_record(name, record.earlier)
    if record.state not in ("running", "done", "removing", "aside") or not isinstance(record.fingerprint, str):
        raise ValueError(f"the stage {name!r} has the state {record.state!r}")
    files = {path: (int(size), digest) for path, (size, digest) in record.files.items()}
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path in files):
        raise ValueError(f"the stage {name!r} names files outside the run")
    return replace(record, files=files)


def run_dir_of(recipe: dict[str, Any]) -> Path | None:
    """Return the run directory of a recipe in a record; None where the record is of an earlier version, and has none."""
    return Path(recipe.get("output_dir") or f"runs/{recipe['name']}") if "name" in recipe else None


def flat_inputs(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return inputs as run.json keeps them, so that they compare equal: flat, by the dotted keys of recipes and overrides."""
    flat: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, dict) and value:
            flat |= flat_inputs(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value, default=str))
    return flat
