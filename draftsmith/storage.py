"""Files of ours: written whole or not at all, locked while a process works on them, and named by hashes."""

import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import UserError, one_line, why_not

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries say that a file could not be written: safetensors with the system's number, torch without it.
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_UNNUMBERED = ("No space left on device", "Disk quota exceeded", "file write failed", "unexpected pos", "iostream")
ELSEWHERE = "--output_dir (report and search-tree: --output)"
"""What says where a command writes, where a sentence has to name it."""
EARLIER = ".earlier"
"""The folder in which `earlier` keeps things."""
_TEMPORARY = re.compile(r"\..+\.draftsmith-[0-9a-f]{12}\.(tmp|old)")
"""The names of what is being written or replaced; no other program's files have them."""


def default_cache() -> Path:
    """Return $DRAFTSMITH_CACHE, or ~/.cache/draftsmith: what is made once and can be made again."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def _safetensor_error() -> type[Exception]:
    """Return what the library raises, which is imported late: `draftsmith doctor` works without it."""
    from safetensors import SafetensorError

    return SafetensorError


@contextmanager
def explain_os_error(path: Path, elsewhere: str = ELSEWHERE) -> Iterator[None]:
    """Raise UserError, one sentence that names `path`, where the system does not let it be written.

    elsewhere: the setting that names another place.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, _safetensor_error()) as error:
        number = _number_of(error, path)
        if number in _NO_ROOM:
            full = f"{os.strerror(number)[:1].upper()}{os.strerror(number)[1:]}"
            remedy = "free some space" if number != errno.EFBIG else "raise the limit (`ulimit -f` says what it is)"
            raise UserError(
                f"{full} while writing {path}: nothing incomplete was kept; {remedy} or choose another place with {elsewhere}, then "
                "run the same command again to resume."
            ) from error
        if number is None and not (isinstance(error, ValueError) and "null" in str(error)):
            raise
        why = (
            f"there is a link to {os.readlink(path)}" if number == errno.ELOOP and path.is_symlink() else why_not(error)
        )
        raise UserError(
            f"{one_line(path)} cannot be written ({why}): choose a place that you may write to with {elsewhere}."
        ) from error


def _number_of(error: BaseException, path: Path) -> int | None:
    """Return the system's number of an error that came up while `path` was written, None where it is none of the system's."""
    if isinstance(error, OSError):
        return error.errno
    if match := _NUMBERED.search(str(error)):
        return int(match[1])
    if not any(words in str(error) for words in _UNNUMBERED):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    there = next(one for one in path.absolute().parents if one.exists())
    limited = limit != resource.RLIM_INFINITY and shutil.disk_usage(there).free > limit
    return errno.EFBIG if limited else errno.ENOSPC


def check_folder(key: str, path: Path) -> None:
    """Raise UserError where `path`, the value of the recipe's `key`, is no folder and cannot become one; creates nothing."""
    _look(key, path, "folder")
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"{key} is {one_line(path)}, but {there} is a file: name a folder.")
    _check_writable(key, path, there, "folder")


def check_file(option: str, path: Path, endings: Sequence[str], mark: str = r"\A\Z") -> None:
    """Raise UserError where `path`, the value of an option, is no place for a file with one of `endings`; creates nothing.

    mark: as of `check_ours`; only an empty file is replaced where it is left out.
    """
    there = _look(option, path, "file")
    odd = there is not None and not stat.S_ISREG(there.st_mode)
    if path.suffix not in endings or odd:
        what = "is a folder or no plain file" if odd else "has another ending"
        raise UserError(f"{option} is {one_line(path)}, which {what}: name a file that ends in {' or '.join(endings)}.")
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent} for {option} {path}: make it, or name another file.")
    _check_writable(option, path, path.parent, "file")
    check_ours(option, path, mark)


def _look(option: str, path: Path, kind: str) -> os.stat_result | None:
    """Return the state of a file or folder that an option names, None where nothing is there."""
    try:
        return path.stat()
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        if absent and (kind == "file" or not path.is_symlink()):  # a file takes the place of a link
            return None
        raise UserError(f"{option} is {one_line(path)} ({why_not(error, path)}): name another {kind}.") from error


