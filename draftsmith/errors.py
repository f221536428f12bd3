"""The exceptions for a user's mistake and for Ctrl-C, and what their sentences are made of."""

import errno
import os
import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_JOINERS = re.compile(r"(?<=[^\x00-\u024f\u2000-\u206f\ufeff])[\u200c\u200d](?=[^\x00-\u024f\u2000-\u206f\ufeff])")
_MOST = 2000
"""The most characters of a sentence, far more than one needs that does not repeat what somebody else wrote."""

_WHY = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "permission denied",
    errno.EPERM: "it may not be changed",
    errno.EROFS: "the disk is read-only",
    errno.EISDIR: "it is a folder, not a file",
    errno.ELOOP: "its links go round",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.EMFILE: "too many files are open (`ulimit -n` says how many may be)",
    errno.ENFILE: "too many files are open on this machine",
    errno.ENXIO: "it is a socket, not a file",
    errno.EIO: "the disk cannot read it",
}


class UserError(ValueError):
    """A mistake that the user can fix, said in one sentence: what, where, why, and how to fix it.

    The command line prints the sentence alone and exits with code 2; any other exception is a bug
    and keeps its traceback. What a sentence repeats of foreign files and servers cannot command the terminal.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, _MOST))


class StoppedError(UserError):
    """Work that stopped because a signal asked for it, and that the same command goes on with.

    code: the exit code, 128 and the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, text: str, code: int = 130) -> None:
        super().__init__(text)
        self.code = code


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean X?)" for the word of `known` that is nearest to `word`, "" where none is that near."""
    near = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, `shown` without a final full stop, the name of its class where it has none."""
    lines = str(error).strip().splitlines()
    return one_line(lines[0].rstrip(".: "), 500) if lines else type(error).__name__


def last_line(text: str) -> str:
    """Return the last line of what a program printed, without a final full stop."""
    lines = text.strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else "it said nothing"


def why_not(error: BaseException, path: Path | str | None = None) -> str:
    """Return in words why the system refused to open `path`, without the path itself."""
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno == errno.ENOENT and path is not None and os.path.islink(path):
            return f"it is a link to {os.readlink(path)}, which does not exist"
        return _WHY.get(error.errno, f"the system says: {os.strerror(error.errno)}")
    if isinstance(error, ValueError) and "null" in str(error):
        return "its name holds a NUL character"
    return "its name is no name of a file"


def printable(text: str) -> str:
    """Return foreign text with what would command a terminal, or is not seen, written out, such as \\x1b: control characters, those
    that set the direction of writing or have no width, and halves of surrogate pairs. Tabs and line breaks stay, and so does what
    joins emoji, or letters of scripts that need it."""
    if text.isprintable():
        return text
    joiners = {match.start() for match in _JOINERS.finditer(text)}
    return "".join(one if position in joiners else _visible(one) for position, one in enumerate(text))


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t"
    return character.encode("unicode_escape").decode("ascii") if hidden else character


def one_line(text: Path | str, most: int = 200) -> str:
    """Return foreign text as a message shows it: printable, in one line, and of `most` characters or a few more."""
    line = printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= most else f"{line[: most * 2 // 3]}...{line[-(most // 3) :]}"
