"""This process: its place among those of a training, as launchers tell it by environment variables, and how it ends early, by Ctrl-C, by
SIGTERM and SIGHUP, and with the launcher that started it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from draftsmith.errors import StoppedError, UserError

LAUNCHED = "DRAFTSMITH_LAUNCHED"
"""Set for the processes that --launch starts, to how many there are; they may inherit that Ctrl-C is ignored."""

INTERRUPTED = "interrupted; run the same command again to go on from here."

LOST = 75
"""The exit code of a process that lost the others, and leaves it to the launcher of --launch to say so."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What schedulers, `docker stop` and terminals that close send."""

_ONE_PRESS = 1.0
"""Seconds in which signals are one press of Ctrl-C: the terminal sends it to every process, and torchrun to its own."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_LAUNCHERS = (LAUNCHED, "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Variables that launchers set for the processes they start."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end work as Ctrl-C does. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    if isinstance(error, StoppedError):
        return error.code
    return 2 if isinstance(error, UserError) else 1


def leave_note(text: str) -> None:
    """Tell torchrun, which ends with a table of what failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        note = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time())), "py_callstack": ""}}}
        Path(path).write_text(json.dumps(note), encoding="utf-8")


@contextmanager
def on_signals(handler: Any, numbers: "tuple[signal.Signals, ...]") -> Iterator[None]:
    """Let `handler` take these signals as long as the context lasts; one that is ignored, as under nohup, stays so.

    Does nothing outside the main thread, the only one that may set handlers.
    """
    usual: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                usual[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in usual.items():
            signal.signal(number, before or signal.SIG_DFL)


def raise_terminated(number: int, _: FrameType | None) -> None:
    """The handler that ends a command where it is."""
    raise Terminated(number)


class Interrupt:
    """Turn signals into a flag that the loop reads between two steps, where every state is complete.

    asked: the number of the signal, 0 for none. A second Ctrl-C does not wait; SIGTERM may come as often as it likes.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._since = 0.0
        self._signals = on_signals(self._ask, (signal.SIGINT, *ENDING))

    def __enter__(self) -> "Interrupt":
        self._signals.__enter__()
        return self

    def _ask(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked and time.monotonic() - self._since > _ONE_PRESS:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._since = number, time.monotonic()

    def __exit__(self, *error: Any) -> None:
        self._signals.__exit__(*error)


def end_with_launcher() -> None:
    """Have Linux send SIGTERM when the launcher that started this process ends, however that happens.

    A process that nobody launched outlives its shell, as ever.
    """
    if any(name in os.environ for name in _LAUNCHERS):
        end_with_parent()


def end_with_parent() -> None:
    """Have Linux send SIGTERM when the process that started this one ends; at once where it just did."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class World:
    """The place of this process among those of a training: rank of size, local_rank on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def world() -> World:
    """Return what the launcher told this process. Raises UserError for variables that cannot be."""
    rank, size, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if size is None or size == 1:
        for name, value in (("RANK", rank), ("LOCAL_RANK", local)):
            if value:
                said = "is not set" if size is None else "is 1"
                raise UserError(
                    f"{name} is {value} in the environment, but WORLD_SIZE {said}: launchers set both; unset {name}."
                )
        return World()
    port = _number("MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT is {port} in the environment: a port is a number from 1 to 65535.")
    where = {"MASTER_ADDR": os.environ.get("MASTER_ADDR"), "MASTER_PORT": port}
    for name, said_of in ({"RANK": rank, "LOCAL_RANK": local} | where).items():
        if said_of in (None, ""):
            raise UserError(
                f"WORLD_SIZE is {size} in the environment, but {name} is not set: start with torchrun or `accelerate launch`, which "
                "set it, or unset WORLD_SIZE to work in one process."
            )
    assert rank is not None
    assert local is not None
    for name, value in (("RANK", rank), ("LOCAL_RANK", local)):
        if value >= size:
            raise UserError(
                f"{name} is {value} in the environment, but WORLD_SIZE is {size}: ranks go from 0 to WORLD_SIZE - 1."
            )
    return World(rank, size, local)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    least = 1 if name == "WORLD_SIZE" else 0
    if not (text.isascii() and text.isdecimal() and len(text) < 7) or int(text) < least:
        raise UserError(
            f"{name} is {text[:40]!r} in the environment, and not a whole number from {least}: unset it, or start with torchrun or "
            "`accelerate launch`, which set it."
        )
    return int(text)


def check_started() -> None:
    """Raise UserError where more processes were asked for than a training would have."""
    size, asked = world().size, os.environ.get(LAUNCHED, "")
    remedy = "accelerate/ddp-8gpu for GPUs and accelerate/ddp-2cpu for CPUs, which `draftsmith recipes` shows"
    if asked.isdecimal() and int(asked) != size:
        raise UserError(
            f"The launch file asks for {asked} processes, but {size} would train: take distributed_type MULTI_GPU, as in {remedy}."
        )
    if size > 1:
        return
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        # What accelerate sets for several processes that it leaves to MPI to start.
        raise UserError(
            "`accelerate launch` was asked for several processes but started one, as it does on CPUs (MULTI_CPU) and without "
            f"--multi_gpu: pass --config_file with one like {remedy}; for one process pass --num_processes 1 and unset MASTER_ADDR."
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if (os.environ.get(name, "").isdecimal()) and int(os.environ[name]) > 1 and "WORLD_SIZE" not in os.environ:
            raise UserError(
                f"{name} is {os.environ[name]}, but WORLD_SIZE is not set, so that each of these processes would train alone: start "
                f"one torchrun per machine, with train/head.py, or unset {name}."
            )
