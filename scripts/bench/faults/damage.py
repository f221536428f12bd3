"""Spoiling a file of a run: cut short, emptied, a byte flipped, filled with zeros, removed, or a folder in its place."""

import os
from collections.abc import Callable
from pathlib import Path


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x41
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "a byte flipped": _flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": Path.unlink,
    "a folder": _folder,
}
"""Ways to spoil a file, by the name in the report."""
