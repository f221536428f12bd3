"""Whatever a server sends, and however slowly: one short sentence that names it, in time."""

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.engines.server import MeasuredServer
from draftsmith.foreign import server
from draftsmith.foreign.server import ModelServer, ServerError
from tests.bad_inputs.test_bad_inputs import check_sentence
from tests.eval.engines.fake_server import Engine, serving
from tests.foreign.hostile import again, answering, head, page, slowly

GOOD = b'{"version": "1"}'
ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e\u200b[red]"
_BIG = 1 << 20
_BOMB = gzip.compress(b" " * 32 * _BIG)

REPLIES: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "nothing": (list, "does not answer"),
    "status garbage": (lambda: [b"banana\r\n\r\n"], "banana"),
    "status of escapes": (lambda: [ESCAPES.encode() * 99 + b"\r\n\r\n"], "does not answer"),
    "status long": (lambda: [b"x" * 70_000], "does not answer"),
    "header long": (lambda: [head("X: " + "y" * 70_000)], "header line"),
    "headers many": (lambda: [head(*["X: y"] * 200)], "headers"),
    "headers endless": (lambda: itertools.chain([head()[:-2]], again(b"X: y\r\n")), "headers"),
    "headers slow": (lambda: slowly(head(*["X: y"] * 90)), "timed out"),
    "first byte never": (lambda: slowly(b" ", 2), "timed out"),
    "continue endless": (lambda: again(head(status="100 Continue")), "timed out"),
    "body slow": (lambda: [head(), *slowly(b" " * 30), GOOD], "timed out"),
    "body drips": (lambda: itertools.chain([head()], slowly(b" " * 999)), "timed out"),
    "body endless": (lambda: itertools.chain([head()], again(b" " * _BIG)), "more than 16 MiB"),
    "body of 5 GB": (lambda: [head("Content-Length: 5000000000"), *[b" " * _BIG] * 20], "more than 16 MiB"),
    "body cut": (lambda: [head("Content-Length: 99"), GOOD], "does not answer"),
    "body empty": (lambda: page(b""), "not JSON"),
    "body html": (lambda: [head("Content-Type: text/html"), b"<html>hello</html>"], "not JSON"),
    "body latin": (lambda: page(b'{"version": "\xe9"}'), "not UTF-8"),
    "body list": (lambda: page(b"[1]"), "no JSON object"),
    "body nan": (lambda: page(b'{"logprobs": NaN}'), "nan"),
    "body infinite": (lambda: page(b'{"logprobs": -Infinity}'), "inf"),
    "body deep": (lambda: page(b"[" * 99_999), "nested"),
    "body digits": (lambda: page(b'{"version": ' + b"9" * 5000 + b"}"), "integer"),
    "body surrogate": (lambda: page(rb'{"version": "\ud800"}'), "surrogate"),
    "gzip": (lambda: [head("Content-Encoding: gzip"), _BOMB], "not UTF-8"),
    "chunks garbage": (lambda: [head("Transfer-Encoding: chunked"), b"zz\r\nhello\r\n"], "does not answer"),
    "chunks cut": (lambda: [head("Transfer-Encoding: chunked"), b"99\r\n" + GOOD], "does not answer"),
    "chunks negative": (lambda: [head("Transfer-Encoding: chunked"), b"-5\r\n" + GOOD], ""),
    "refusal long": (lambda: [head(status="400 Bad"), b"no \x1b[31m" * _BIG], "status 400"),
    "refusal slow": (lambda: [head(status="500 Oh"), *slowly(b"no " * 99)], "timed out"),
    "refusal of escapes": (lambda: [head(status="503 " + ESCAPES), ESCAPES.encode()], r"\u202e"),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SHORT", 0.5)
    monkeypatch.setattr(server, "WHOLE", 0.5)
    monkeypatch.setattr(server, "MOST_LINES", 2000)


def sentence(error: pytest.ExceptionInfo[UserError], url: str) -> str:
    """Check that what was raised is a sentence that names the server, and return it."""
    text = str(error.value)
    check_sentence(text)
    assert text.startswith(url)
    assert text.isprintable()
    return text


@pytest.mark.parametrize("name", REPLIES)
def test_a_bad_reply_is_one_sentence_in_time(name: str) -> None:
    make, words = REPLIES[name]
    with answering(lambda path: make()) as url:
        started = time.monotonic()
        with pytest.raises(UserError) as caught:
            print(ModelServer(url, "--server").ask("/version"))
        assert time.monotonic() - started < 1.5
        assert words in sentence(caught, url)


def test_a_good_reply_is_taken_however_it_is_sent() -> None:
    chunked = b"8\r\n" + GOOD[:8] + b"\r\n8\r\n" + GOOD[8:] + b"\r\n0\r\n\r\n"
    for reply in (page(GOOD), [head(), GOOD], [head("Transfer-Encoding: chunked"), chunked], slowly(head() + GOOD, 0)):
        with answering(lambda path, reply=reply: reply) as url:
            assert ModelServer(url + "/v1", "--server").ask("/version") == {"version": "1"}


