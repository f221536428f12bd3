"""What a pretended GPU counts: kernels, waits of the host, and copies, by phase and by the product's file and function."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OURS = ("data", "draftsmith", "eval", "heads", "recipes", "scripts", "tests", "train")


class Place(NamedTuple):
    """Where something happened: the innermost function of this repository, which may call deep into torch."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


def here() -> Place:
    """Return the place that runs now."""
    frame: Any = sys._getframe(1)
    while frame:
        if file := _file_of_ours(frame.f_code.co_filename):
            return Place(file, frame.f_code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Place("elsewhere", "", 0)


@cache
def _file_of_ours(name: str) -> str | None:
    """Return a file's path in this repository, links resolved; None for others' files and the pretended GPU's own."""
    path = Path(name).resolve()
    if not path.is_relative_to(ROOT):
        return None
    path = path.relative_to(ROOT)
    device = path.parts[:2] == ("tests", "pretended_gpu") and not path.name.startswith("test_")
    return path.as_posix() if path.parts[0] in OURS and not device else None


@dataclass(frozen=True)
class Wait:
    """The host waited for the device. what: the operation, such as "nonzero"."""

    phase: str
    what: str
    place: Place


@dataclass(frozen=True)
class Copy:
    """A copy. way: from where to where, and from which kind of the host's memory. size: bytes."""

    phase: str
    way: str
    size: int
    place: Place


class Counts:
    """What happened since the last `clear`."""

    def __init__(self) -> None:
        self._here = threading.local()
        self.clear()

    def clear(self) -> None:
        """Begin again at zero."""
        self.kernels: Counter[tuple[str, str, Place]] = Counter()
        self.waits: list[Wait] = []
        self.copies: list[Copy] = []

    def copy_of(self) -> "Counts":
        """Return what was counted so far, which counts no further."""
        kept = Counts()
        kept.kernels, kept.waits, kept.copies = self.kernels.copy(), list(self.waits), list(self.copies)
        return kept

    @property
    def phase(self) -> str:
        """The part of the work that this thread is at."""
        return getattr(self._here, "phase", "around")

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what this thread does within as of `phase`."""
        before = self.phase
        self._here.phase = phase
        try:
            yield
        finally:
            self._here.phase = before

    def kernel(self, name: str, place: Place) -> None:
        """Count a kernel."""
        self.kernels[self.phase, name, place] += 1

    def wait(self, what: str) -> None:
        """Count a wait of the host."""
        self.waits.append(Wait(self.phase, what, here()))

    def copy(self, way: str, size: int) -> None:
        """Count a copy."""
        self.copies.append(Copy(self.phase, way, size, here()))

    def table(self) -> dict[str, Any]:
        """Return what is compared with counts.json: no line numbers, which any edit moves."""
        kernels: Counter[str] = Counter()
        for (phase, _, _), count in self.kernels.items():
            kernels[phase] += count
        waits = Counter(f"{w.phase}: {w.place.file} {w.place.function}: {w.what}" for w in self.waits)
        sizes: dict[str, list[int]] = {}
        for copy in self.copies:
            sizes.setdefault(f"{copy.phase}: {copy.way}", []).append(copy.size)
        copies = {name: f"{len(found)} of {sum(found)} bytes" for name, found in sizes.items()}
        whole = {"kernels": kernels, "waits": waits, "copies": copies}
        return {name: dict(sorted(part.items())) for name, part in whole.items()}

    def lines(self, name: str) -> list[str]:
        """Return the places, with their lines, of a wait that `table` names."""
        return sorted(
            {str(w.place) for w in self.waits if name == f"{w.phase}: {w.place.file} {w.place.function}: {w.what}"}
        )
