"""JSON of ours, read back: frozen dataclasses with every key and type checked, and journals of long work."""

import dataclasses
import json
import math
import types
import typing
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.errors import UserError
from draftsmith.foreign.text import parse_json
from draftsmith.storage import explain_os_error

T = TypeVar("T")


def read_dataclass(kind: type[T], value: Any, source: str) -> T:
    """Build the dataclass `kind` from a JSON value; every field but those marked LATER must be there, and no other key may be.

    The type hints are the schema. Understood: `bool`, `int`, `float` (an integer is a float too), `str`, `Any`, `X | None`,
    `dict[str, X]`, `tuple[X, ...]`, `tuple[X, Y]` and nested dataclasses.

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
    later = {field.name for field in dataclasses.fields(kind) if field.metadata.get("later")}
    if missing := [name for name in names if name not in value and name not in later]:
        raise UserError(
            f"{source}: the key '{where}{missing[0]}' is missing; what was not measured is written as null, so write the file "
            "again with this version of draftsmith."
        )
    return {name: hints[name] for name in names if name in value}


def read_current(kind: type[T], value: Any, source: str, again: str) -> T:
    """Build the dataclass `kind` from a JSON value, of the `schema_version` that is the default of that field.

    again: how to get a file of this version. Raises UserError for another version, and for a wrong, unknown or missing key.
    """
    current: int = kind.schema_version  # type: ignore[attr-defined]
    if isinstance(value, dict) and (version := value.get("schema_version")) != current:
        raise UserError(
            f"{source}: 'schema_version' is {version!r} but this draftsmith reads {current} alone; {again}."
        )
    return read_dataclass(kind, value, source)


_KEY = "key"


class Journal:
    """The finished parts of some work, JSON values by name.

    path: a line for every part, its checksum in front; made with the first one. None keeps the parts in memory alone. key:
    identifies what the `values` depend on: the journal of another key begins anew. A line that was cut off, or is damaged, and what
    follows it count as not done. Parts are not flushed to the disk, which would disturb what is timed: a killed process loses none,
    a machine that fails the last ones.
    Raises UserError for a link, which none of ours is.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self.path, self._key = path, key
        self.values: dict[str, Any] = {}
        if path is None:
            return
        if path.is_symlink():
            raise UserError(f"{path} is a link, which this run did not make: remove it, or choose another folder.")
        if path.is_file():
            self._read(path)

    def get(self, name: str) -> Any:
        """Return the value of a finished part, None where it is not done."""
        return self.values.get(name)

    def add(self, name: str, value: Any) -> None:
        """Keep the value of a part."""
        self.values[name] = value
        if self.path is None:
            return
        with explain_os_error(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not self.path.exists()
            with self.path.open("ab") as file:
                if fresh:
                    file.write(_line(_KEY, self._key))
                file.write(_line(name, value))

    def _read(self, path: Path) -> None:
        """Read what is whole, and cut the rest off."""
        end = 0
        with path.open("rb+") as file:
            for line in file:
                text = line[9:-1]
                if line[-1:] != b"\n" or line[:9] != _checksum(text):
                    break
                name, value = parse_json(text, str(path), "remove it")
                if end == 0 and (name, value) != (_KEY, self._key):
                    break
                self.values[name] = value
                end += len(line)
            file.truncate(end)
        if end == 0:
            path.unlink()


def _line(name: str, value: Any) -> bytes:
    text = json.dumps([name, value]).encode()
    return _checksum(text) + text + b"\n"


def _checksum(text: bytes) -> bytes:
    return b"%08x " % zlib.crc32(text)