WAYS: dict[str, Callable[[ModelServer], object]] = {
    "ask": lambda one: one.ask("/x"),
    "post": lambda one: one.post("/x", {}),
    "stream": lambda one: list(one.stream("/x", b"{}")),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("way", WAYS)
def test_a_redirect_is_named_and_not_followed(status: int, way: str) -> None:
    asked: list[str] = []

    def other(path: str) -> list[bytes]:
        asked.append(path)
        return page(GOOD)

    with answering(other) as elsewhere:
        for place in (f"{elsewhere}/x", "file:///etc/passwd", "ftp://h/x", "//h/x", f"http://h/{ESCAPES}"):
            reply = [head(f"Location: {place}", status=f"{status} Moved")]
            with answering(lambda path, reply=reply: reply) as url, pytest.raises(ServerError) as caught:
                WAYS[way](ModelServer(url, "--server"))
            assert f"redirects /x to {place[:8]}" in sentence(caught, url)
            assert not caught.value.again
    assert not asked
    with (
        answering(lambda path: [head(status=f"{status} Moved")]) as url,
        pytest.raises(ServerError, match="to nowhere"),
    ):
        ModelServer(url, "--server").ask("/x")


STREAMS: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "events": (lambda: again(b'data: {"choices": [1]}\n\n' * 99), "goes on and on"),
    "pings": (lambda: again(b"\n" * 99), "goes on and on"),
    "one line": (lambda: again(b"x" * _BIG), "goes on and on"),
    "drips": (lambda: slowly(b"data: {}\n" * 99), "timed out"),
    "silence": (lambda: slowly(b" ", 2), "timed out"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_ends_in_time(name: str) -> None:
    make, words = STREAMS[name]
    with answering(lambda path: itertools.chain([head()], make())) as url:
        started = time.monotonic()
        with pytest.raises(UserError) as caught:
            assert sum(map(len, ModelServer(url, "--server").stream("/x", b"{}"))) <= server.MOST_BYTES
        assert time.monotonic() - started < 1.5
        assert words in sentence(caught, url)
    with answering(lambda path: [head("Content-Length: 99"), b"data: 1\n"]) as url, pytest.raises(ServerError):
        list(ModelServer(url, "--server").stream("/x", b"{}"))
    with answering(lambda path: page(b"data: 1\n\ndata: 2")) as url:
        assert list(ModelServer(url, "--server").stream("/x", b"{}")) == [b"data: 1\n", b"\n", b"data: 2"]


def test_names_and_versions_are_shown_short_and_in_plain_letters() -> None:
    models = [{"id": f"{ESCAPES}{place}" + "x" * 999} for place in range(999)]
    with answering(lambda path: page(json.dumps({"data": models}).encode())) as url, pytest.raises(UserError) as caught:
        ModelServer(url, "--server").find_model(["target"], "name it")
    assert r"serves \x1b]0;title" in sentence(caught, url)
    for version in (ESCAPES * 999, [ESCAPES] * 999, {ESCAPES: 1}, None, 5):
        reply = page(json.dumps({"version": version}).encode())
        with answering(lambda path, reply=reply: reply) as url:
            said = ModelServer(url, "--server").find_engine()[1]
        assert said is not None
        assert said.isprintable()
        assert len(said) < 60


@pytest.mark.parametrize("value", ["abc", "NaN", "+Inf", "1.2.3", "--", "9" * 400, "\x1b[2J"])
def test_a_counter_that_is_no_number_is_refused(value: str) -> None:
    class Odd(Engine):
        def page(self) -> str:
            return super().page().replace(" 0.0\n", f" {value}\n", 1) + "vllm:other_gauge NaN\n"

    with serving(Odd()) as url, pytest.raises(UserError) as caught:
        MeasuredServer(url, ["target"]).answer([[1, 2]], 8, 0.0)
    assert "as vllm:generation_tokens_total, which is no number" in sentence(caught, url)


@pytest.mark.parametrize("kind", ["vLLM", "llama.cpp"])
@pytest.mark.parametrize("value", ["3", None, [], {}, True, 1.5, -1, 10**30])
def test_a_chunk_whose_counts_are_no_numbers_is_refused(kind: str, value: Any) -> None:
    key = {"vLLM": "completion_tokens", "llama.cpp": "predicted_n"}[kind]
    chunk = {"choices": [1], "usage": {key: value}, "timings": {key: value}}
    with serving(Engine(kind)) as url:
        asking = MeasuredServer(url, ["target"])
        with pytest.raises(UserError) as caught:
            asking._read([(0.0, b"data: " + json.dumps(chunk).encode())])
    assert "sends its answers in other chunks" in sentence(caught, url)
    for wrong in (b"data: 5", b'data: {"choices": [1], "usage": 5, "timings": 5}', b"data: {", b'data: {"choices": 1}'):
        with pytest.raises(UserError) as caught:
            asking._read([(0.0, wrong)])
        sentence(caught, url)
