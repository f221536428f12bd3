"""An HTTP server that serves a model: asked for JSON, and a sentence where it refuses, is silent, or serves another model.

Everything that asks a server asks through `ModelServer`, which bounds the bytes, the lines and the time of a reply, follows no redirect
and shows no more than a few words of what a server says.
"""

import json
import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from io import BufferedReader, RawIOBase
from pathlib import Path
from socket import socket
from typing import Any, NoReturn, cast
from urllib.request import HTTPErrorProcessor, HTTPHandler, HTTPSHandler, Request, build_opener

from draftsmith.errors import UserError, first_line, one_line
from draftsmith.foreign.text import parse_json

MOST_BYTES = 1 << 24
MOST_LINES = 100_000
"""The most bytes of a reply, and the most lines of one that is read line by line."""
SHORT, LONGEST, WHOLE = 30, 600, 3600
"""Seconds within which a server has said what it serves, and has answered; within which it goes on with an answer that it sends in
lines, and has sent all of it."""
VLLM, LLAMA_CPP, SGLANG, TENSORRT = "vLLM", "llama.cpp", "SGLang", "TensorRT-LLM"
_ABOUT = {
    VLLM: ("/version", "version"),
    LLAMA_CPP: ("/props", "build_info"),
    SGLANG: ("/get_server_info", "version"),
}
"""Where an engine tells its version, and under which key."""
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
"""A line of /metrics: name, labels, value."""
_REMEDY = "name the address of vLLM or of llama-server itself"


class ServerError(UserError):
    """A server that refuses or does not answer. again: whether it may, if it is asked once more."""

    def __init__(self, text: str, *, again: bool) -> None:
        super().__init__(text)
        self.again = again


