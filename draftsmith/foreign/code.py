"""Other people's code at work on foreign files: transformers, tokenizers, torch, pyarrow, jinja2, and the Hub's client.

They raise whatever comes: a KeyError for a missing entry, an AttributeError for a list where they expect an object, a panic of
Rust for a vocabulary that is none. Our own readers check what they can before; the rest is made one sentence here, and
nowhere else.
"""

import errno
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from draftsmith.errors import UserError, first_line, why_not
from draftsmith.foreign.text import MIB

_MOST = 300
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")


@contextmanager
def foreign_code(what: str, remedy: str, hints: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make one sentence of whatever is raised inside: "{what} ({reason}): {remedy}."

    what: says what could not be done with which file. hints: what is added to the remedy where the reason holds a word. UserError stays as it is, so do Ctrl-C and exits. Only calls of
    libraries on foreign data belong inside: a mistake of ours would be hidden as well.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        added = "".join(text for word, text in (hints or {}).items() if word in str(error))
        raise UserError(f"{what} ({reason_of(error)}): {remedy}{added}.") from error


def reason_of(error: BaseException) -> str:
    """Return in at most a line why a library failed."""
    if isinstance(error, RecursionError):
        return "it is nested too deep or refers to itself"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EINVAL:
        return why_not(error)
    if isinstance(error, KeyError | IndexError):
        return f"{first_line(error)} is missing"
    said, _, _ = str(error).partition("Exception raised from")  # behind which torch names its own source
    text = " ".join(said.split()).rstrip(".: ") or type(error).__name__
    line = _CLASS.sub(r"\1", text).replace("NoneType", "null")
    return line if len(line) <= _MOST else f"{line[:_MOST]}..."


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
        # The reason of a failure goes to the pipe.
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
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _REASONS.get(os.WTERMSIG(status), f"it ends with signal {os.WTERMSIG(status)}")
    return said or None


_SECONDS = 5


@cache
def why_offline() -> str | None:
    """Return why the Hub does not answer, None where it does. Once it does not, libraries take what is in the cache at once, as with
    HF_HUB_OFFLINE=1; left to themselves they would try for 20 seconds, for each file anew."""
    from huggingface_hub import constants  # here, as it is slow to import
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # noqa: BLE001 - whatever a network and its client do, there was no answer
        constants.HF_HUB_OFFLINE = True
        return first_line(error)
    return None
