"""The options of a command that are no keys of its recipe: they are taken out of its words before the recipe is parsed.

LAUNCH = Option("--launch FILE", "What it is.")
chosen, words = take_options(words, [LAUNCH])      # chosen.launch, and what is left for parse_recipe
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftsmith.errors import UserError
from draftsmith.fields import shown
from draftsmith.foreign.text import is_text


@dataclass(frozen=True)
class Option:
    """usage: its name, the word that stands for its value in the help (a switch takes none), and "..." where it may be given several
    times. read: makes the value of its text, and says in a UserError that goes on from the option's name what is wrong with it."""

    usage: str
    help: str
    read: Callable[[str], Any] = str
    default: Any = None

    @property
    def name(self) -> str:
        """The name, with its dashes."""
        return self.usage.split()[0]

    def add_to(self, parser: Any, *, reads: bool = True) -> None:
        """Add it to a parser of argparse or jsonargparse. reads: with what reads it, whose name jsonargparse would show."""
        name, *value = self.usage.split()
        if not value:
            parser.add_argument(name, action="store_true", help=self.help)
            return
        kind: dict[str, Any] = {"type": self.read} if reads else {}
        kind |= {"action": "append", "default": []} if "..." in value else {"default": self.default}
        parser.add_argument(name, metavar=value[0], help=self.help, **kind)


def in_home(value: Any) -> Any:
    """Return a word or the values of a recipe with ~/ at the beginning of texts as the home folder: a shell knows it in some places alone."""
    if isinstance(value, dict):
        return {key: in_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [in_home(item) for item in value]
    if isinstance(value, str) and re.match(r"(--[\w.]+=)?\[", value):
        return re.sub(r"(?<=[\[,\s'\"])~/", os.path.expanduser("~/"), value)
    if isinstance(value, str) and (found := re.match(r"(--[\w.]+=)?(?=~/)", value)):
        return found[0] + os.path.expanduser(value[found.end() :])
    return value


def take_options(words: Sequence[str], options: Sequence[Option]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of `options`, and the words that are none of them. Raises UserError for a value that is missing, not
    wanted or refused by its type."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for one in options:
        one.add_to(parser)
    names, words = {one.name for one in options}, [in_home(word) for word in words]
    for word, after in pairwise((*words, "-")):
        name, equals, value = word.partition("=")
        if name in names and not (value if equals else after):
            raise UserError(f"{name} is empty: give it a value, or leave it out.")
    try:
        return parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        if isinstance(error.__context__, UserError):
            raise UserError(f"{error.argument_name} {error.__context__}") from None
        if "expected one argument" in error.message:
            raise UserError(f"{error.argument_name} needs a value.") from error
        raise UserError(f"{error.argument_name} is a switch: leave out the value behind it.") from error


def whole_number(what: str, most: int = 10**9) -> Callable[[str], int]:
    """Return what reads a whole number from 1 to `most`; `what` says so in a sentence."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not 1 <= int(text) <= most:
            least = f"{what}, and at most {most}" if text.isdecimal() and len(text) > 1 else what
            raise UserError(f"is {shown(text)}: give {least}.")
        return int(text)

    return read


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads a number which `fits`; `what` says in a sentence which ones do."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise UserError(f"is {text!r}: give {what}.")
        return value

    return read


def text(value: str) -> str:
    """Read a text; space around it counts for nothing."""
    if not value.strip() or not is_text(value):
        raise UserError(f"{'holds bytes that are no UTF-8' if value.strip() else 'is empty'}: write it in words.")
    return value.strip()


def require_recipe(words: Sequence[str], command: str, example: str = "eagle3/tiny") -> None:
    """Raise UserError where a command has neither a recipe nor a target, nor asks for help."""
    named = ("--recipe", "--target.path", "--help", "-h")
    if not any(word.split("=", 1)[0] in named for word in words):
        meant = next((word for word in words if word.endswith((".yaml", ".yml"))), None)
        wanted = meant or f"{example} or another that `draftsmith recipes` lists, or a file of your own"
        raise UserError(f"{command} needs a recipe: add --recipe {wanted}.")
