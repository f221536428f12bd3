"""Resuming: checkpoints that are complete or absent, never half.

`Accelerator.save_state` writes in place, so a state is saved to `step_N.tmp`, flushed to disk, marked with a DONE file that
holds the size and digest of every other one, and renamed. The newest two are kept: a resume takes the newest that is whole.
"""

import hashlib
import json
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import parse_json, read_bytes, read_object
from draftsmith.heads.base import DraftHead
from draftsmith.progress import say
from draftsmith.recipe.schema import CHECKPOINTS
from draftsmith.storage import explain_os_error, flush, sha256_file
from draftsmith.train.parallel import checkpoint_layout

DONE = "DONE"
_NAME = re.compile(r"step_\d+")

_RENAMED = {"token_scale": "embedding_scale"}
"""What heads measured on their targets, by the names that checkpoints of earlier versions have for it."""


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    step: optimizer steps done. best_*: the best evaluation so far; its step is 0 while that is still the head that training started
    from. stale: evaluations since the best. window: micro-batches per step over all processes. train_seconds: of these steps, without
    evaluations and checkpoints; None if an earlier version took some, which did not count them. order: `Schedule.order`.
    """

    step: int = 0
    tokens: int = 0
    rows: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    stale: int = 0
    window: int = 0
    train_seconds: float | None = 0.0
    order: str = ""


def save_training_state(accelerator: Accelerator, folder: Path, progress: Progress, head: DraftHead) -> None:
    """Save model, optimizers, random states, what `head` measured and `progress`, in place of what is there of that step; then remove all
    older checkpoints but one."""
    final = folder / f"step_{progress.step}"
    temporary = folder / f"step_{progress.step}.tmp"
    with explain_os_error(final):
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(str(temporary))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            measured = {name: getattr(head, name) for name in head.trains.measured_on_target}
            record = asdict(progress) | {"layout": checkpoint_layout(accelerator), "measured": measured}
            (temporary / "progress.json").write_text(json.dumps(record), encoding="utf-8")
            files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
            manifest = {str(path.relative_to(temporary)): [path.stat().st_size, sha256_file(path)] for path in files}
            (temporary / DONE).write_text(json.dumps(manifest), encoding="utf-8")
            for path in (*files, temporary / DONE, temporary):
                flush(path)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one, which training went on from before it
            temporary.rename(final)
            flush(folder)
            for old in _checkpoints(folder)[:-CHECKPOINTS]:
                shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()


def _checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest last; nothing else that is called so."""
    done = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and (path / DONE).is_file()]
    return sorted(done, key=lambda path: int(path.name.removeprefix("step_")))


def latest_checkpoint(folder: Path, *, warn: bool = True) -> Path | None:
    """Return the newest checkpoint that is as it was saved, None where there is no checkpoint at all.

    warn: say which ones are damaged. Raises UserError where all are damaged.
    """
    damaged = []
    for path in reversed(_checkpoints(folder)):
        damage = _damage_of(path)
        if damage is None:
            return path
        damaged.append(f"{path.name}: {damage}")
        if warn:
            what = f"the checkpoint {path} is damaged ({damage}): training goes on from the one before it"
            say(f"warning: {what}.")
    if damaged:
        raise UserError(
            f"No checkpoint in {folder} is as it was saved ({damaged[0]}): restore one, or add "
            "--redo train to begin again."
        )
    return None


def _damage_of(path: Path) -> str | None:
    """Return in words which file of a checkpoint is not as it was saved. One of an earlier version has no digests."""
    try:
        text = read_bytes(path / DONE, "begin again")
        manifest = parse_json(text, DONE, "begin again") if text else {}
        for name, (size, digest) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is gone"
            if file.stat().st_size != size or sha256_file(file) != digest:
                return f"{name} was changed or cut short"
        read_object(path / "progress.json", "begin again")
    except (ValueError, TypeError, AttributeError):
        return "its list of files or its progress.json cannot be read"
    return None


def window_of(folder: Path) -> int:
    """Return the micro-batches per step of the training in a folder, over all its processes; 0 where none is there."""
    remedy, window = "add --redo train to begin again", None
    for path in reversed(_checkpoints(folder)):
        with suppress(UserError):  # of a damaged one: training goes on from the one before it
            window = read_object(path / "progress.json", remedy).get("window")
            break
    else:
        file = folder / "summary.json"
        window = read_object(file, remedy).get("window") if file.is_file() else None
    return window if type(window) is int else 0


def digest_of(folder: Path, progress: Progress, head: DraftHead) -> str:
    """Return what identifies the weights that training goes on from: those of the checkpoint, with optimizer and random states,
    or those of a new head."""
    done = folder / f"step_{progress.step}" / DONE
    if progress.step and done.is_file():
        return sha256_file(done)[:16]
    digest = hashlib.sha256()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_training_state(accelerator: Accelerator, folder: Path, head: DraftHead) -> Progress:
    """Restore the newest whole checkpoint and what `head` had measured; a fresh Progress where there is none.

    Raises UserError for a checkpoint of another way to spread the head over processes, and where all are damaged.
    """
    if accelerator.is_main_process:
        for half in folder.glob("step_*.tmp"):  # of a process that was killed while it saved
            if _NAME.fullmatch(half.stem):
                shutil.rmtree(half, ignore_errors=True)
    path = latest_checkpoint(folder, warn=accelerator.is_main_process)
    if path is None:
        return Progress()
    remedy = "add --redo train to begin again"
    record = read_object(path / "progress.json", remedy)
    made, now = record.pop("layout", "an older version"), checkpoint_layout(accelerator)
    if made != now:
        raise UserError(
            f"The checkpoint {path} was made under {made} and cannot be resumed under {now}: launch as before, or add "
            "--redo train."
        )
    with foreign_code(f"The checkpoint {path} cannot be loaded", remedy):
        accelerator.load_state(str(path))
        # Measured again, on another device say, it may round to another number than the weights were trained with.
        for name, value in record.pop("measured", {}).items():
            setattr(head, _RENAMED.get(name, name), value)
        progress = Progress(**{"train_seconds": None} | record)
    # Accelerate counts micro-batches to know when to synchronise; every saved state is at a window's end.
    accelerator.step = 0
    return progress
