"""Reading JSON into frozen dataclasses: every key checked, every type checked, every mistake named.

The dataclasses' type hints are the schema. Understood: `bool`, `int`, `float` (an integer is a float
too), `str`, `Any`, `X | None`, `dict[str, X]`, `tuple[X, ...]`, `tuple[X, Y]` and nested dataclasses.
"""

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

from draftsmith.errors import UserError

T = TypeVar("T")


def read_dataclass(kind: type[T], value: Any, source: str) -> T:
    """Build the dataclass `kind` from a JSON value; every field must be there and no other key may be.

    source: the file's name, for the message. Raises UserError naming the key and the file.
    """
    return typing.cast(T, _read(kind, value, "", source))


def _read(kind: Any, value: Any, key: str, source: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, key, source)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(arguments, value, key, source)
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, key, source)
        return {name: _read(arguments[1], item, _join(key, name), source) for name, item in value.items()}
    if origin is tuple:
        return _read_tuple(arguments, value, key, source)
    return _read_scalar(kind, value, key, source)


def _read_fields(kind: Any, value: Any, key: str, source: str) -> Any:
    _expect(isinstance(value, dict), "an object", value, key, source)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in value:
        if name not in names:
            raise UserError(f"{source}: unknown key '{_join(key, name)}'; the known keys there are {', '.join(names)}.")
    for name in names:
        if name not in value:
            raise UserError(
                f"{source}: the key '{_join(key, name)}' is missing; what was not measured is written as null, "
                "so write the file again with this version of draftsmith."
            )
    return kind(**{name: _read(hints[name], value[name], _join(key, name), source) for name in names})


def _read_union(kinds: tuple[Any, ...], value: Any, key: str, source: str) -> Any:
    """`X | None` takes null; a union of plain types takes the first that fits."""
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return _read(kind, value, key, source)
        except UserError:
            continue
    return _read(rest[-1], value, key, source)


def _read_tuple(kinds: tuple[Any, ...], value: Any, key: str, source: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), "a list", value, key, source)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    _expect(len(value) == len(kinds), f"a list of {len(kinds)}", value, key, source)
    return tuple(
        _read(kind, item, f"{key}[{i}]", source) for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _read_scalar(kind: Any, value: Any, key: str, source: str) -> Any:
    expected = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[kind]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(number and math.isfinite(value), expected, value, key, source)
        return float(value)
    _expect(
        isinstance(value, kind) and (kind is not int or (number and abs(value) < 2**63)), expected, value, key, source
    )
    return value


def _expect(fits: bool, expected: str, value: Any, key: str, source: str) -> None:
    if not fits:
        shown = json.dumps(value, ensure_ascii=False)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise UserError(f"{source}: '{key or 'the whole file'}' must be {expected}, not {shown}.")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
