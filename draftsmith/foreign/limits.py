"""Running what foreign data tells us to run, a chat template say, in a copy of this process with limits."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from draftsmith.foreign.reading import MIB

_REASONS: dict[int, str] = {signal.SIGXCPU: "it takes too long", signal.SIGKILL: "it takes too long or too much memory"}


def try_out(work: Callable[[], object], *, seconds: int = 3, memory: int = 512 * MIB) -> str | None:
    """Run `work` in a forked copy of this process, and return in words why it fails there, None where it does not.

    seconds: of CPU time that it may take. memory: bytes that it may take on top of what this process has. What `work`
    returns or changes is lost: this only tells whether it is safe to run it here. An exception's text is the reason.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work_within(work, seconds, memory, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _REASONS.get(os.WTERMSIG(status), f"it ends with signal {os.WTERMSIG(status)}")
    return said or None


def _work_within(work: Callable[[], object], seconds: int, memory: int, writing: int) -> None:
    """Work in the child: write the reason of a failure to the pipe, and never return."""
    try:
        # Not the parent's handlers, which would answer a signal in its name.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
    except (OSError, ValueError):
        pass  # a system without these limits tries it out all the same
    try:
        work()
    except MemoryError:
        os.write(writing, b"it takes too much memory")
    except RecursionError:
        os.write(writing, b"it calls itself without end")
    except BaseException as error:  # noqa: BLE001 - the child ends here whatever happens
        os.write(writing, f"{error or type(error).__name__}".encode("utf-8", "replace")[:4000])
    finally:
        os._exit(0)
