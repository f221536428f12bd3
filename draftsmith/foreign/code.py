"""Other people's code at work on foreign files: transformers, tokenizers, torch, pyarrow, jinja2.

They raise whatever comes: a KeyError for a missing entry, an AttributeError for a list where they expect an object, a panic of
Rust for a vocabulary that is none. Our own readers check what they can before; the rest is made one sentence here, and
nowhere else.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from draftsmith.errors import UserError, first_line, why_not

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
