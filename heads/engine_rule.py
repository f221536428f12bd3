"""What is said of an engine about the files of a layout, as data; engines.py has all that is known."""

from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.heads.contracts import ModelFiles
from draftsmith.heads.target import Target


@dataclass(frozen=True)
class Rule:
    """A head that an engine does not compute as it was trained, in the files of `layouts`.

    what: the head, in a recipe's words. why follows the engine's name, instead says what to do. refused: the export of
    those layouts is refused; otherwise other engines serve it, and the README leaves this one out.
    """

    engine: str
    layouts: tuple[str, ...]
    what: str
    why: str
    instead: str
    found: Callable[[ModelFiles, Target], bool]
    refused: bool = True


@dataclass(frozen=True)
class Watch:
    """Something of an engine that no file can settle, for those who start it on one of `layouts`."""

    engine: str
    layouts: tuple[str, ...]
    text: str
