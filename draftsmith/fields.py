"""What the sections of a recipe share: the ranges of their numbers, checks that name the key, and what of a section a run's
fingerprint holds."""

from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

LATER: MappingProxyType[str, Any] = MappingProxyType({"later": True})
"""`field(default=..., metadata=LATER)` marks a field that was added after runs had been made: at its default it is left out of
the fingerprint, so that those runs are not out of date."""


MOST_TEXT = 4096
"""The most characters of a text in a recipe: as many as a path may have."""
MOST_ITEMS = 1000
"""The most values of a list or mapping whose range says nothing else."""


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes: from `least` to `most`, without `least` if `above`, without `most` if `below`. why: what
    they stand for, for the sentence and `--help`. items: the most values of a list. ascending: a list has at least one value,
    each once and in ascending order."""

    least: float
    most: float
    above: bool
    below: bool
    why: str
    items: int
    ascending: bool

    def holds(self, value: float) -> bool:
        """Return whether a number is in the range; NaN is in none."""
        from_least = self.least < value if self.above else self.least <= value
        return from_least and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        least, most = _figure(self.least), _figure(self.most)
        ends = f"above {least}" if self.above else f"from {least}"
        last = ("and at most" if self.above else "to", "and below" if self.above else "to below")[self.below]
        return f"{ends} {last} {most}"


def within(
    least: float,
    most: float,
    why: str = "",
    *,
    above: bool = False,
    below: bool = False,
    items: int = MOST_ITEMS,
    ascending: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a field that takes numbers of this range, or lists and mappings of them; see `Range`.

    Every number of a recipe has a range, so that what no machine can hold is refused before any work.
    """
    return {"range": Range(least, most, above, below, why, items, ascending)}


SHARE = within(0, 1)
TOKENS = within(1, 2**24)
"""A number of tokens of one text, row or batch."""
BATCH = within(1, 2**16)
LAYERS = within(1, 1000)
LAYER_IDS = within(0, 1000, items=100, ascending=True)
WIDTH = within(1, 2**20)
"""A size of a layer."""
ATTENTION_HEADS = within(1, 4096)
VOCABULARY = within(1, 2**24)
TOKEN_ID = within(0, 2**24)
STEPS = within(1, 64)
"""Tokens that a head learns to draft, one after the other."""


def check_fields(section: Any, key: str) -> None:
    """Raise UserError, which names the key, where a value of a section (a dataclass) is out of its field's range.

    Texts have a limit of their own: not empty, no control characters, at most MOST_TEXT characters. key: the section's, with
    what stands before the names of its fields, such as "train.".
    """
    for one in fields(section):
        value = getattr(section, one.name)
        if value != _default(one):
            _check_value(value, key + one.name, one.metadata.get("range"), _default(one) is None)


def find_ranges(kind: type, key: str) -> Iterator[tuple[str, Range]]:
    """Yield the dotted keys of a section's fields that have a range, and the ranges; those of sections in it, too. key: as in
    `check_fields`."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            yield from find_ranges(hints[one.name], f"{key}{one.name}.")
        elif "range" in one.metadata:
            yield key + one.name, one.metadata["range"]


def _check_value(value: Any, key: str, allowed: Range | None, nullable: bool) -> None:
    if isinstance(value, str):
        fits = 0 < len(value) <= MOST_TEXT and not any(character < " " or character == "\x7f" for character in value)
        require(fits, key, value, f"a text has 1 to {MOST_TEXT} characters, none of them a control character")
    elif isinstance(value, list | tuple | dict):
        most = MOST_ITEMS if allowed is None else allowed.items
        require(len(value) <= most, key, value, f"it has {len(value)} values, and {most} are the most")
        if allowed is not None and allowed.ascending:
            ordered = bool(value) and all(one < other for one, other in pairwise(value))
            require(ordered, key, value, "name at least one, each once and in ascending order")
        inside = value.items() if isinstance(value, dict) else ((None, item) for item in value)
        for name, item in inside:
            require(name is None or isinstance(name, str), f"a key of {key}", name, "it is no text: put it in quotes")
            if name is not None:
                _check_value(name, f"a key of {key}", None, False)
            _check_value(item, key if name is None else f"{key}.{name}", allowed, False)
    elif allowed is not None and value is not None and not isinstance(value, bool):
        null = ", or null" if nullable else ""
        why = f" ({allowed.why})" if allowed.why else ""
        fits = isinstance(value, int | float) and allowed.holds(value)
        require(fits, key, value, f"it must be {allowed}{null}{why}")


def shown(value: object) -> str:
    """Return a value as a sentence shows it: on one line, and not longer than that."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value if not isinstance(value, str | list) or len(value) <= 200 else value[:200])
    return text if len(text) <= 80 else f"{text[:77]}..."


def _figure(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise UserError, which names the key, the value and the reason, unless `condition` holds."""
    if not condition:
        raise UserError(f"{key} is {shown(value)}: {why}.")


def fingerprint_fields(section: Any, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return what a run's fingerprint holds of a section (a dataclass), the dataclasses in it included: all fields but those
    of `leave_out` and those marked LATER that are at their defaults.

    A class whose runs have held inherited LATER fields from the first names them in `ALWAYS_IN_FINGERPRINT`.
    """
    always = getattr(section, "ALWAYS_IN_FINGERPRINT", ())
    return {
        one.name: _held(value)
        for one in fields(section)
        if one.name not in leave_out
        for value in [getattr(section, one.name)]
        if one.name in always or not one.metadata.get("later") or value != _default(one)
    }


def _held(value: Any) -> Any:
    if is_dataclass(value):
        return fingerprint_fields(value)
    return [_held(one) for one in value] if isinstance(value, list | tuple) else value


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
