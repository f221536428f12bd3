"""Bad files of answers: lines that are no answers, ids that are none."""

import json
from pathlib import Path
from typing import Any

from draftsmith.data.answers.generate import read_answers
from tests.bad_inputs.cases import Case, Table, link, nested, pipe, remove, replace_by_folder, write

FILE = "answers.jsonl"
GOOD = {"id": "a", "slice": "chat", "prompt_ids": [5, 6, 7], "output_ids": [8, 9, 2], "finish_reason": "stop"}


def make(folder: Path) -> None:
    """Write two answers."""
    (folder / FILE).write_text("".join(json.dumps({**GOOD, "id": name}) + "\n" for name in "ab"), encoding="utf-8")


def line(name: str, value: Any) -> Case:
    """Return the case of a second line that holds `value`, a text as it stands; its sentence names file and line."""
    text = value if isinstance(value, str | bytes) else json.dumps(value)
    data = text if isinstance(text, bytes) else text.encode()
    return Case(f"line-{name}", write(FILE, json.dumps(GOOD).encode() + b"\n" + data + b"\n"), (FILE, "line 2"))


def changed(key: str, name: str, value: Any) -> Case:
    """Return the case of a second answer with another value; `...` removes it."""
    row = {**GOOD, "id": "b", key: value}
    return line(f"{key}-{name}", {k: v for k, v in row.items() if v is not ...})


_BAD_IDS: dict[str, Any] = {
    "text": "5 6",
    "texts": ["5"],
    "floats": [5.5],
    "negative": [-1],
    "huge": [2**40],
    "null": None,
    "nulls": [None],
    "object": {"a": 1},
    "number": 5,
    "nested": [[5]],
    "true": [True],
    "missing": ...,
}

TABLE = Table(
    "answers",
    make,
    lambda folder: read_answers(folder / FILE),
    (
        line("empty", ""),
        line("word", "hello"),
        line("list", [1]),
        line("null", "null"),
        line("cut", json.dumps(GOOD)[:40]),
        line("latin-1", '{"id": "é"}'.encode("latin-1")),
        line("deep", '{"id": ' + nested(100_000) + "}"),
        line("long-integer", '{"id": "b", "prompt_ids": [' + "9" * 5000 + "]}"),
        *(changed(key, name, value) for key in ("prompt_ids", "output_ids") for name, value in _BAD_IDS.items()),
        changed("id", "list", [1]),
        changed("id", "missing", ...),
        changed("slice", "object", {}),
        changed("slice", "missing", ...),
        Case("file-missing", remove(FILE), (FILE,)),
        Case("file-folder", replace_by_folder(FILE), (FILE,)),
        Case("file-dangling", link(FILE, "nowhere"), (FILE,)),
        Case("file-pipe", pipe(FILE), (FILE,)),
        Case("file-binary", write(FILE, b"\xff\x00\x80" * 50), (FILE,)),
    ),
)
