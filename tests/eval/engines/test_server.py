"""What is seen of a running server: its rounds and draft length, and a sentence for each thing that would falsify them."""

from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.engines.server import MeasuredServer
from tests.eval.engines.fake_server import Engine, serving

PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("kind", ["vLLM", "llama.cpp"])
@pytest.mark.parametrize(("k", "accepts"), [(0, (0,)), (1, (1, 0)), (3, (0, 2, 3, 1)), (5, (5, 0, 0, 4))])
def test_rounds_are_those_of_the_engine(kind: str, k: int, accepts: tuple[int, ...]) -> None:
    engine = Engine(kind, k, accepts)
    with serving(engine, 0) as url:
        batch = MeasuredServer(url + "/v1/", ["target"]).answer(PROMPTS, 40, 0.0)
    assert batch.draft_length == k
    own = engine.rounds(40)
    for answer in batch.answers:
        assert [(e.tokens, e.rounds) for e in answer] == [(1, 0), *((n, i) for i, (n, *_) in enumerate(own, 1))]
        assert [e.at for e in answer] == sorted(e.at for e in answer)
        assert batch.started <= answer[0].at


def test_a_server_is_asked_for_fixed_lengths_of_what_it_has_not_read_before() -> None:
    engine = Engine(model="/srv/Qwen/Target")
    with serving(engine, 0) as url:
        server = MeasuredServer(url, ["Other/none", "qwen/target.gguf"])
        server.answer(PROMPTS, 8, 0.7)
    assert (server.model, server.engine, server.url) == ("served", "vLLM 9.9", url)
    assert sorted(asked["prompt"] for asked in engine.asked) == PROMPTS
    for asked in engine.asked:
        assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (8, 0.7, True)
        assert asked["cache_prompt"] is False
    assert len({asked["cache_salt"] for asked in engine.asked}) == 2


def test_rounds_that_were_sent_together_are_counted_by_the_engine() -> None:
    engine = Engine(k=2, merged=5)
    with serving(engine, 0) as url:
        server = MeasuredServer(url, ["target"])
        for answer in server.answer(PROMPTS, 20, 0.0).answers:
            assert (len(answer), answer[-1].rounds) == (1 + 16, 19)
        engine.merged = 2
        with pytest.raises(UserError, match="sent 38 rounds in 20 chunks, so when they ended is not known"):
            server.answer(PROMPTS, 20, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": False}, "shows no counters of vLLM or llama.cpp at /metrics"),
        ({"model": "models/other"}, r"serves served, not target: start it with the recipe's target"),
        ({"running": 3}, "works on 3 requests of others"),
        ({"joining": 2}, "works on 2 requests of others, which its times would show"),
        ({"usage": False}, r"sends its answers in other chunks than .* does: name the address of the engine itself"),
        ({"others": 7}, "generated 14 tokens for others meanwhile"),
        (
            {"others": -7},
            "counts 66 generated tokens at /metrics 0.1 seconds after it sent 80, so its rounds are not known",
        ),
        ({"longest": 20}, "ended an answer after 17 of 40 tokens behind a prompt of 3: give it a longer context"),
        ({"longest": 3}, r"refuses /v1/completions \(status 400\): it says .*longer than max_model_len"),
    ],
)
@pytest.mark.parametrize("kind", ["vLLM", "llama.cpp"])
def test_what_would_falsify_the_times_is_one_sentence(
    kind: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.eval.engines.server._SETTLES", 0.1)
    with serving(Engine(kind, **changes), 0) as url, pytest.raises(UserError, match=message) as caught:
        MeasuredServer(url, ["target"]).answer(PROMPTS, 40, 0.0)
    assert str(caught.value).startswith(url)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with serving(Engine()) as url:
        pass
    with pytest.raises(UserError, match=r"does not answer .*refused.*: start the server"):
        MeasuredServer(url, ["target"])
    for wrong in ("localhost:80", "ftp://host", "http://", "http://user:secret@host"):
        with pytest.raises(
            UserError, match=r"--server is .*: give the address of a server, such as http://localhost:8000"
        ):
            MeasuredServer(wrong, ["target"])
    for wrong in ("http://[host", "http://host:port", "http://no-such-host.invalid"):
        with pytest.raises(UserError, match="/metrics does not answer"):
            MeasuredServer(wrong, ["target"])
