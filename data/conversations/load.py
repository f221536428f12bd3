"""Loading conversations from local files, folders, globs and the Hub, in any of the formats of shapes.py."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.shapes import drop_nulls, row_messages, row_tools
from draftsmith.errors import UserError, why_not
from draftsmith.foreign.code import foreign_code, why_offline
from draftsmith.foreign.text import kind_of, open_file, read_json, read_json_lines
from draftsmith.progress import say
from draftsmith.storage import fingerprint

SUFFIXES = (".jsonl", ".json", ".parquet")
_MEND = "mend or remove it"
_MOST_OPEN = 100
"""Files that are read in turns; of more the rows that may be of use are read one file after the other."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True)
class Conversation:
    """One row of a data set. `messages` are OpenAI-style; `slice` is any word that groups rows in reports.

    A conversation that ends with a user or tool turn is a prompt: nothing in it answers that turn. `reference` is the right
    answer, which an evaluation of lossy drafters compares with: text, a number, an object or a list.
    """

    id: str
    slice: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    reference: Any = None

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
    sources: Sequence[str],
    *,
    split: str = "train",
    slice: str | None = None,
    limit: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[Conversation]:
    """Load every row of `sources` as a Conversation, in order.

    A source is a .jsonl, .json or .parquet file, a folder or glob of them, or a Hub data set `org/name` or
    `org/name:config` (of which `split` is read). A row's slice is its `slice` column, else `slice`, else the
    file's stem; its id is its `id` column, else `<stem>-<line>`. With `limit`, at most that many rows are
    read, one file after the other in turn, so that a small limit still sees every file. template: what prompts are rendered with; a warning
    says where rows ask for something else.
    Raises UserError, naming file and line, for anything that cannot be read and for an id used twice.
    """
    if isinstance(sources, str):
        sources = [sources]
    files = [
        rows
        for source in sources
        for rows in _open_source(str(source), split, streaming=limit is not None and "[" not in split)
    ]
    if limit is None:
        rows: Iterator[_Row] = (row for file in files for row in file)
    else:
        if len(files) > _MOST_OPEN:
            files = [iter([*itertools.islice(file, limit)]) for file in files]
        in_turn = (row for turn in itertools.zip_longest(*files) for row in turn if row is not None)
        rows = itertools.islice(in_turn, limit)
    # An id used twice is refused, and rows without one get their own.
    places: dict[str, str] = {}
    conversations, differ = [], list[str]()
    for row in rows:
        if not isinstance(row.value, Mapping):
            raise UserError(f"{row.place}: a row is a JSON object, but this is {kind_of(row.value)}: {_MEND}.")
        try:
            messages, tools = row_messages(row.value), row_tools(row.value)
        except ValueError as error:
            raise UserError(f"{row.place}: {error}.") from error
        name, own_slice = _name(row, places), _word(row, "slice")
        places[name] = row.place
        own, asked = own_slice or slice or row.stem, row.value.get("chat_template_kwargs")
        if template is not None and isinstance(asked, Mapping) and {**template, **asked} != template:
            differ.append(row.place)
        conversations.append(Conversation(name, own, tuple(messages), tools, row.value.get("reference")))
    if differ:
        say(
            f"warning: {len(differ)} rows ({differ[0]} for one) have chat_template_kwargs that data.template lacks, and are rendered without them: give "
            "rows of one kind, and set data.template as they were served."
        )
    if not conversations:
        named = ", ".join(map(str, sources)) or "an empty list of sources"
        raise UserError(f"No conversation in {named}: nothing is in there; give a file with a conversation per line.")
    return conversations


def find_chats(conversations: Sequence[Conversation], *, answered: bool) -> dict[str, str]:
    """Return by the id of every row that of the row that begins its chat, whose requests each have the turns before them.

    answered: what is learned are the answers in the data, and rows with the same first answer to a user are of one chat; the first one
    begins it. Else the target gives its own to each row's prompt, and a row is of the chat of the shortest prompt that its own begins with:
    examples at the beginning of every prompt make no chat of them."""
    marks, firsts = (
        dict[str, list[str]](),
        dict[str, str](),
    )  # of what may begin the chat of a row, the shortest first; the row that is it
    for one in conversations:
        alone = all(message["role"] == "assistant" for message in one.messages)
        messages = one.messages if answered or alone else one.prompt()
        roles = [message["role"] for message in messages]
        asked = roles.index("user") if "user" in roles else 0
        answers = [place for place, role in enumerate(roles) if role == "assistant" and place >= asked]
        ends = [answers[0] + 1 if answers else len(messages)] if answered else [*answers, len(messages)]
        marks[one.id] = [fingerprint(messages[:end]) for end in ends]
        firsts.setdefault(marks[one.id][-1], one.id)
    return {name: next(firsts[mark] for mark in own if mark in firsts) for name, own in marks.items()}


