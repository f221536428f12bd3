"""A run directory: run.json records what every stage was made from, so that finished stages are reused.

runs/<name>/run.json  answers.jsonl  features/  train/  evaluation/t0/ t1/  export/
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import UserError
from draftsmith.files import claim, fingerprint, sha256_file, sweep, write_json
from draftsmith.foreign.json import read_object
from draftsmith.heads.export.tuned import FOLDERS
from draftsmith.heads.formats.layout import layouts
from draftsmith.recipe.changes import differing, tell_changes
from draftsmith.recipe.schema import Recipe
from draftsmith.train.world import world

STAGES = ("answers", "features", "train", "evaluate", "simulate", "export")
DATA_STAGES = ("answers", "features")
"""The stages in a recipe's data_dir, which runs may share; the others are in the run directory."""

FILES = {
    "answers": ("answers.jsonl", "answers.jsonl.partial", "answers.jsonl.kept"),
    "features": ("features", "features.kept"),
    "train": ("train",),
    "evaluate": ("evaluation",),
    "simulate": ("simulation",),
    "export": ("export",),
}
"""What each stage leaves in the run directory, the finished thing first."""

_KNOWN = {
    "answers": r"answers\.jsonl(\.partial|\.kept)?",
    "features": r"features(\.kept)?/(index\.json|shard-\d{5,}\.safetensors)",
    "train": r"train/(best|step_\d+(\.tmp)?|summary\.json|(metrics|dashboards)\.jsonl|(wandb|trackio|mlflow)(_id)?|tensorboard)",
    "evaluate": r"evaluation/(t[\d.]+|report\.html|report\.md|costs\.json|plan\.json|routing\.json|settings)",
    "simulate": r"simulation/(t[\d.]+|report\.html|report\.md)",
    "export": "export/(" + "|".join(map(re.escape, (*layouts(), *FOLDERS.values()))) + ")",
}
"""What each stage makes, as paths in the run directory: files, and folders that are its own with all that is in them."""

_MEASURED = ("evaluate", "simulate")
"""The stages whose files are made again, without asking, where they are damaged."""
_LASTING = re.compile(
    r"^answers\.jsonl$|^features/|^train/(best/|summary\.json)|/result\.json$|^export/.*\.(safetensors|json|pt|bin|gguf)$"
)
"""What must be there for a stage to be done: not its checkpoints and logs, nor reports and READMEs that are written anew."""
_DIGESTED = 256 * 2**20
"""The most bytes of a file that is hashed whenever its stage is reused: a quarter of a second."""

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
    """What run.json holds of a stage. inputs: the settings it was made from, flat. state: "running", "done" or "removing".
    facts: figures it reported (counts, seconds, tokens per second). files: path in the run directory -> size
    and, where that takes no time, SHA-256 of what it left; none in records of earlier versions. recipe: the whole recipe, flat, to
    tell by its keys what changed in inputs that are hashes; empty in records of earlier versions."""

    inputs: dict[str, Any]
    fingerprint: str
    state: str
    facts: dict[str, Any]
    files: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


