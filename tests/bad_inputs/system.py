"""What the system refuses while something is written: no place for the file, no permission, no room, a limit."""

import errno
import json
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from draftsmith.storage import atomic_directory, atomic_path, check_folder, claim, write_text
from tests.bad_inputs.cases import Case, Table

FILE = "case.json"
_GOOD = {"way": "text", "path": "new.json"}


def _atomic(write: Callable[[Path], object], make: Any = atomic_path) -> Callable[[Path], None]:
    def way(path: Path) -> None:
        with make(path) as temporary:
            write(temporary)

    return way


WAYS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: write_text(path, "x" * 100_000),
    "torch": _atomic(lambda path: torch.save(torch.zeros(100_000), path)),
    "tensors": _atomic(lambda path: save_file({"x": torch.zeros(100_000)}, path)),
    "folder": _atomic(lambda path: (path / "x").write_bytes(bytes(100_000)), atomic_directory),
    "lock": lambda path: claim(path).close(),
    "check": lambda path: check_folder("output_dir", path),
}


def make(folder: Path) -> None:
    """Write what is to be written, and what is in the way."""
    (folder / FILE).write_text(json.dumps(_GOOD), encoding="utf-8")
    (folder / "a-file").write_text("mine", encoding="utf-8")
    (folder / "a-folder").mkdir()
    (folder / "a-folder" / "inside").write_text("mine", encoding="utf-8")
    (folder / "a-loop").symlink_to("a-loop")
    (folder / "a-link").symlink_to("a-file")
    (folder / "a-dangling-link").symlink_to("nowhere/at/all")


def read(folder: Path) -> None:
    """Write it within the limits of the case."""
    case = json.loads((folder / FILE).read_text(encoding="utf-8"))
    with ExitStack() as stack:
        if number := case.get("refusal"):
            for name in ("draftsmith.storage.os.open", "pathlib.Path.mkdir"):
                stack.enter_context(patch(name, side_effect=OSError(number, os.strerror(number))))
        if limit := case.get("limit"):
            before = resource.getrlimit(limit[0])
            stack.callback(resource.setrlimit, limit[0], before)
            resource.setrlimit(limit[0], (limit[1], before[1]))
        WAYS[case["way"]](folder / case["path"])


def case(name: str, words: tuple[str, ...] = (), **changes: Any) -> Case:
    """Return the case of something else to be written."""
    return Case(name, lambda folder: (folder / FILE).write_text(json.dumps(_GOOD | changes)), words)


_NAMES = {
    "long": ("x" * 300, "too long"),
    "very-long": ("x/" * 3000, "too long"),
    "nul": ("a\0b", "NUL"),
    "under-a-file": ("a-file/new", "a-file"),
    "under-a-loop": ("a-loop/new", "a-loop"),
}
_REFUSALS = [
    "EACCES",
    "EPERM",
    "EROFS",
    "EMFILE",
    "ENFILE",
    "ENOSPC",
    "EDQUOT",
    "EIO",
    "EFBIG",
    "ENOMEM",
    "ESTALE",
    "EBUSY",
]
_WRITERS = ("text", "torch", "tensors", "folder", "lock")

TABLE = Table(
    "system",
    make,
    read,
    (
        *(case(f"{w}-{n}", (word,), way=w, path=path) for w in _WRITERS for n, (path, word) in _NAMES.items()),
        *(case(f"{w}-{n}", ("new.json",), way=w, refusal=getattr(errno, n)) for w in _WRITERS for n in _REFUSALS),
        *(
            case(f"{w}-over-a-folder", ("a-folder", "folder"), way=w, path="a-folder")
            for w in _WRITERS
            if w != "folder"
        ),
        *(case(f"{w}-too-large", ("ulimit -f",), way=w, limit=[resource.RLIMIT_FSIZE, 20_000]) for w in _WRITERS[:4]),
        *(
            case(f"{w}-too-many-open", ("ulimit -n",), way=w, limit=[resource.RLIMIT_NOFILE, 3])
            for w in ("text", "lock")
        ),
        case("lock-is-a-link", ("link to",), way="lock", path="a-link"),
        case("lock-is-a-dangling-link", ("link to",), way="lock", path="a-dangling-link"),
        case("folder-under-a-dangling-link", ("a-dangling-link",), way="folder", path="a-dangling-link/new"),
        case("check-a-file", ("output_dir", "a-file"), way="check", path="a-file"),
        case("check-under-a-file", ("output_dir", "a-file"), way="check", path="a-file/new"),
        case("check-a-loop", ("output_dir", "a-loop"), way="check", path="a-loop"),
        case("check-a-long-name", ("output_dir", "too long"), way="check", path="x" * 300),
        case("check-nul", ("output_dir", "NUL"), way="check", path="a\0b"),
    ),
)
