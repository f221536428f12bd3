"""The exceptions for a user's mistake and for Ctrl-C, and what their sentences are made of."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake that the user can fix, said in one sentence: what, where, why, and how to fix it.

    The command line prints the sentence alone and exits with code 2; any other exception is a bug
    and keeps its traceback.
    """


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
    """Return the first line of an error's message without a final full stop, the name of its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__