class RunDirectory:
    """A run directory and its run.json, the mark by which it is known. stages: those that are made here.

    In a data_dir that several runs share, the other stages belong to one of these runs and are left alone. Nothing is
    removed or overwritten but what run.json says was made here: a folder with other files and without that mark is refused.
    recipe: what stages are made by, None where that is not known.
    """

    def __init__(self, path: Path, stages: Sequence[str] = STAGES, recipe: Recipe | None = None) -> None:
        self.path, self._stages = path, stages
        self._recipe = {} if recipe is None else flat_inputs(asdict(recipe))
        self._key = "--output_dir" if "train" in stages else "--data_dir"
        self._file = path / "run.json"
        self._locked: TextIO | None = None
        self._hashed: set[str] = set()

    def record(self, stage: str) -> StageRecord | None:
        """Return what run.json holds of a stage; None where it holds nothing, or the stage is being removed."""
        record = self._read().get(stage)
        return None if record is None or record.state == "removing" else record

    def check_ours(self) -> None:
        """Raise UserError where the folder holds files but no run: it is somebody's, and nothing is written there."""
        if self._file.exists() or not self.path.is_dir():
            return
        foreign = sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))
        if foreign:
            raise UserError(
                f"{self.path} is not empty and no run of draftsmith (it holds {foreign[0]}, but no {self._file.name}): choose "
                f"another {self._key}, a new folder or one that a run has made."
            )

    def begin(self, stage: str, inputs: dict[str, Any], *, redo: bool = False, needed: Sequence[Path] = ()) -> bool:
        """Return True if the stage is already done with the same inputs, and all that is needed of it is there; else mark it
        as running.

        Raises UserError naming what changed if its files were made with other inputs (`redo` removes them first) or are
        other ones now, for files that were not made here, and where another process is making a stage in this directory.
        """
        if redo:
            self.clear(stage, release=False)
        self.check_unchanged(stage, inputs)
        if self.holds(stage, inputs) and all(path.exists() for path in needed):
            with suppress(UserError), self.writing():  # others may be at work, or this process may only read
                pass
            return True
        self._lock()
        self._check_unclaimed(stage)
        known, flat = self.record(stage), flat_inputs(inputs)
        if stage in _MEASURED and known is not None:
            for file, _ in self._spoilt(stage, known):
                if file.is_file():
                    file.unlink()  # ours by its record, and not what was measured any more
        self._write({stage: StageRecord(flat, fingerprint(flat), "running", {}, recipe=self._recipe)})
        return False

    def _check_unclaimed(self, stage: str) -> None:
        """Raise UserError for files where a stage will write that run.json does not know."""
        if self.record(stage) is None and (found := self._found(stage)):
            raise UserError(
                f"{found[0]} is there, but {self._file} does not know who made it: move it away, or choose another {self._key}."
            )

    def check_unchanged(self, stage: str, inputs: dict[str, Any]) -> None:
        """Raise UserError, which names the settings that changed, where a stage's files were made from other inputs."""
        flat, known = flat_inputs(inputs), self.record(stage)
        if known is None or known.fingerprint == fingerprint(flat) or not self._has_work(stage):
            return
        raise UserError(
            f"The stage '{stage}' in {self.path} was made with other settings ({self.told(stage, inputs)}): choose another "
            f"{self._key}, or add --redo {stage} to remove it and what follows from it."
        )

    def told(self, stage: str, inputs: dict[str, Any]) -> str:
        """Return in words what changed since a stage was made."""
        known = self.record(stage)
        return "" if known is None else tell_changes(known.inputs, flat_inputs(inputs), known.recipe, self._recipe)

    def changed(self, stage: str, inputs: dict[str, Any]) -> list[str]:
        """Return the inputs that changed since a stage left work here; none where it left none."""
        flat, known = flat_inputs(inputs), self.record(stage)
        return differing(known.inputs, flat) if known is not None and self._has_work(stage) else []

    def set_aside(self, stage: str, inputs: dict[str, Any], keep: Callable[[], None]) -> None:
        """Mark a stage as running with other inputs, after `keep` has set aside what it made with earlier ones, to be added to."""
        self._lock()
        keep()  # first: without its files a stage is not taken for done, whatever its record says
        flat = flat_inputs(inputs)
        self._write({stage: StageRecord(flat, fingerprint(flat), "running", {}, recipe=self._recipe)})

    def _lock(self) -> None:
        """Lock the directory against other processes that make stages, until `finish` or the end of this process.

        Then what a killed process left half-written goes, and a removal that was cut short is done. Raises UserError for a
        folder that is no run.
        """
        if self._locked is None and world().main:
            self.check_ours()
            self._locked = claim(self.path / ".lock")
            sweep(self.path)
            for stage in [name for name, record in self._read().items() if record.state == "removing"]:
                self._remove(stage)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock, so that nobody else writes here or takes what is half-written for a killed process's."""
        held = self._locked is not None
        self._lock()
        try:
            yield
        finally:
            if not held:
                self._release()

    def holds(self, stage: str, inputs: dict[str, Any]) -> bool:
        """Return whether a stage is done with these inputs, and its files are there as it left them.

        What is gone as a whole is made again, and so are results, and exports of which a file is gone. Raises UserError, naming the
        file, for anything else that changed since: it would be taken for what the record says.
        """
        known = self.record(stage)
        if known is None or known.state != "done" or known.fingerprint != fingerprint(flat_inputs(inputs)):
            return False
        if not (self.path / FILES[stage][0]).exists():
            return False
        spoilt = next(self._spoilt(stage, known), None)
        if spoilt is None:
            self._hashed.add(stage)  # once in a process: what it does itself it knows
        elif stage not in _MEASURED and (stage != "export" or spoilt[0].exists()):
            raise UserError(
                f"{spoilt[0]} {spoilt[1]} since the stage '{stage}' was done: restore it, or add --redo {stage} to make it "
                "and what follows from it again."
            )
        return spoilt is None

    def _spoilt(self, stage: str, known: StageRecord) -> Iterator[tuple[Path, str]]:
        """Yield the files of a finished stage that are not as they were left, and in words what is wrong with each."""
        for name, (size, digest) in known.files.items():
            file = self.path / name
            hashed = digest is not None and stage not in self._hashed
            if not file.is_file():
                yield file, "is gone"
            elif file.stat().st_size != size or (hashed and sha256_file(file) != digest):
                yield file, "was changed"

    def _found(self, stage: str) -> list[Path]:
        """Return what lies where a stage leaves its files and folders."""
        known = re.compile(_KNOWN[stage])
        there = [self.path, *(self.path / name for name in FILES[stage] if (self.path / name).is_dir())]
        paths = sorted(path for folder in there if folder.is_dir() for path in folder.iterdir())
        return [path for path in paths if known.fullmatch(path.relative_to(self.path).as_posix())]

    def _left(self, stage: str) -> dict[str, tuple[int, str | None]]:
        """Return the files that a finished stage is made of: their sizes, and digests where that takes no time."""
        lasting: dict[str, tuple[int, str | None]] = {}
        for found in self._found(stage):
            for path in [found] if found.is_file() else sorted(found.rglob("*")):
                name = path.relative_to(self.path).as_posix()
                if path.is_file() and _LASTING.search(name):
                    size = path.stat().st_size
                    cheap = size <= _DIGESTED and not name.startswith("features/shard")  # which has its own
                    lasting[name] = (size, sha256_file(path) if cheap else None)
        return lasting

    def _has_work(self, stage: str) -> bool:
        """Return whether a stage left files that took work: a training that failed before its first checkpoint did not."""
        if stage == "train":
            return any(self.path.glob("train/best")) or any(self.path.glob("train/step_*"))
        return any((self.path / name).exists() for name in FILES[stage])

    def finish(self, stage: str, facts: dict[str, Any]) -> None:
        """Mark a stage as done, with the figures it reports and the files it left."""
        known = self.record(stage)
        assert known is not None
        self._hashed.discard(stage)
        self._write({stage: replace(known, state="done", facts=facts, files=self._left(stage))})
        self._release()

    def clear(self, stage: str, *, release: bool = True) -> None:
        """Remove a stage and all that are made here and follow from it, as far as they were made here.

        The records go first: a process that dies meanwhile leaves no record of what is not there. release: keep no lock, as
        another process makes the stage. Raises UserError for files that run.json does not know, and where another process
        is making a stage here.
        """
        self._lock()
        records = self._read()
        later = [name for name in FOLLOWERS[stage] if name in self._stages]
        for name in later:
            self._check_unclaimed(name)
        if records:
            self._write({name: replace(records[name], state="removing") for name in later if name in records})
        for name in later:
            self._remove(name)
        if release:
            self._release()

    def _remove(self, stage: str) -> None:
        """Remove the files of a stage whose record says so, then the record; what others put beside them stays."""
        for path in self._found(stage):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for folder in (self.path / name for name in FILES[stage] if (self.path / name).is_dir()):
            if not any(folder.iterdir()):
                folder.rmdir()
        self._hashed.discard(stage)
        records = self._read()
        if records.pop(stage, None) is not None:
            self._write_all(records)

    def _release(self) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    def _read(self) -> dict[str, StageRecord]:
        if not self._file.exists():
            return {}
        remedy = (
            f"it was changed by hand or is of another version of draftsmith; restore it or choose another {self._key}"
        )
        try:
            return {name: _as_record(name, entry) for name, entry in read_object(self._file, remedy).items()}
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._file} is no record of a run ({error}): {remedy}.") from error

    def _write(self, records: dict[str, StageRecord]) -> None:
        self._write_all(self._read() | records)

    def _write_all(self, records: dict[str, StageRecord]) -> None:
        write_json(self._file, {name: vars(record) for name, record in records.items()})


def _as_record(name: str, entry: Any) -> StageRecord:
    """Return an entry of run.json. Raises TypeError or ValueError for what is none."""
    record = StageRecord(**entry)
    if (
        name not in STAGES
        or not isinstance(record.inputs, dict)
        or not isinstance(record.facts, dict)
        or not isinstance(record.recipe, dict)
    ):
        raise ValueError(f"{name!r} is no stage with inputs and facts")
    if record.state not in ("running", "done", "removing") or not isinstance(record.fingerprint, str):
        raise ValueError(f"the stage {name!r} has the state {record.state!r}")
    files = {path: (int(size), digest) for path, (size, digest) in record.files.items()}
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path in files):
        raise ValueError(f"the stage {name!r} names files outside the run")
    return replace(record, files=files)


def flat_inputs(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return inputs as run.json keeps them, so that they compare equal: flat, by the dotted keys of recipes and overrides."""
    flat: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, dict) and value:
            flat |= flat_inputs(value, f"{prefix}{key}.")
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
