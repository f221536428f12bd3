"""Bad answers, in files and of a server of the target: lines that are no answers, ids that are none."""

import json
from pathlib import Path
from threading import Event
from typing import Any

from draftsmith.data.answers.generate import read_answers
from draftsmith.data.answers.served import AnswerServer
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from tests.bad_inputs.cases import Case, Table, damaged, nested, write
from tests.foreign.hostile import answering, page

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

REPLY = "answer.json"
SERVED = {"token_ids": [5, 159, 0], "finish_reason": "stop", "text": "x"}
_PAGES = {"/v1/models": {"data": [{"id": "target"}]}, "/version": {"version": "1"}}


def _reply(choice: Any) -> str:
    return json.dumps({"choices": [choice]})


def make_reply(folder: Path) -> None:
    """Write what vLLM answers."""
    (folder / REPLY).write_text(_reply(SERVED), encoding="utf-8")


def ask(folder: Path) -> None:
    """Ask a server that answers with the file, for a target of 160 tokens."""

    def reply(path: str) -> list[bytes]:
        return page(json.dumps(_PAGES[path]).encode() if path in _PAGES else (folder / REPLY).read_bytes())

    with answering(reply) as url:
        server = AnswerServer(url, ["target"])
        server.answer(Request("sample-7", "chat", (1, 2), 6, 0), Sampling(1.0), Event(), 160)


def ids(name: str, value: Any, *words: str) -> Case:
    """Return the case of other token ids; `...` leaves them out."""
    choice = {key: one for key, one in (SERVED | {"token_ids": value}).items() if one is not ...}
    return Case(f"ids-{name}", write(REPLY, _reply(choice)), ("http://127.0.0.1", *words))


_STRANGE = ("sample-7", "160 tokens")

SERVED_ANSWERS = Table(
    "served answers",
    make_reply,
    ask,
    (
        ids("first-outside", [5, 160], "token 160", *_STRANGE),
        ids("far-outside", [2**31], "2147483648", *_STRANGE),
        ids("huge", [10**39], *_STRANGE),
        ids("negative", [-1], "token -1", *_STRANGE),
        ids("behind-the-limit", [5] * 6 + [999], *_STRANGE),
        *(
            ids(repr(value), value, "no token ids")
            for value in ([True], [5.0], ["5"], [None], [[5]], [], "5 6", 5, {"0": 5}, None, ...)
        ),
        Case("object", write(REPLY, "{}"), ("returns no token ids (vLLM 1): answers need a newer one",)),
        Case("no-choices", write(REPLY, '{"choices": []}'), ("no token ids",)),
        Case("choices-null", write(REPLY, '{"choices": null}'), ("no token ids",)),
        Case("choices-object", write(REPLY, '{"choices": {"a": 1}}'), ("no token ids",)),
        Case("no-reason", write(REPLY, _reply({"token_ids": [5]})), ("no token ids",)),
        Case("empty", write(REPLY, ""), ("not JSON",)),
        Case("list", write(REPLY, "[]"), ("no JSON object",)),
        Case("nan", write(REPLY, _reply(SERVED | {"logprobs": float("nan")})), ("nan",)),
        Case("deep", write(REPLY, nested(99_999)), ("nested",)),
        Case("binary", write(REPLY, b"\xff\x80" * 9), ("UTF-8",)),
        Case("large", write(REPLY, b" " * (1 << 24) + b"{}"), ("16 MiB",)),
    ),
)