class ModelServer:
    """The server at `url`. option: what names it in a sentence, such as "--server".

    Raises UserError for what is no address.
    """

    def __init__(self, url: str, option: str) -> None:
        self.url, self._option = url.rstrip("/").removesuffix("/v1"), option
        if not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", self.url):
            raise UserError(
                f"{option} is {one_line(url)}: give the address of a server, such as http://localhost:8000."
            )
        self._opener = build_opener(_Plain)

    def get(self, path: str, absent: Sequence[int] = ()) -> bytes:
        """Return what the server answers; nothing where its status is one of `absent`."""
        with self._reply(path, SHORT, absent=absent) as reply:
            return b"" if reply.status in absent else self._whole(reply, path)

    def ask(self, path: str) -> dict[str, Any]:
        """Return the object that the server answers."""
        return self.parse(self.get(path), path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the object that the server answers to `body`."""
        with self._reply(path, LONGEST, json.dumps(body).encode()) as reply:
            text = self._whole(reply, path)
        return self.parse(text, path)

    def stream(self, path: str, body: bytes, seconds: float | None = None) -> Iterator[bytes]:
        """Yield the lines that the server answers to `body`, which is JSON, as they come. seconds: within which it has sent all, WHOLE if left out."""
        room = MOST_BYTES
        with self._reply(path, seconds or WHOLE, body) as reply:
            for _ in range(MOST_LINES):
                if not (line := reply.readline(room + 1)):
                    _check_whole(reply)
                    return
                if (room := room - len(line)) < 0:
                    break
                yield line
            raise UserError(
                f"{self.url} goes on and on with an answer (the limits are {MOST_BYTES >> 20} MiB and {MOST_LINES} lines): {_REMEDY}."
            )

    def parse(self, text: bytes, what: str) -> dict[str, Any]:
        """Return the object in a JSON text of the server's. what: names the text in the sentence."""
        value = parse_json(text, f"{self.url}: {what}", _REMEDY)
        if not isinstance(value, dict):
            raise UserError(f"{self.url}: {what} is no JSON object: {_REMEDY}.")
        return value

    def counters(self, page: str, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what a page of /metrics says of `names`, by labels. Raises UserError for a value that is no number."""
        found: dict[str, dict[str, float]] = {name: {} for name in names}
        for name, labels, text in _SAMPLE.findall(page):
            if name in found:
                try:
                    number = float(text)
                except ValueError:
                    number = math.nan
                found[name][labels] = found[name].get(labels, 0.0) + number
                if not math.isfinite(found[name][labels]):
                    raise UserError(
                        f"{self.url} counts {one_line(text, 40)} at /metrics as {name}, which is no number: start it again."
                    )
        return found

    def metrics(self) -> str:
        """Return the page /metrics, empty where the server has none."""
        return self.get("/metrics", absent=(404, 501)).decode("utf-8", "replace")

    def sums(self, page: str, names: Collection[str]) -> list[float]:
        """Return what a page of /metrics says of each of `names`, over all labels."""
        return [sum(by_labels.values()) for by_labels in self.counters(page, names).values()]

    def find_engine(self) -> tuple[str, str]:
        """Return which engine the server says it is, and its version; empty strings for an unknown one."""
        for engine, (path, key) in _ABOUT.items():
            if text := self.get(path, absent=(404, 405, 501)):
                version = one_line(str(self.parse(text, path).get(key)), 40)
                if engine == VLLM and any(card.get("owned_by") == "tensorrt_llm" for card in self._cards()):
                    return TENSORRT, version  # which tells it where vLLM does
                return engine, version
        return "", ""

    def find_model(self, names: Sequence[str], remedy: str) -> str:
        """Return by which of its names the server is asked for the model called one of `names`, for its first where there are none.
        remedy: how the user names a model that is served under another one."""
        served: dict[str, str] = {}  # by the last part of a name, or of the path that the model was loaded from
        for card in self._cards():
            if isinstance(own := card.get("id"), str):
                served |= {_last(name): own for name in (card.get("root"), own) if isinstance(name, str)}
        known_as = next((served[_last(name)] for name in names or served if _last(name) in served), None)
        if known_as is None:
            serves = ", ".join(dict.fromkeys(one_line(name, 90) for name in list(served.values())[:5]))
            raise UserError(
                f"{self.url} serves {serves or 'no model'}{', ...' if len(served) > 5 else ''}, not {' or '.join(names) or 'one'}: start it with the recipe's target; where that is the "
                f"same model under another name, {remedy}."
            )
        return known_as

    def _cards(self) -> list[dict[str, Any]]:
        """Return what the server says of its models."""
        cards = self.ask("/v1/models").get("data")
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    @contextmanager
    def _reply(
        self, path: str, seconds: float, body: bytes | None = None, absent: Sequence[int] = ()
    ) -> Iterator[HTTPResponse]:
        """Give the reply to a request. Raises UserError where the server refuses, redirects, or has not sent all of it in time."""
        try:
            request = Request(self.url + path, body, {"Content-Type": "application/json"} if body else {})
            with self._opener.open(request, timeout=seconds) as reply:
                if reply.status not in (*range(200, 300), *absent):
                    self._explain_refusal(reply, path)
                yield reply
        except UserError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # the last for a host that is none
            reason = getattr(error, "reason", None)
            why = one_line(first_line(reason if isinstance(reason, Exception) else error))
            raise ServerError(
                f"{self.url}{path} does not answer ({why}): start the server, wait until it is ready, or correct {self._option}.",
                again=True,
            ) from error

    def _explain_refusal(self, reply: HTTPResponse, path: str) -> NoReturn:
        if reply.status in range(300, 400):
            elsewhere = one_line(reply.headers.get("Location", "nowhere"))
            raise ServerError(
                f"{self.url} redirects {path} to {elsewhere}, and redirects are not followed: give {self._option} the address of the "
                "server itself.",
                again=False,
            )
        said = " ".join(reply.read(10_000).decode("utf-8", "replace").split())
        key = "it asks for a key, so start it without one: " if reply.status in (401, 403) else ""
        raise ServerError(
            f"{self.url} refuses {path} (status {reply.status}): {key}it says {said[:300]!r}.",
            again=reply.status >= 500 or reply.status in (408, 429),  # too slow, or too much at once
        )

    def _whole(self, reply: HTTPResponse, path: str) -> bytes:
        """Return the whole of a reply. Raises UserError for one that is too large."""
        text = reply.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UserError(f"{self.url} answers {path} with more than {MOST_BYTES >> 20} MiB: {_REMEDY}.")
        _check_whole(reply)
        return text


def as_asked(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages as servers take them: arguments of calls as JSON texts, calls with ids, and no key of training's."""
    for place, message in enumerate(messages):
        kept = {key: value for key, value in message.items() if key != "weight"}
        for number, call in enumerate(calls := [{**call} for call in kept.get("tool_calls", ())]):
            call.setdefault("id", f"call-{place}-{number}")
            given = call["function"].get("arguments", {})
            call["function"] = call["function"] | {"arguments": given if isinstance(given, str) else json.dumps(given)}
        yield kept | ({"tool_calls": calls} if calls else {})


def _check_whole(reply: HTTPResponse) -> None:
    """Raise IncompleteRead where a reply that was read to its end is shorter than it said."""
    if reply.length:
        raise IncompleteRead(b"", reply.length)


class _InTime(RawIOBase):
    """What comes from a socket until `ends` on the clock; each part of it within LONGEST."""

    def __init__(self, connection: socket, ends: float) -> None:
        self._connection, self._ends = connection, ends
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(min(left, LONGEST))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Plain(HTTPHandler, HTTPSHandler, HTTPErrorProcessor):
    """Opens connections whose timeout holds from their start to the last byte of the reply, and takes every status as it is: errors
    are ours to explain, and a redirect is none of ours to follow."""

    def http_open(self, request: Request) -> Any:
        return self.do_open(partial(_connect, HTTPConnection), request)  # type: ignore[arg-type]

    def https_open(self, request: Request) -> Any:
        return self.do_open(partial(_connect, HTTPSConnection), request)  # type: ignore[arg-type]

    def http_response(self, request: Request, response: Any) -> Any:
        return response

    https_response = http_response


def _connect(kind: type[HTTPConnection], host: str, *, timeout: float, **options: Any) -> HTTPConnection:
    ends = time.monotonic() + timeout

    def reply_within(connection: socket, *args: Any, **more: Any) -> HTTPResponse:
        reply = HTTPResponse(connection, *args, **more)
        reply.fp.close()
        reply.fp = BufferedReader(_InTime(connection, ends))
        return reply

    opened = kind(host, timeout=min(timeout, LONGEST), **options)
    opened.response_class = cast(Any, reply_within)
    return opened


def _last(name: str) -> str:
    """Return what two names of the same model share: the last part, without its case and llama.cpp's ending."""
    return Path(name).name.lower().removesuffix(".gguf")
