"""Bad conversations: lines that are no rows, rows that are no conversations, files that are none."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.load import load_conversations
from tests.bad_inputs.cases import Case, Table, damaged, nested, write

FILE = "talk.jsonl"
TURNS = [{"role": "user", "content": "Where is the key?"}, {"role": "assistant", "content": "Under the mat."}]
GOOD = {"id": "a", "slice": "chat", "messages": TURNS}


def make(folder: Path) -> None:
    """Write two conversations."""
    rows = [GOOD, {**GOOD, "id": "b"}]
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row(name: str, value: Any, *words: str) -> Case:
    """Return the case of a file whose second line is `value`, a text as it stands; its sentence names file and line."""
    line = value if isinstance(value, str | bytes) else json.dumps(value)
    line = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
    return Case(f"row-{name}", write(FILE, json.dumps(GOOD).encode() + b"\n" + line + b"\n"), (FILE, "line 2", *words))


def rows(key: str, *values: Any, good: dict[str, Any] | None = None, words: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of a second row in which a key has these values."""
    for value in values:
        shown = repr(value)[:40]
        yield row(f"{key}-{shown}", {**(good or {}), key: value}, *words)


def turns(key: str, *values: Any, turn: dict[str, Any], words: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of a second row whose last turn has these values of a key; `...` leaves it out."""
    for value in values:
        last = {name: one for name, one in (turn | {key: value}).items() if one is not ...}
        before = [] if turn.get("role") == "user" else [TURNS[0]]
        shown = repr(value)[:40]
        yield row(f"turn-{turn.get('role')}-{key}-{shown}", {"id": "b", "messages": [*before, last]}, *words)


_OTHER = {"id": "b", "messages": TURNS}
_ROWS = (
    row("empty", "", "is empty"),
    row("list", [1, 2], "a row is a JSON object, but this is a list"),
    row("cut", '{"messages": [', "is not JSON"),
    row("no-keys", {}),
    row(
        "other-keys", {"question": "?", "answer": "!"}, "'question', 'answer', which is none of the shapes", "ShareGPT"
    ),
    row("id-twice", {**GOOD}, "'a'"),
    row("id-half-surrogate", '{"id": "\\ud83d", "messages": [{"role": "user", "content": "hi"}]}', "surrogate"),
    row("deep-150", '{"id": "b", "x": ' + nested(150) + ', "messages": [{"role": "user", "content": "hi"}]}', "nested"),
    *rows("messages", [], words=("'messages' is empty",)),
    *rows("messages", "hello", {"role": "user"}, words=("'messages' must be a list",)),
    *rows("messages", [1, 2], [None]),
    row(
        "turn-of-other-keys",
        {"messages": [{"speaker": "user", "content": "x"}]},
        "a turn has the keys 'speaker', 'content'",
    ),
    *rows("conversations", "hello"),
    *rows("instruction", [1]),
    *rows("instruction", "", words=("'instruction' is empty",)),
    *rows("output", 4, good={"instruction": "add"}),
    *rows("history", [[1, 2]], good={"instruction": "add"}),
    *rows(
        "history",
        "earlier",
        [["a", "b", "c"]],
        ["a", "b"],
        good={"instruction": "add"},
        words=("[question, answer] pairs",),
    ),
    *rows("prompt", "", words=("'prompt' is empty",)),
    *rows("prompt", 3, words=("'prompt' must be a list of objects",)),
    *rows("completion", 3, {"role": "assistant"}, good={"prompt": "hi"}, words=("completion",)),
    *rows("functions", 5, good=_OTHER, words=("tools",)),
    *rows("id", [1], {"a": 1}, good=_OTHER, words=("id",)),
    *rows("slice", ["chat"], {"name": "chat"}, good=_OTHER, words=("slice",)),
    *rows("tools", "not json", good=_OTHER, words=("the text of 'tools' is not JSON",)),
    *rows("tools", 5, good=_OTHER, words=("'tools' must be a list",)),
    *rows("tools", {"name": "f"}, [1], nested(100_000), good=_OTHER, words=("tools",)),
)
_ASSISTANT = {"role": "assistant", "content": ""}
_TURNS = (
    *turns("role", ..., 3, ["user"], turn=TURNS[0]),
    *turns("role", "wizard", turn=TURNS[0], words=("the role 'wizard' is unknown",)),
    *turns("weight", "none", turn=TURNS[1], words=("weight",)),
    *turns("weight", 0.5, turn=TURNS[1], words=("the weight of a turn is 0.5",)),
    *turns("content", ..., turn=TURNS[0], words=("neither 'content' nor 'tool_calls'",)),
    *turns("content", 5, turn=TURNS[0], words=("of type int; it must be text",)),
    *turns("content", {"text": "hi"}, [1, 2], turn=TURNS[0]),
    *turns(
        "content",
        [{"type": "image_url", "image_url": "x"}],
        [{"type": "image", "text": ""}],
        turn=TURNS[0],
        words=("not text",),
    ),
    *turns("content", "\ud83d", turn=TURNS[0], words=("half a surrogate pair",)),
    *turns("name", "\udcff", turn=TURNS[0], words=("surrogate",)),
    *turns("content", [{"type": "thinking", "thinking": "hm"}], turn=TURNS[0], words=("'user' holds a thought",)),
    *turns("content", [{"type": "thinking", "thinking": 5}], turn=TURNS[1]),
    *turns("content", None, turn=TURNS[1], words=("neither 'content' nor 'tool_calls'",)),
    *turns("function_call", 5, turn={"role": "assistant"}),
    *turns("value", nested(100_000), turn={"from": "function_call"}),
    *turns("value", '{"a": 1}', turn={"from": "Function_Call"}, words=("is JSON, but no call",)),
    *turns("tool_calls", 5, "f()", {"name": "f"}, True, turn=_ASSISTANT, words=("tool_calls",)),
    *turns("tool_calls", [1], ["f"], turn=_ASSISTANT, words=("'tool_calls' must be a list of objects",)),
    *turns("tool_calls", [{"function": {}}], [{"function": {"name": 4}}], turn=_ASSISTANT, words=("name",)),
    *turns("tool_calls", [{"function": "f"}], [{"function": [1]}], turn=_ASSISTANT),
    *(
        row(
            f"arguments-{text[:9]}",
            {"id": "b", "messages": [TURNS[0], _ASSISTANT | {"tool_calls": calls}]},
            "arguments of the tool call 'f'",
        )
        for text in ("{", nested(100_000), "9" * 5000)
        for calls in [[{"function": {"name": "f", "arguments": text}}]]
    ),
)


def _unreadable(folder: Path) -> None:
    (folder / FILE).chmod(0)


_FILES = (
    *damaged(FILE),
    Case("file-newlines", write(FILE, "\n\n\n"), (FILE, "line 1")),
    Case("file-utf-16", write(FILE, json.dumps(GOOD).encode("utf-16")), (FILE,)),
    Case("file-one-long-line", write(FILE, b"x" * (65 * 2**20)), (FILE, "line 1")),
    *((Case("file-unreadable", _unreadable, (FILE,)),) if os.geteuid() else ()),
)

TABLE = Table(
    "conversations", make, lambda folder: load_conversations([str(folder / FILE)]), (*_ROWS, *_TURNS, *_FILES)
)
