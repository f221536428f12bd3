"""Bad conversations: lines that are no rows, rows that are no conversations, files that are none."""

import json
import os
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


def turns(name: str, *messages: Any, words: tuple[str, ...] = ()) -> Case:
    """Return the case of a second row with these messages."""
    return row(name, {"id": "b", "messages": list(messages)}, *words)


def call(name: str, value: Any, *words: str) -> Case:
    """Return the case of an assistant turn with these tool_calls."""
    return turns(f"tool-calls-{name}", TURNS[0], {"role": "assistant", "content": "", "tool_calls": value}, words=words)


_ROWS = (
    row("empty", ""),
    row("list", [1, 2]),
    row("no-keys", {}),
    row("other-keys", {"question": "?", "answer": "!"}),
    row("messages-empty", {"messages": []}),
    row("messages-text", {"messages": "hello"}),
    row("messages-object", {"messages": {"role": "user"}}),
    row("messages-numbers", {"messages": [1, 2]}),
    row("messages-null-inside", {"messages": [None]}),
    row("conversations-text", {"conversations": "hello"}),
    row("instruction-list", {"instruction": [1]}),
    row("instruction-empty", {"instruction": ""}),
    row("instruction-output-number", {"instruction": "add", "output": 4}),
    row("history-text", {"instruction": "add", "history": "earlier"}, "history"),
    row("history-triples", {"instruction": "add", "history": [["a", "b", "c"]]}, "history"),
    row("history-numbers", {"instruction": "add", "history": [[1, 2]]}),
    row("prompt-empty", {"prompt": ""}, "prompt"),
    row("prompt-number", {"prompt": 3}, "prompt"),
    row("completion-number", {"prompt": "hi", "completion": 3}, "completion"),
    row("completion-object", {"prompt": "hi", "completion": {"role": "assistant"}}, "completion"),
    row("functions-number", {"id": "b", "messages": TURNS, "functions": 5}, "tools"),
    row("id-twice", {**GOOD}, "'a'"),
    row("id-half-surrogate", '{"id": "\\ud83d", "messages": [{"role": "user", "content": "hi"}]}', "surrogate"),
    row("id-list", {"id": [1], "messages": TURNS}, "id"),
    row("id-object", {"id": {"a": 1}, "messages": TURNS}, "id"),
    row("slice-list", {"id": "b", "slice": ["chat"], "messages": TURNS}, "slice"),
    row("slice-object", {"id": "b", "slice": {"name": "chat"}, "messages": TURNS}, "slice"),
    row("deep-150", '{"id": "b", "x": ' + nested(150) + ', "messages": [{"role": "user", "content": "hi"}]}', "nested"),
    row("tools-text", {"id": "b", "messages": TURNS, "tools": "not json"}, "tools"),
    row("tools-number", {"id": "b", "messages": TURNS, "tools": 5}, "tools"),
    row("tools-object", {"id": "b", "messages": TURNS, "tools": {"name": "f"}}, "tools"),
    row("tools-numbers", {"id": "b", "messages": TURNS, "tools": [1]}, "tools"),
    row("tools-text-deep", {"id": "b", "messages": TURNS, "tools": nested(100_000)}, "tools"),
)
_TURNS = (
    turns("no-role", {"content": "hi"}),
    turns("role-number", {"role": 3, "content": "hi"}),
    turns("role-list", {"role": ["user"], "content": "hi"}),
    turns("role-unknown", {"role": "wizard", "content": "hi"}, words=("wizard",)),
    turns("weight-text", TURNS[0], {**TURNS[1], "weight": "none"}, words=("weight",)),
    turns("weight-half", TURNS[0], {**TURNS[1], "weight": 0.5}, words=("weight",)),
    turns("thought-number", TURNS[0], {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}),
    turns(
        "thought-of-a-user", {"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}, words=("thought",)
    ),
    turns("assistant-null", TURNS[0], {"role": "assistant", "content": None}),
    turns("function-call-number", TURNS[0], {"role": "assistant", "function_call": 5}),
    turns("function-call-no-call", TURNS[0], {"from": "function_call", "value": '{"a": 1}'}, words=("no call",)),
    turns("no-content", {"role": "user"}),
    turns("content-number", {"role": "user", "content": 5}),
    turns("content-object", {"role": "user", "content": {"text": "hi"}}),
    turns("content-parts-numbers", {"role": "user", "content": [1, 2]}),
    turns("content-image", {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
    turns("content-half-surrogate", {"role": "user", "content": "\ud83d"}, words=("surrogate",)),
    turns("name-half-surrogate", {"role": "user", "name": "\udcff", "content": "hi"}, words=("surrogate",)),
    call("number", 5, "tool_calls"),
    call("text", "f()", "tool_calls"),
    call("object", {"name": "f"}, "tool_calls"),
    call("true", True, "tool_calls"),
    call("numbers", [1], "tool_calls"),
    call("no-name", [{"function": {}}], "name"),
    call("name-number", [{"function": {"name": 4}}], "name"),
    call("function-text", [{"function": "f"}]),
    call("function-list", [{"function": [1]}]),
    call("arguments-cut", [{"function": {"name": "f", "arguments": "{"}}], "arguments"),
    call("arguments-deep", [{"function": {"name": "f", "arguments": nested(100_000)}}], "arguments"),
    call("arguments-long-integer", [{"function": {"name": "f", "arguments": "9" * 5000}}], "arguments"),
    turns("function-call-deep", TURNS[0], {"from": "function_call", "value": nested(100_000)}),
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
