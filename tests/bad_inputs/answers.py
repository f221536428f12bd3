"""Bad files of answers: lines that are no answers, ids that are none."""

import json
from pathlib import Path
from typing import Any

from draftsmith.data.answers.generate import read_answers
from tests.bad_inputs.cases import Case, Table, damaged, nested, write

FILE = "answers.jsonl"
GOOD = {"id": "a", "slice": "chat", "prompt_ids": [5, 6, 7], "output_ids": [8, 9, 2], "finish_reason": "stop"}


def make(folder: Path) -> None:
    """Write two answers."""
    (folder / FILE).write_text("".join(json.dumps({**GOOD, "id": name}) + "\n" for name in "ab"), encoding="utf-8")


def line(name: str, value: Any, *words: str) -> Case:
    """Return the case of a second line that holds `value`, a text as it stands; its sentence names file and line."""
    text = value if isinstance(value, str | bytes) else json.dumps(value)
    data = text if isinstance(text, bytes) else text.encode()
    return Case(f"line-{name}", write(FILE, json.dumps(GOOD).encode() + b"\n" + data + b"\n"), (FILE, "line 2", *words))


def changed(key: str, name: str, value: Any) -> Case:
    """Return the case of a second answer with another value; `...` removes it."""
    row = {**GOOD, "id": "b", key: value}
    return line(f"{key}-{name}", {k: v for k, v in row.items() if v is not ...})


_BAD_IDS: tuple[Any, ...] = ("5 6", ["5"], [5.5], [-1], [2**40], None, [None], {"a": 1}, 5, [[5]], [True], ...)

TABLE = Table(
    "answers",
    make,
    lambda folder: read_answers(folder / FILE),
    (
        *damaged(FILE, without="empty"),
        line("empty", ""),
        line("list", [1]),
        line("id-alone", {"id": "x"}, "is not an answer"),
        line("deep", '{"id": ' + nested(100_000) + "}"),
        *(changed(key, repr(value), value) for key in ("prompt_ids", "output_ids") for value in _BAD_IDS),
        changed("id", "list", [1]),
        changed("id", "missing", ...),
        changed("slice", "object", {}),
        changed("slice", "missing", ...),
    ),
)
