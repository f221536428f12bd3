"""Opening a foreign file: a plain file or one sentence, never a pipe that hangs and never a traceback."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from draftsmith.errors import UserError, one_line, why_not

MIB = 2**20
MOST_BYTES = 512 * MIB
"""The most bytes of a file that is read whole. A tokenizer.json has up to 40 MB, the index of a large feature store more."""
MOST_LINE_BYTES = 64 * MIB
"""The most bytes of a line of JSON Lines."""

_KINDS = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}


def open_file(path: Path | str, remedy: str) -> BinaryIO:
    """Return a plain file opened for reading bytes.

    Raises UserError, which ends in `remedy`, where the path is anything else (a folder, a pipe, a device, a dangling link)
    or cannot be opened. A pipe is noticed without waiting for its writer.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UserError(f"{one_line(path)} cannot be read ({why_not(error, path)}): {remedy}.") from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "a device")
    raise UserError(f"{one_line(path)} is {kind}, not a file: {remedy}.")


def read_bytes(path: Path | str, remedy: str, most: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file of at most `most` bytes. Raises UserError, which ends in `remedy`."""
    with open_file(path, remedy) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(
                f"{path} has {size} bytes, far more than such a file has (the limit is {most / MIB:.3g} MiB): {remedy}."
            )
        return _read(file, path, remedy, most)


def read_text(path: Path | str, remedy: str, most: int = MOST_BYTES) -> str:
    """Return the text of a plain UTF-8 file, a byte-order mark left out. Raises UserError, which ends in `remedy`."""
    return decode_text(read_bytes(path, remedy, most), str(path), remedy)


def decode_text(data: bytes, source: str, remedy: str) -> str:
    """Return UTF-8 bytes as text, a byte-order mark left out. source: names them in the sentence."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start}): {remedy}.") from error


def read_lines(path: Path | str, remedy: str, most: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a plain file with their ends; none is longer than `most` bytes, nor is a file read whole.

    Raises UserError, which names the line and ends in `remedy`.
    """
    with open_file(path, remedy) as file:
        number = 0
        while line := _read(file, path, remedy, most + 1, lines=True):
            number += 1
            if len(line) > most:
                raise UserError(f"{path}, line {number}: the line has more than {most / MIB:.3g} MiB: {remedy}.")
            yield line


def _read(file: BinaryIO, path: Path | str, remedy: str, most: int, lines: bool = False) -> bytes:
    try:
        return file.readline(most) if lines else file.read(most)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({why_not(error)}): {remedy}.") from error
