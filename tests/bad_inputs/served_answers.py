"""Bad answers of a server of the target: what `answers.servers` is told."""

import json
from pathlib import Path
from threading import Event
from typing import Any

from draftsmith.data.answers.served import AnswerServer
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from tests.bad_inputs.cases import Case, Table, nested, write
from tests.foreign.hostile import answering, page

FILE = "answer.json"
GOOD = {"token_ids": [5, 159, 0], "finish_reason": "stop", "text": "x"}
_PAGES = {"/v1/models": {"data": [{"id": "target"}]}, "/version": {"version": "1"}}


def _reply(choice: Any) -> str:
    return json.dumps({"choices": [choice]})


def make(folder: Path) -> None:
    """Write what vLLM answers."""
    (folder / FILE).write_text(_reply(GOOD), encoding="utf-8")


def ask(folder: Path) -> None:
    """Ask a server that answers with the file, for a target of 160 tokens."""

    def reply(path: str) -> list[bytes]:
        return page(json.dumps(_PAGES[path]).encode() if path in _PAGES else (folder / FILE).read_bytes())

    with answering(reply) as url:
        server = AnswerServer(url, ["target"])
        server.answer(Request("sample-7", "chat", (1, 2), 6, 0), Sampling(1.0), Event(), 160)


def ids(name: str, value: Any, *words: str) -> Case:
    """Return the case of other token ids; `...` leaves them out."""
    choice = {key: one for key, one in (GOOD | {"token_ids": value}).items() if one is not ...}
    return Case(f"ids-{name}", write(FILE, _reply(choice)), ("http://127.0.0.1", *words))


_STRANGE = ("sample-7", "160 tokens")

TABLE = Table(
    "served answers",
    make,
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
        Case("object", write(FILE, "{}"), ("returns no token ids (vLLM 1): answers need a newer one",)),
        Case("no-choices", write(FILE, '{"choices": []}'), ("no token ids",)),
        Case("choices-null", write(FILE, '{"choices": null}'), ("no token ids",)),
        Case("choices-object", write(FILE, '{"choices": {"a": 1}}'), ("no token ids",)),
        Case("no-reason", write(FILE, _reply({"token_ids": [5]})), ("no token ids",)),
        Case("empty", write(FILE, ""), ("not JSON",)),
        Case("list", write(FILE, "[]"), ("no JSON object",)),
        Case("nan", write(FILE, _reply(GOOD | {"logprobs": float("nan")})), ("nan",)),
        Case("deep", write(FILE, nested(99_999)), ("nested",)),
        Case("binary", write(FILE, b"\xff\x80" * 9), ("UTF-8",)),
        Case("large", write(FILE, b" " * (1 << 24) + b"{}"), ("16 MiB",)),
    ),
)
