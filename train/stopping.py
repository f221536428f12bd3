"""How work ends early: by Ctrl-C, by SIGTERM and SIGHUP, and with the launcher that started it."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from draftsmith.errors import StoppedError, UserError

LAUNCHED = "DRAFTSMITH_LAUNCHED"
"""Set for the processes that --launch starts, to how many there are; they inherit that Ctrl-C is ignored."""

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
