"""Processes that are killed at operations on files and at times, for the bench of faults and for tests."""

import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from draftsmith.train.process import end_with_parent

_ENDING_SECONDS = 30.0
"""What launchers give ranks to end by themselves."""
OPERATIONS = ("unlink", "rmdir", "rename", "replace", "mkdir", "fsync", "open")
"""What is counted: each may be the last thing that a process does."""


def in_children(log: Path, *works: Callable[[], int]) -> int:
    """Run each of `works` in a forked copy of this process, several as the ranks of a launch; return the exit code of the first that
    failed, -9 where it was killed, after which the others are ended. Their output goes to `log`."""
    log.write_bytes(b"")
    left, failed, ended = set[int](), 0, 0.0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank, work in enumerate(works):
        child = os.fork()
        if child == 0:
            if len(works) > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(works))}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            code = 70
            try:
                end_with_parent()
                output = os.open(log, os.O_WRONLY | os.O_APPEND)
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
        left.add(child)
    while left:
        for child in [*left]:
            found, status = os.waitpid(child, os.WNOHANG)
            left.discard(found)
            if found and not failed and (failed := os.waitstatus_to_exitcode(status)):
                ended = time.monotonic()
                _send(signal.SIGTERM, left)
        if failed and time.monotonic() - ended > _ENDING_SECONDS:
            _send(signal.SIGKILL, left)
        time.sleep(0.01)
    return failed


def _send(number: signal.Signals, children: Iterable[int]) -> None:
    for child in children:  # none of which has been waited for
        os.kill(child, number)


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


def kill_after(seconds: float, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that is killed after some time."""

    def killed() -> int:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
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