def _name(row: _Row, places: Mapping[str, str]) -> str:
    """Return the id of a row, or one that is made for it. places: where ids were used. Raises UserError for one that is used twice."""
    if (given := _word(row, "id")) is None:
        made = f"{row.stem}-{row.number}"
        numbered = (f"{made}-{count}" for count in itertools.count(2))
        return next(one for one in itertools.chain([made], numbered) if one not in places)
    if given in places:
        raise UserError(
            f"The id {given!r} is used twice, at {places[given]} and at {row.place}: "
            "ids must be unique; rename one, or leave the column out to have ids made."
        )
    return given


def _word(row: _Row, key: str) -> str | None:
    """Return the id or slice of a row as text, None where it names none. Raises UserError for a list or an object."""
    value = row.value.get(key)
    if isinstance(value, list | dict):
        raise UserError(f"{row.place}: {key} is {kind_of(value)}: write a name or a number.")
    return None if value in (None, "") else str(value)


def local_files(source: str) -> list[Path] | None:
    """Return the files of a source, None where it is the name of a Hub data set. Raises UserError where it is neither."""
    try:
        path = Path(source).expanduser()
        is_folder, is_there = path.is_dir(), path.exists() or path.is_symlink()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{source} cannot be read ({why_not(error)}): check the path.") from error
    if is_there and not is_folder:
        return [path]
    if is_folder:
        # What an editor keeps in hidden folders are copies.
        shown = (f for f in path.rglob("*") if not any(part.startswith(".") for part in f.relative_to(path).parts))
        named = (f for f in shown if f.suffix in SUFFIXES)
        files = sorted(f for f in named if not f.is_dir())
        if not files:
            raise UserError(
                f"The folder {source} holds no {', '.join(SUFFIXES)} file: put the data there as one of them."
            )
        return files
    if any(character in source for character in "*?["):
        matches = [Path(name) for name in sorted(glob(str(path), recursive=True)) if not Path(name).is_dir()]
        if not matches:
            raise UserError(f"No file matches {source}: check the pattern, and the folder you start in ({Path.cwd()}).")
        return matches
    if source == "embedded":
        raise UserError(
            "embedded is the name of a target, whose conversations are taken where none are named: leave it out."
        )
    if not _HUB_NAME.fullmatch(source) or path.suffix in SUFFIXES:
        raise UserError(
            f"There is no file or folder {source}, and it is not the name of a Hub data set "
            f"(org/name or org/name:config) either: check the path, which is relative to {Path.cwd()}."
        )
    return None


def _open_source(source: str, split: str, *, streaming: bool) -> list[Iterator[_Row]]:
    """Return an iterator of rows per file of a source."""
    if (files := local_files(source)) is None:
        name, _, config = source.partition(":")
        return [_hub_rows(name, config or None, split, streaming)]
    readers = {".parquet": _parquet_rows, ".json": _json_rows, ".jsonl": _jsonl_rows}
    if odd := next((file for file in files if file.suffix not in readers), None):
        raise UserError(
            f"{odd} is of no known kind: convert it to {' or '.join(SUFFIXES)}, a conversation a row (`messages`: texts with roles)."
        )
    return [readers[file.suffix](file) for file in files]


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    for number, value in read_json_lines(path, _MEND):
        yield _Row(value, f"{path}, line {number}", path.stem, number)


def _json_rows(path: Path) -> Iterator[_Row]:
    """Yield the rows of a .json file, which holds one array of rows, or is JSON Lines under another name."""
    with open_file(path, _MEND) as file:
        if not file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _jsonl_rows(path)
            return
    remedy = "mend it, or write it as JSON Lines, a conversation a line, which may have any size"
    for number, row in enumerate(read_json(path, remedy), start=1):
        yield _Row(row, f"{path}, record {number}", path.stem, number)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import datasets  # here, as it is slow to import and most data is JSONL

    open_file(path, _MEND).close()
    with foreign_code(f"{path} cannot be read as Parquet", "write it again, or convert it to JSON Lines"):
        # Streaming reads the file itself; the other way copies it into the cache first.
        rows = iter(datasets.load_dataset("parquet", data_files=escape(str(path)), split="train", streaming=True))
    yield from _rows_of(rows, path, "row", path.stem, f"{path} cannot be read as Parquet")


def _hub_rows(name: str, config: str | None, split: str, streaming: bool) -> Iterator[_Row]:
    why_offline()
    import datasets  # here, as it is slow to import and most data is JSONL

    label = f"{name}:{config}" if config else name
    what = f"There is no file or folder {label}, and the Hub data set of that name could not be read"
    with foreign_code(what, f"check name, network and the split {split!r}"):
        rows = iter(datasets.load_dataset(name, config, split=split, streaming=streaming))
    yield from _rows_of(rows, label, f"split {split}, row", name.split("/")[-1], what)


def _rows_of(rows: Iterator[Any], label: Path | str, word: str, stem: str, what: str) -> Iterator[_Row]:
    """Yield what a data set of `datasets` holds; only its own part of the work is foreign."""
    for number in itertools.count(1):
        with foreign_code(what, "the rows before it are whole; fetch or write it again"):
            row = next(rows, None)
        if row is None:
            return
        yield _Row(drop_nulls(row), f"{label}, {word} {number}", stem, number)
