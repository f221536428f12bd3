"""What every table of bad inputs is made of: a good input, ways to spoil it, and the product's own reader."""

import functools
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Case:
    """One bad input. spoil: changes the good input in a folder. words: what the sentence must name, any case of letters."""

    name: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The bad inputs of one kind. make: writes a good input into an empty folder. read: the product's way to use it."""

    kind: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    cases: tuple[Case, ...]


def copied(build: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a `make` that copies what `build` has made once, in a folder of its own."""

    @functools.cache
    def built() -> Path:
        build(folder := Path(tempfile.mkdtemp()))
        return folder

    return lambda folder: shutil.copytree(built(), folder, dirs_exist_ok=True)


def edit_json(file: str, /, *way: str | int, **changes: Any) -> Callable[[Path], object]:
    """Return a way to spoil an input: set keys of an object in a JSON file; a value of `...` removes the key, a function makes
    the new value of the old one. way: to the object, the whole file if left out."""

    def spoil(folder: Path) -> None:
        whole = json.loads((folder / file).read_text(encoding="utf-8"))
        value = functools.reduce(lambda inner, key: inner[key], way, whole)
        for key, new in changes.items():
            if new is ...:
                value.pop(key, None)
            else:
                value[key] = new(value[key]) if callable(new) else new
        (folder / file).write_text(json.dumps(whole), encoding="utf-8")

    return spoil


def write(file: str, content: str | bytes) -> Callable[[Path], object]:
    """Return a way to spoil an input: replace the content of a file."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda folder: (folder / file).write_bytes(data)


def cut(file: str, keep: float) -> Callable[[Path], object]:
    """Return a way to spoil an input: keep the first share of a file's bytes."""

    def spoil(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * keep)])

    return spoil


def remove(*files: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: remove files."""
    return lambda folder: [(folder / file).unlink() for file in files]


def replace_by_folder(file: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: put a folder where the file was."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return spoil


def link(file: str, to: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: put a symbolic link where the file was."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(to)

    return spoil


def pipe(file: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: put a named pipe without a writer where the file was."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return spoil


def edit_header(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a way to spoil an input: change the header of a safetensors file, whose tensors' bytes stay."""

    def spoil(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header = changed if (changed := change(header)) is not None and not isinstance(changed, int) else header
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return spoil


def edit_tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a way to spoil an input: change the tensors of a safetensors file, which stays well-formed."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})

    return spoil


def nested(levels: int) -> str:
    """Return JSON of lists in lists."""
    return "[" * levels + "]" * levels


def damaged(file: str, *words: str, name: str = "file", without: str = "") -> tuple[Case, ...]:
    """Return the cases of a JSON file that is none, is nowhere, or is something else. words: the file's name if left out.
    without: names of cases that are good, or that the table has in its own words."""
    ways = {
        "missing": remove(file),
        "folder": replace_by_folder(file),
        "dangling": link(file, "nowhere"),
        "loop": link(file, file),
        "pipe": pipe(file),
        "device": link(file, "/dev/zero"),
        "empty": write(file, ""),
        "word": write(file, "hello"),
        "list": write(file, "[]"),
        "null": write(file, "null"),
        "cut": cut(file, 0.4),
        "binary": write(file, b"\xff\x80" * 50),
        "deep": write(file, '{"method": ' + nested(100_000) + "}"),
        "long-integer": write(file, '{"schema_version": ' + "9" * 5000 + "}"),
        "half-surrogate": write(file, '{"schema_version": "\\ud800"}'),
    }
    return tuple(
        Case(f"{name}-{way}", spoil, words or (file,)) for way, spoil in ways.items() if way not in without.split()
    )


def check_sentence(text: str) -> None:
    """Assert that a text is one sentence for a user: a line, not long, and no words of a traceback."""
    assert "\n" not in text, text
    assert text.endswith("."), text
    assert len(text) < 900, text
    assert not re.search(r"Traceback|object at 0x|<class |\bError\(|NoneType|_io\.|site-packages", text), text
