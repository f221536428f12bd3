"""A process that dies at its n-th operation on files, or after some time: SIGKILL, as a full memory or a lost node does it."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.train.process import end_with_parent

OPERATIONS = ("unlink", "rmdir", "rename", "replace", "mkdir", "fsync", "open")
"""What is counted: each may be the last thing that a process does."""


def in_a_child(work: Callable[[], int], log: Path) -> int:
    """Run `work` in a forked copy of this process; return its exit code, -9 where it was killed. Its output goes to `log`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            end_with_parent()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
            code = work()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException as error:  # noqa: BLE001 - a traceback is a finding, not an end of the bench
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at(number: int, inside: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that is killed just before its `number`-th operation in the folder `inside`."""

    def killed() -> int:
        _count(inside, lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == number else None)
        return work()

    return killed


def counted(inside: Path, into: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that writes the number of its operations in `inside` to the file `into`."""

    def counting() -> int:
        seen = [0]
        _count(inside, lambda count: seen.__setitem__(0, count))
        code = work()
        into.write_text(str(seen[0]))
        return code

    return counting


def kill_after(seconds: float, inside: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that is killed after some time, whatever it does in `inside`."""

    def killed() -> int:
        def strike() -> None:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
        return work()

    return killed


def _count(inside: Path, tell: Callable[[int], Any]) -> None:
    """Call `tell` with 1, 2, ... before every operation of this process on a path in the folder `inside`."""
    count = [0]
    folder = str(inside.absolute())

    def wrap(real: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and _within(folder, args[0], kwargs.get("dir_fd")) and writes(*args, **kwargs):
                count[0] += 1
                tell(count[0])
            return real(*args, **kwargs)

        return wrapped

    for name in OPERATIONS[:-1]:
        setattr(os, name, wrap(getattr(os, name), lambda *args, **kwargs: True))
    os.open = wrap(os.open, lambda path, flags, *rest, **kwargs: bool(flags & (os.O_WRONLY | os.O_RDWR)))
    opened = wrap(io.open, lambda path, mode="r", *rest, **kwargs: any(letter in mode for letter in "wax+"))
    io.open = opened


def _within(folder: str, path: Any, dir_fd: int | None) -> bool:
    """Return whether an operation's path, or its open file, lies in the folder."""
    if isinstance(path, int):
        path = f"/proc/self/fd/{path}"
        path = os.readlink(path) if os.path.islink(path) else ""
    elif dir_fd is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))
    return os.path.abspath(os.fsdecode(path)).startswith(folder)
