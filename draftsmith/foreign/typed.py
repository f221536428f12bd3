"""Reading JSON into frozen dataclasses: every key checked, every type checked, every mistake named.

The dataclasses' type hints are the schema. Understood: `bool`, `int`, `float` (an integer is a float
too), `str`, `Any`, `X | None`, `dict[str, X]`, `tuple[X, ...]`, `tuple[X, Y]` and nested dataclasses.
"""

import dataclasses
import json
import math
import types
import typing
from contextlib import suppress
from typing import Any, TypeVar

from draftsmith.errors import UserError

T = TypeVar("T")


def read_dataclass(kind: type[T], value: Any, source: str) -> T:
    """Build the dataclass `kind` from a JSON value; every field must be there and no other key may be.

    source: the file's name, for the message. Raises UserError naming the key and the file.
    """
    return typing.cast(T, _read(kind, value, "", source))


def _read(kind: Any, value: Any, key: str, source: str) -> Any:
    def expect(fits: bool, expected: str) -> None:
        if not fits:
            shown = json.dumps(value, ensure_ascii=False)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise UserError(f"{source}: '{key or 'the whole file'}' must be {expected}, not {shown}.")

    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        *others, last = (one for one in arguments if one is not type(None))
        for other in others:
            with suppress(UserError):
                return _read(other, value, key, source)
        return _read(last, value, key, source)
    if dataclasses.is_dataclass(kind) or origin is dict:
        expect(isinstance(value, dict), "an object")
        hints = dict.fromkeys(value, arguments[1]) if origin is dict else _hints(kind, value, key, source)
        read = {
            name: _read(hint, value[name], f"{key}.{name}" if key else name, source) for name, hint in hints.items()
        }
        return read if origin is dict else kind(**read)
    if origin is tuple:
        expect(isinstance(value, list), "a list")
        arguments = arguments[:1] * len(value) if arguments[1:] == (Ellipsis,) else arguments
        expect(len(value) == len(arguments), f"a list of {len(arguments)}")
        pairs = zip(arguments, value, strict=True)
        return tuple(_read(one, item, f"{key}[{i}]", source) for i, (one, item) in enumerate(pairs))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        expect(number and math.isfinite(value), "a number")
        return float(value)
    fits = isinstance(value, kind) and (kind is not int or (number and abs(value) < 2**63))
    expect(fits, {bool: "true or false", int: "an integer", str: "a text"}[kind])
    return value


def _hints(kind: Any, value: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    """Return the types of a dataclass's fields. Raises UserError for a key that is none of them, and where one is missing."""
    hints, where = typing.get_type_hints(kind), f"{key}." if key else ""
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in value if name not in names]:
        raise UserError(f"{source}: unknown key '{where}{unknown[0]}'; the known keys there are {', '.join(names)}.")
    if missing := [name for name in names if name not in value]:
        raise UserError(
            f"{source}: the key '{where}{missing[0]}' is missing; what was not measured is written as null, so write the file "
            "again with this version of draftsmith."
        )
    return {name: hints[name] for name in names}
