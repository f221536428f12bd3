"""Files: written atomically, locked while a process works on them, and named by hashes."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from draftsmith.errors import UserError

_FULL = ("No space left on device", "os error 28", "Disk quota exceeded", "file write failed")


@contextmanager
def explain_os_error(path: Path) -> Iterator[None]:
    """Raise UserError, one sentence that names `path`, for a full disk or a folder that cannot be written."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # safetensors and torch report a full disk in words only.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(w in str(error) for w in _FULL):
            raise UserError(
                f"No space left on the disk while writing {path}: nothing incomplete was kept; "
                "free some space or choose another --output_dir, then run the same command again to resume."
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOTDIR):
            raise UserError(
                f"Cannot write {path}: {os.strerror(error.errno)}; choose a folder you may write to with --output_dir (report: --output)."
            ) from error
        raise


def check_folder(key: str, path: Path) -> None:
    """Raise UserError where `path`, the value of the recipe's `key`, is no folder and cannot become one; creates nothing."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"{key} is {str(path)!r}, but {there} is a file: name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key} is {str(path)!r}, but you may not write to {there}: name another folder.")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`; on success the file is flushed to disk and renamed to `path`.

    On any exception the temporary file is removed and `path` is as it was.
    Raises UserError when the disk is full or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_os_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def claim(path: Path) -> TextIO:
    """Return an open file whose lock this process holds until it is closed.

    Raises UserError where another process holds it. A file system without locks grants it to everybody.
    """
    with explain_os_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise UserError(
                f"Another draftsmith is at work in {path.parent}: wait for it to end, or choose another --output_dir."
            ) from error
    return file


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify a JSON-like value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
