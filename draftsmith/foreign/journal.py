"""A journal of long work: every finished part is a line in a file, so that an interrupted command goes on where it was."""

import json
import zlib
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.foreign.json import parse_json
from draftsmith.storage import explain_os_error

_KEY = "key"


class Journal:
    """The finished parts of some work, JSON values by name.

    path: a line for every part, its checksum in front; made with the first one. None keeps the parts in memory alone. key:
    identifies what the values depend on: the journal of another key begins anew. A line that was cut off, or is damaged, and what
    follows it count as not done. Parts are not flushed to the disk, which would disturb what is timed: a killed process loses none,
    a machine that fails the last ones.
    Raises UserError for a link, which none of ours is.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self.path, self._key = path, key
        self._values: dict[str, Any] = {}
        if path is None:
            return
        if path.is_symlink():
            raise UserError(f"{path} is a link, which this run did not make: remove it, or choose another folder.")
        if path.is_file():
            self._read(path)

    def get(self, name: str) -> Any:
        """Return the value of a finished part, None where it is not done."""
        return self._values.get(name)

    def add(self, name: str, value: Any) -> None:
        """Keep the value of a part."""
        self._values[name] = value
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
                self._values[name] = value
                end += len(line)
            file.truncate(end)
        if end == 0:
            path.unlink()


def _line(name: str, value: Any) -> bytes:
    text = json.dumps([name, value]).encode()
    return _checksum(text) + text + b"\n"


def _checksum(text: bytes) -> bytes:
    return b"%08x " % zlib.crc32(text)
