"""Stopping and resuming: checkpoints that are complete or absent, never half, and Ctrl-C between two steps.

`Accelerator.save_state` writes in place, so a state is saved to `step_N.tmp`, marked with a DONE file and
renamed; a resume looks at complete directories only.
"""

import json
import shutil
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.errors import UserError
from draftsmith.files import explain_os_error
from draftsmith.heads.base import DraftHead
from draftsmith.train.parallel import checkpoint_layout

_ONE_PRESS = 1.0
"""Seconds in which signals are one press of Ctrl-C: the terminal sends it to every process, and torchrun to its own."""

_RENAMED = {"token_scale": "embedding_scale"}
"""What heads measured on their targets, by the names that checkpoints of earlier versions have for it."""


@dataclass(frozen=True)
class Progress:
    """The progress of a training. step: optimizer steps done. best_*: the best evaluation so far, its step 0 where that
    is still the head that training started from; stale: evaluations since then. window: micro-batches per step over all
    processes."""

    step: int = 0
    tokens: int = 0
    rows: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    stale: int = 0
    window: int = 0


def save_training_state(accelerator: Accelerator, folder: Path, progress: Progress, head: DraftHead) -> None:
    """Save model, optimizers, random states, what `head` measured and `progress`; then remove older checkpoints."""
    final = folder / f"step_{progress.step}"
    temporary = folder / f"step_{progress.step}.tmp"
    if final.exists():
        return
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
            (temporary / "DONE").touch()
            temporary.rename(final)
            for old in folder.glob("step_*"):
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    done = [path for path in folder.glob("step_*") if path.suffix != ".tmp" and (path / "DONE").exists()]
    return max(done, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def load_training_state(accelerator: Accelerator, folder: Path, head: DraftHead) -> Progress:
    """Restore the newest complete checkpoint and what `head` had measured; a fresh Progress where there is none.

    Raises UserError for a checkpoint of another way to spread the head over processes.
    """
    path = latest_checkpoint(folder)
    if path is None:
        return Progress()
    record = json.loads((path / "progress.json").read_text(encoding="utf-8"))
    made, now = record.pop("layout", "an older version"), checkpoint_layout(accelerator)
    if made != now:
        raise UserError(
            f"The checkpoint {path} was made under {made} and cannot be resumed under {now}: launch as before, or add "
            "--redo train."
        )
    accelerator.load_state(str(path))
    # Measured again, on another device say, it may round to another number than the weights were trained with.
    for name, value in record.pop("measured", {}).items():
        setattr(head, _RENAMED.get(name, name), value)
    # Accelerate counts micro-batches to know when to synchronise; every saved state is at a window's end.
    accelerator.step = 0
    return Progress(**record)


class Interrupt:
    """Turn Ctrl-C into a flag that the loop reads between two steps, where every state is complete."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers; elsewhere Ctrl-C keeps its usual meaning.
        self._usual: Any = None
        if threading.current_thread() is threading.main_thread():
            self._usual = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        if self.asked and time.monotonic() - self._since > _ONE_PRESS:
            # The second Ctrl-C does not wait.
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._since = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