def _check_writable(option: str, path: Path, folder: Path, kind: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} is {one_line(path)}, but you may not write to {folder}: name another {kind}.")


def check_ours(option: str, path: Path, mark: str) -> None:
    """Raise UserError where a file is there that is neither empty nor what `option` writes. mark: a pattern that the text of those has
    in its first MiB."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(2**20)
    if start and not re.search(mark.encode(), start, re.DOTALL):
        raise UserError(
            f"{option} would replace {one_line(path)}, which draftsmith did not write: move it away, or name another place."
        )


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield an empty file next to `path`; on success it is flushed to disk and renamed to `path`.

    On any exception the temporary file is removed and `path` is as it was. Its mode is what the umask leaves, also where a
    library writes its files for their owner alone. Raises UserError when the disk is full or the folder is not writable.
    """
    temporary = _temporary(path, "tmp")
    with explain_os_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name that nobody can guess, and never through a link that somebody has put there.
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
        try:
            mode = os.fstat(handle).st_mode & 0o777
            os.close(handle)
            yield temporary
            temporary.chmod(mode)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, elsewhere: str = ELSEWHERE) -> Iterator[Path]:
    """Yield an empty folder next to `path` that becomes `path` on success and is removed on any exception.

    What was at `path` goes when all of the new one is on disk: the caller has made sure that it may. Where `path` is a link,
    the folder that it points to is written. elsewhere: the setting that names another place.
    """
    with explain_os_error(path, elsewhere):
        path = path.resolve() if path.is_symlink() else path.absolute()
        temporary, retired = _temporary(path, "tmp"), _temporary(path, "old")
        temporary.mkdir(parents=True)
        try:
            mode = temporary.stat().st_mode & 0o666
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                if file.is_file() and file.stat().st_nlink == 1:  # one that is linked is somebody else's, too
                    file.chmod(mode)
                flush(file)
            if path.exists():
                path.rename(retired)
            temporary.rename(path)
            flush(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if retired.exists() and not path.exists():
                retired.rename(path)
            shutil.rmtree(retired, ignore_errors=True)


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.draftsmith-{secrets.token_hex(6)}.{kind}")


def sweep(folder: Path, levels: int = 2) -> None:
    """Remove what killed processes left half-written in a folder and `levels` of folders below it; put back what was about to
    be replaced. Only for a process that holds the folder's lock; a folder with a lock of its own is another one's."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            if levels and path.is_dir() and not path.is_symlink() and not (path / ".lock").exists():
                sweep(path, levels - 1)
            continue
        whole = path.with_name(path.name[1:].rsplit(".draftsmith-", 1)[0])
        if match[1] == "old" and not whole.exists():
            path.rename(whole)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def earlier(path: Path) -> Path:
    """Return where an earlier version of `path` is kept while it is made again: on the same disk, in a folder beside it."""
    return path.parent / EARLIER / path.name


def move(path: Path, to: Path) -> None:
    """Give a file or folder another name on the same disk, in place of what is there."""
    with explain_os_error(to):
        to.parent.mkdir(exist_ok=True)
        remove(to)
        path.rename(to)


def join(path: Path, to: Path) -> None:
    """Add the whole lines of a file to those of another, which is replaced at once; nothing where `path` is a link."""
    with atomic_path(to) as temporary, temporary.open("wb") as file:
        for source in (to, path):
            if source.is_file() and not source.is_symlink():
                with source.open("rb") as lines:
                    file.writelines(line for line in lines if line.endswith(b"\n"))


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def claim(path: Path, *, wait: bool = False, elsewhere: str = ELSEWHERE) -> TextIO:
    """Return an open file whose lock this process holds until it is closed.

    Raises UserError where another process holds it, or waits for that one to end. A file system without locks grants it to
    everybody. elsewhere: the setting that names another place.
    """
    with explain_os_error(path, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(handle, "a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise UserError(
                f"Another draftsmith is at work in {path.parent}: wait for it to end, or choose another {elsewhere.split()[0]}."
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
