"""Where commands end early: a mistake of the user's, a signal, or a system that refuses (no file to open, no room, no memory,
nowhere to print). One sentence and an exit code."""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec

from draftsmith.errors import UserError, first_line, one_line, printable, why_not
from draftsmith.train.process import INTERRUPTED, code_of

P = ParamSpec("P")

CLOSED_PIPE = 141
"""The exit code where whoever read the output has left, as `head` does: 128 and SIGPIPE, as the shell has it."""
_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "HIP out of memory", "Unable to allocate")


def at_boundary(command: Callable[P, int]) -> Callable[P, int]:
    """Return `command`, which answers with an exit code, made to end in a sentence: with exit code 2 for a mistake and where the
    system refuses it, with 128 and the signal's number where one stops it."""

    @wraps(command)
    def within(*args: P.args, **kwargs: P.kwargs) -> int:
        for name in ("stdout", "stderr"):  # what a terminal cannot show becomes an escape; a closed stream goes nowhere
            stream = getattr(sys, name)
            if stream is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
            elif hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                os.getcwd()  # without which not even libraries load
            except OSError as error:
                raise UserError(
                    f"The folder that this was started in cannot be used ({why_not(error)}): change to one that can, with cd."
                ) from error
            try:
                code = command(*args, **kwargs)
            except SystemExit as stop:  # processes whose failure another one has said
                if isinstance(stop.__context__, BrokenPipeError):  # as rich ends
                    return CLOSED_PIPE
                code = int(stop.code or 0)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _drop_output()
            return CLOSED_PIPE
        except UserError as error:
            sentence, code = str(error), code_of(error)
        except KeyboardInterrupt as stop:
            sentence, code = INTERRUPTED, code_of(stop)
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            explained = explain(error)
            if explained is None:
                raise
            sentence, code = explained, 2
        _drop_output()
        tell(sentence)
        return code

    return within


def put(result: object) -> None:
    """Print a result of a command to standard output, whose paths and names cannot command the terminal."""
    print(printable(str(result)))


def tell(sentence: str) -> None:
    """Print a sentence to standard error, if that can be written."""
    with suppress(OSError):  # the exit code has to do
        print(f"draftsmith: {printable(sentence)}", file=sys.stderr, flush=True)


def explain(error: BaseException) -> str | None:
    """Return in a sentence what the system refused, None for a mistake of ours."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return (
            f"There is not enough memory ({first_line(error)[:200]}): lower train.rows, answers.batch, features.batch_tokens or "
            "evaluate.batch, whichever this is about, or take a machine with more; the same command goes on from here."
        )
    if isinstance(error, OSError):
        if error.filename is None:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
                return f"The output cannot be written ({os.strerror(error.errno)}): send it elsewhere, then run the same command again."
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return f"The system refuses this: {why_not(error)}; raise the limit, then run the same command again."
            return f"The system refuses this ({first_line(error)}): mend it, then run the same command again."
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
        return f"{one_line(name)} cannot be used ({why_not(error, name)}): mend that or name another, then run the same command again."
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "The name of a file holds a NUL character: give it another name."
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return "This account has no home folder: set HOME to a folder that it may write to."
    return None


def _drop_output() -> None:
    """Forget what could not be printed: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
