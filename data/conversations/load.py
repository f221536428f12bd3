"""Loading conversations from local files, folders, globs and the Hub, in any of the formats of shapes.py."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.shapes import drop_nulls, row_messages, row_tools
from draftsmith.errors import UserError, first_line

SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class Conversation:
    """One row of a data set. `messages` are OpenAI-style; `slice` is any word that groups rows in reports.

    A conversation that ends with a user or tool turn is a prompt: nothing in it answers that turn.
    """

    id: str
    slice: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None

    def prompt(self) -> tuple[dict[str, Any], ...]:
        """Return the messages without the assistant turns at the end. Raises UserError where nothing is left to answer."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        if not end:
            raise UserError(f"The conversation {self.id} has only assistant turns, so there is nothing to answer.")
        return self.messages[:end]


@dataclass(frozen=True)
class _Row:
    """A row as read. place: names it in errors. stem, number: the parts of an id made for it."""

    value: Any
    place: str
    stem: str
    number: int


def load_conversations(
    sources: Sequence[str], *, split: str = "train", slice: str | None = None, limit: int | None = None
) -> list[Conversation]:
    """Load every row of `sources` as a Conversation, in order.

    A source is a .jsonl, .json or .parquet file, a folder or glob of them, or a Hub data set `org/name` or
    `org/name:config` (of which `split` is read). A row's slice is its `slice` column, else `slice`, else the
    file's stem; its id is its `id` column, else `<stem>-<line>`. With `limit`, at most that many rows are
    read, one file after the other in turn, so that a small limit still sees every file.
    Raises UserError, naming file and line, for anything that cannot be read and for an id used twice.
    """
    if isinstance(sources, str):
        sources = [sources]
    files = [rows for source in sources for rows in _open_source(str(source), split, streaming=limit is not None)]
    if limit is None:
        rows: Iterator[_Row] = (row for file in files for row in file)
    else:
        in_turn = (row for turn in itertools.zip_longest(*files) for row in turn if row is not None)
        rows = itertools.islice(in_turn, limit)
    conversations = _unique(rows, slice)
    if not conversations:
        named = ", ".join(map(str, sources)) or "an empty list of sources"
        raise UserError(f"No conversation in {named}: nothing is in there; give a file with a conversation per line.")
    return conversations


def _unique(rows: Iterator[_Row], slice: str | None) -> list[Conversation]:
    """Convert rows; refuse an id used twice, and make unique ones for rows without an id."""
    places: dict[str, str] = {}
    conversations = []
    for row in rows:
        messages, tools = _read_row(row)
        given, own_slice = row.value.get("id"), row.value.get("slice")
        if given in (None, ""):
            made = f"{row.stem}-{row.number}"
            numbered = (f"{made}-{count}" for count in itertools.count(2))
            name = next(one for one in itertools.chain([made], numbered) if one not in places)
        else:
            name = str(given)
        if name in places:
            raise UserError(
                f"The id {name!r} is used twice, at {places[name]} and at {row.place}: "
                "ids must be unique; rename one, or leave the column out to have ids made."
            )
        places[name] = row.place
        slice_name = str(own_slice) if own_slice else slice or row.stem
        conversations.append(Conversation(name, slice_name, tuple(messages), tools))
    return conversations


def _read_row(row: _Row) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...] | None]:
    """Return the messages and tools of a row. Raises UserError that names its place."""
    if not isinstance(row.value, Mapping):
        raise UserError(f"{row.place}: expected a JSON object, found {type(row.value).__name__}.")
    try:
        return row_messages(row.value), row_tools(row.value)
    except ValueError as error:
        raise UserError(f"{row.place}: {error}.") from error


def _open_source(source: str, split: str, *, streaming: bool) -> list[Iterator[_Row]]:
    """Return an iterator of rows per file of a source."""
    path = Path(source).expanduser()
    if path.is_file():
        return [_open_file(path)]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and not f.name.startswith("."))
        if not files:
            raise UserError(
                f"The folder {source} holds no {', '.join(SUFFIXES)} file: put the data there as one of them."
            )
        return [_open_file(file) for file in files]
    if any(character in source for character in "*?["):
        matches = [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not matches:
            raise UserError(f"No file matches {source}: check the pattern, and the folder you start in ({Path.cwd()}).")
        return [_open_file(file) for file in matches]
    name = _HUB_NAME.fullmatch(source)
    if name is None or path.suffix in SUFFIXES:
        raise UserError(
            f"There is no file or folder {source}, and it is not the name of a Hub data set "
            f"(org/name or org/name:config) either: check the path, which is relative to {Path.cwd()}."
        )
    return [_hub_rows(name[1], name[2], split, streaming)]


def _open_file(path: Path) -> Iterator[_Row]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".json":
        return _json_rows(path)
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    raise UserError(
        f"{path} is of no known kind: convert it to {' or '.join(SUFFIXES)}; docs/bring-your-data.md has the shapes."
    )


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                raise UserError(f"{place}: the line is empty; remove it.")
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{place}: the line is not UTF-8 text ({error.reason} at byte {error.start})."
                ) from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{place}: the line is not JSON ({error.msg} at column {error.colno}): mend or remove it."
                ) from error
            yield _Row(value, place, path.stem, number)


def _json_rows(path: Path) -> Iterator[_Row]:
    """Yield the rows of a .json file, which holds one array of rows, or is JSON Lines under another name."""
    with path.open("rb") as file:
        if not file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _jsonl_rows(path)
            return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the file is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: the file is not JSON ({error.msg}).") from error
    for number, row in enumerate(rows, start=1):
        yield _Row(row, f"{path}, record {number}", path.stem, number)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import datasets  # here, as it is slow to import and most data is JSONL

    try:
        # Streaming reads the file itself; the other way copies it into the cache first.
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield _Row(drop_nulls(row), f"{path}, row {number}", path.stem, number)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}.") from error


def _hub_rows(name: str, config: str | None, split: str, streaming: bool) -> Iterator[_Row]:
    import datasets  # here, as it is slow to import and most data is JSONL

    label = f"{name}:{config}" if config else name
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
        for number, row in enumerate(rows, start=1):
            yield _Row(drop_nulls(row), f"{label}, split {split}, row {number}", name.split("/")[-1], number)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"There is no file or folder {label}, and the Hub data set of that name could not be read "
            f"(split {split!r}): {first_line(error)}."
        ) from error
