"""A run directory: run.json records what every stage was made from, so that finished stages are reused.

runs/<name>/run.json  answers.jsonl  features/  train/  evaluation/t0/ t1/  export/
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import UserError, one_line
from draftsmith.foreign.text import read_object
from draftsmith.heads.formats.recognise import earlier_digest
from draftsmith.recipe.record import (
    FILES,
    FOLLOWERS,
    GROWN,
    INSIDE,
    KNOWN,
    MEASURED,
    MORE,
    STAGES,
    WHOLE,
    StageRecord,
    as_record,
    aside,
    differing,
    flat_inputs,
    left_by,
    plain,
    run_dir_of,
    tell_changes,
)
from draftsmith.recipe.schema import Recipe
from draftsmith.storage import EARLIER, claim, earlier, fingerprint, join, move, remove, sha256_file, sweep, write_json
from draftsmith.train.process import world


def _same(known: StageRecord, flat: Mapping[str, Any]) -> bool:
    """Whether a stage was made from these inputs; an earlier version may have named the heads among them."""
    before = dict(flat)
    for key, value in flat.items():
        if known.inputs.get(key) == earlier_digest(str(value)):
            before[key] = known.inputs[key]
    return known.fingerprint in (fingerprint(flat), fingerprint(before))


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
        """Return what run.json holds of a stage; None where it holds nothing, or the stage is to be made again."""
        record = self._read().get(stage)
        return record if record is not None and record.there else None

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

    def begin(
        self, stage: str, inputs: dict[str, Any], *, redo: bool = False, needed: Sequence[Path] | None = ()
    ) -> bool:
        """Return True if the stage is already done with the same inputs, and all that is needed of it is there; else mark it
        as running. needed: None to make it again whatever is there.

        Raises UserError naming what changed if its files were made with other inputs (`redo` sets them aside) or are
        other ones now, for files that were not made here, and where another process is making a stage in this directory.
        """
        if redo:
            self.set_aside(stage)
        self.check_unchanged(stage, inputs)
        if needed is not None and self.holds(stage, inputs) and all(path.exists() for path in needed):
            with suppress(UserError), self.writing():  # others may be at work, or this process may only read
                pass
            return True
        self._lock()
        self._check_unclaimed(stage)
        known, flat = self.record(stage), flat_inputs(inputs)
        if stage in MEASURED and known is not None:
            for file, _ in self._spoilt(stage, known):
                if file.is_file():
                    file.unlink()  # ours by its record, and not what was measured any more
        self._write_running(stage, flat)
        return False

    def _write_running(self, stage: str, flat: dict[str, Any]) -> None:
        """Mark a stage as running with these inputs; its earlier version stays where it is."""
        before = self._read().get(stage)
        begun = StageRecord(flat, fingerprint(flat), "running", {}, recipe=self._recipe)
        self._write({stage: begun if before is None else replace(begun, earlier=before.earlier, redo=before.redo)})

    def _check_unclaimed(self, stage: str) -> None:
        """Raise UserError for files where a stage will write that run.json does not know."""
        if self.record(stage) is None and (unknown := self._files_of(stage)):
            raise UserError(
                f"{unknown[0]} is there, but {self._file} does not know who made it: move it away, or choose another {self._key}."
            )

    def check_unchanged(self, stage: str, inputs: dict[str, Any]) -> None:
        """Raise UserError, which names the settings that changed, where a stage's files were made from other inputs."""
        flat, known = flat_inputs(inputs), self.record(stage)
        if known is None or _same(known, flat) or not self.has_work(stage):
            return
        if other := self.maker(stage):
            raise UserError(
                f"The stage '{stage}' in {self.path} was made by the run in {one_line(other)}, with other settings "
                f"({self.describe_changes(stage, inputs)}): choose another --data_dir."
            )
        raise UserError(
            f"The stage '{stage}' in {self.path} was made with other settings ({self.describe_changes(stage, inputs)}): choose another "
            f"{self._key}, or add --redo {stage} to make it and what follows from it again."
        )

    def maker(self, stage: str) -> Path | None:
        """Return the directory of the run that made a stage, None where it is this one or not known."""
        known, own = self.record(stage), run_dir_of(self._recipe)
        made = None if known is None else run_dir_of(known.recipe)
        return made if made and own and made.resolve() != own.resolve() else None

    def describe_changes(self, stage: str, inputs: dict[str, Any]) -> str:
        """Return in words what changed since a stage was made."""
        known = self.record(stage)
        return "" if known is None else tell_changes(known.inputs, flat_inputs(inputs), known.recipe, self._recipe)

    def changed(self, stage: str, inputs: dict[str, Any]) -> list[str]:
        """Return the inputs that changed since a stage left work here; none where it left none."""
        flat, known = flat_inputs(inputs), self.record(stage)
        return differing(known.inputs, flat) if known is not None and self.has_work(stage) else []

    def grow(self, stage: str, inputs: dict[str, Any]) -> None:
        """Mark a stage as running with other data, and set aside what it made of earlier ones, for `kept`."""
        self._lock()
        before = self._read()[stage]
        again = before.earlier is not None and before.redo != GROWN  # by --redo
        if again and stage != "answers":
            self._write({stage: replace(before, state="removing")})
            self._remove(stage)
        else:
            if not again:
                self._write({stage: aside(before.earlier or plain(before), GROWN)})
            self._put_aside(stage, beside=before.earlier is not None)
        self._write_running(stage, flat_inputs(inputs))

    def kept(self, stage: str, keys: set[str]) -> list[Path]:
        """Return the files of earlier versions from which a stage takes what it can: of those that differ in these inputs alone."""
        record = self.record(stage)
        if record is None or record.earlier is None:
            return []
        again = record.redo != GROWN  # by --redo: of the version before it nothing is taken
        same = again or set(differing(record.earlier["inputs"], record.inputs)) <= keys
        return [earlier(at) for at in self._files_of(stage, kept=True) if same and (at.name == MORE or not again)]

    def _lock(self) -> None:
        """Lock the directory against other processes that make stages, until `finish` or the end of this process.

        Then what a killed process left half-written goes, and a removal that was cut short is done; what it only set aside is put
        back. Raises UserError for a folder that is no run.
        """
        if self._locked is None and world().main:
            self.check_ours()
            self._locked = claim(self.path / ".lock")
            sweep(self.path)
            for stage, record in self._read().items():
                if record.state == "removing":
                    self._remove(stage)
                elif record.state == "done" and record.earlier is not None:
                    self._forget(stage)
            self.put_back()

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
        if known is None or known.state != "done" or not _same(known, flat_inputs(inputs)):
            return False
        if not (self.path / FILES[stage][0]).exists():
            return False
        spoilt = next(self._spoilt(stage, known), None)
        if spoilt is None:
            self._hashed.add(stage)  # once in a process: what it does itself it knows
        elif stage not in MEASURED and (stage != "export" or spoilt[0].exists()):
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

    def _files_of(self, stage: str, kept: bool = False) -> list[Path]:
        """Return what lies where a stage leaves its files and folders; kept: the places of what lies in `.earlier` beside them."""
        known = re.compile(KNOWN[stage])
        there = [self.path, *(self.path / name for name in FILES[stage] if (self.path / name).is_dir())]
        looked = [(folder, folder / EARLIER if kept else folder) for folder in there]
        paths = sorted(at / path.name for at, folder in looked if folder.is_dir() for path in folder.iterdir())
        return [path for path in paths if known.fullmatch(path.relative_to(self.path).as_posix())]

    def has_work(self, stage: str) -> bool:
        """Return whether a stage left files that took work: a training that failed before its first checkpoint did not."""
        if stage == "train":
            return any(self.path.glob("train/best")) or any(self.path.glob("train/step_*"))
        record, more = self.record(stage), stage == "answers" and earlier(self.path / MORE).exists()
        return more or bool(self._files_of(stage)) or (record is not None and record.redo == GROWN)

    def finish(self, stage: str, facts: dict[str, Any]) -> None:
        """Mark a stage as done, with the figures it reports and the files it left; then its earlier version goes."""
        known = self.record(stage)
        assert known is not None
        self._hashed.discard(stage)
        self._write({stage: replace(known, state="done", facts=facts, files=left_by(self.path, self._files_of(stage)))})
        if known.earlier is not None:
            self._forget(stage)
        self._release()

    def redone(self, stage: str) -> bool:
        """Return whether --redo has set an earlier version of a stage aside, which stays until it is done."""
        record = self._read().get(stage)
        return record is not None and record.earlier is not None and record.redo != GROWN

    def check_aside(self, redo: str) -> None:
        """Raise UserError where `set_aside` would, for files of others and for want of room, before other stages are made."""
        self.check_ours()
        for name in (later := [name for name in FOLLOWERS[redo] if name in self._stages]):
            for entry in self._files_of(name):
                for path in sorted(entry.rglob("*")) if entry.is_dir() and not entry.is_symlink() else ():
                    if not path.is_dir() and not INSIDE.fullmatch(path.relative_to(self.path).as_posix()):
                        raise UserError(
                            f"{one_line(path)} was not made by draftsmith, but --redo would remove it with {entry.name}: move it away."
                        )
        folder = self.path / "features"
        if "features" in later and folder.is_dir():
            # Earlier hidden states stay until new ones are there, which must fit beside them.
            size, free = sum(path.stat().st_size for path in folder.glob("*")), shutil.disk_usage(self.path).free
            if size > free:
                raise UserError(
                    f"{folder} holds {size / 2**30:,.1f} GiB, which stay until they are made again, but only {free / 2**30:,.1f} GiB are "
                    f"free: free some space, choose another {self._key}, or remove {folder} yourself."
                )

    def set_aside(self, redo: str) -> None:
        """Move a stage and all that are made here and follow from it into `.earlier` folders, where each stays until it is done again.

        Until the stage `redo` has made something, the next process puts them back. Raises UserError, and has moved nothing, for files
        that were not made here, where another process is at work, and where the disk has no room for hidden states beside
        those that are there.
        """
        self._lock()
        later = [name for name in FOLLOWERS[redo] if name in self._stages]
        for name in later:
            self._check_unclaimed(name)
        self.check_aside(redo)
        if redo == "answers":
            remove(earlier(self.path / MORE))
        records = self._read()
        again = redo in records and records[redo].redo == redo  # whose first --redo has not come to its end
        for name in [redo] if again else [name for name in later if name in records]:
            if records[name].there and records[name].earlier is not None:  # that one is whole, this one is not
                self._write({name: replace(records[name], state="removing")})
                self._remove(name)
        if again:
            return
        records = self._read()
        moving = [name for name in later if name in records and records[name].there]
        root = {GROWN: redo}  # what was growing is put back as it was before
        known = {
            name: replace(records[name], redo=root.get(records[name].redo, "")) for name in later if name in records
        }
        self._write(known | {name: aside(plain(records[name]), redo) for name in moving})
        for name in moving:
            self._put_aside(name)

    def _put_aside(self, stage: str, *, beside: bool = False) -> None:
        """Move what a stage made into `.earlier`, an index last, unless a version is there (beside: whatever its files say); that one
        stays as it was, with the answers of others in a file beside it."""
        for path in sorted(self._files_of(stage), key=lambda path: path.name in WHOLE["features"]):
            marks = [earlier(path.with_name(name)) for name in WHOLE.get(stage, (path.name,))]
            if not beside and not any(mark.exists() for mark in marks):
                move(path, earlier(path))
                continue
            if stage == "answers":
                join(path, earlier(self.path / MORE))
            remove(path)
        self._tidy(stage)

    def put_back(self) -> None:
        """Undo `set_aside` where the stage of --redo has made nothing; for a process that holds the lock."""
        if self._locked is None:
            return
        records = self._read()
        for redo, root in records.items():
            if root.redo != redo or root.state == "done" or (root.state == "running" and self.has_work(redo)):
                continue
            if root.state == "running":
                for path in self._files_of(redo):  # logs, which are no work
                    remove(path)
                self._write({redo: aside(root.earlier, redo)})
            old = {name: record for name, record in self._read().items() if record.redo == redo and record.earlier}
            for name in old:
                for path in self._files_of(name, kept=True):
                    move(earlier(path), path)
                self._tidy(name)
            self._write({name: as_record(name, record.earlier) for name, record in old.items()})
        for name, record in self._read().items():  # those that follow from another directory's stage
            if record.state == "aside":
                self._put_aside(name)

    def _forget(self, stage: str) -> None:
        """Remove the earlier version of a stage that is done again."""
        for path in self._files_of(stage, kept=True):
            remove(earlier(path))
        self._tidy(stage)
        self._write({stage: replace(self._read()[stage], earlier=None, redo="")})

    def _remove(self, stage: str) -> None:
        """Remove the files of a stage whose record says so, then the record; what others put beside them stays."""
        for path in self._files_of(stage):
            remove(path)
        self._tidy(stage)
        records = self._read()
        record = records.pop(stage, None)
        if record is not None and record.earlier is not None:
            records[stage] = aside(record.earlier, record.redo)
        self._write_all(records)

    def _tidy(self, stage: str) -> None:
        """Remove the folders of a stage that are empty."""
        self._hashed.discard(stage)
        for folder in (self.path, *(self.path / name for name in FILES[stage])):
            for one in (folder / EARLIER, folder):
                if one != self.path and one.is_dir() and not any(one.iterdir()):
                    one.rmdir()

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
            return {name: as_record(name, entry) for name, entry in read_object(self._file, remedy).items()}
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._file} is no record of a run ({error}): {remedy}.") from error

    def _write(self, records: dict[str, StageRecord]) -> None:
        self._write_all(self._read() | records)

    def _write_all(self, records: dict[str, StageRecord]) -> None:
        write_json(self._file, {name: plain(record) for name, record in records.items()})
