"""Answers by servers: what is asked, what is read, order, failures, and whether they are the target's own."""

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.answers import served
from draftsmith.data.answers.generate import read_answers, regenerate
from draftsmith.data.answers.served import AnswerServer, answer_all, likeness
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import prepare_prompts
from draftsmith.decoder.answers import Generation, Request
from draftsmith.decoder.decode import decode
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.target.target import Target
from tests.eval.engines.fake_server import Engine, serving
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

SAMPLING = Sampling(0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
REQUESTS = [Request.seeded(f"c{i}", "chat", (1, 2, i + 3), 6, 0) for i in range(12)]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), initializer_range=0.08)
    return Target(model, path="tiny", fingerprint="0")


def as_vllm(ids: list[int], ended: bool) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "finish_reason": "stop" if ended else "length", "text": "x"}]}


def as_llama(ids: list[int], ended: bool) -> dict[str, Any]:
    return {"tokens": ids, "stop_type": "eos" if ended else "limit", "content": "x"}


AS = {"vLLM": as_vllm, "llama.cpp": as_llama}


def in_order(answers: Iterable[tuple[AnswerServer, Generation]]) -> list[Generation]:
    return sorted((answer for _, answer in answers), key=lambda answer: REQUESTS.index(answer.request))


@pytest.mark.parametrize("kind", AS)
def test_a_server_is_asked_for_token_ids_by_the_recipe_s_sampling(kind: str) -> None:
    engine = Engine(kind, reply=lambda asked: (200, AS[kind]([asked["prompt"][-1], 9], asked["prompt"][-1] % 2 == 0)))
    with serving(engine) as url:
        server = AnswerServer(f"{url}/v1/", ["target"])
        found = in_order(answer_all([server], REQUESTS, SAMPLING, 3, 160))
    assert server.engine == {"vLLM": "vLLM 9.9", "llama.cpp": "llama.cpp b9-abc"}[kind]
    assert [answer.request for answer in found] == REQUESTS
    assert [answer.output_ids for answer in found] == [[i + 3, 9] for i in range(12)]
    assert [answer.finish_reason for answer in found] == ["length", "eos"] * 6
    asked = engine.asked[0]
    names = {"vLLM": ("max_tokens", "repetition_penalty"), "llama.cpp": ("n_predict", "repeat_penalty")}[kind]
    common = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    assert common.items() <= asked.items()
    assert (asked[names[0]], asked[names[1]]) == (6, 1.2)
    assert "seed" not in asked


def test_several_servers_share_the_prompts_and_slow_answers_hold_up_none() -> None:
    busy = threading.Semaphore(0)

    def slow(asked: dict[str, Any]) -> tuple[int, Any]:
        if asked["prompt"][-1] == 3:  # the first prompt: answered once the others are
            busy.acquire(timeout=20)
        elif asked["prompt"][-1] == 14:
            busy.release()
        time.sleep(0.02)  # so that no server is done with all before the other begins
        return 200, as_vllm([asked["prompt"][-1]], False)

    engines = [Engine(reply=slow), Engine(reply=slow)]
    with serving(engines[0]) as one, serving(engines[1]) as two:
        servers = [AnswerServer(url, ["target"]) for url in (one, two)]
        found = [answer.output_ids for _, answer in answer_all(servers, REQUESTS, Sampling(1.0), 2, 160)]
    assert sorted(found) == [[i + 3] for i in range(12)]
    assert found[0] != [3]
    assert min(len(engine.asked) for engine in engines) > 0
    assert {engine.asked[0]["prompt"][-1] < 7 for engine in engines} == {True}, "the first prompts are shared out"
    assert sorted(a["prompt"][-1] for e in engines for a in e.asked) == list(range(3, 15))


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_request_that_fails_is_sent_again_and_then_said(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_WAITS", (0.01, 0.01))
    failed = []

    def flaky(asked: dict[str, Any]) -> tuple[int, Any]:
        if asked["prompt"][-1] == 5 and len(failed) < 2:
            failed.append(asked)
            return status, {"error": "loading"}
        return 200, as_vllm([asked["prompt"][-1]], False)

    with serving(Engine(reply=flaky)) as url:
        server = AnswerServer(url, ["target"])
        assert [a.output_ids for a in in_order(answer_all([server], REQUESTS, Sampling(1.0), 4, 160))] == [
            [i + 3] for i in range(12)
        ]
    assert len(failed) == 2
    refusing = Engine(reply=lambda asked: (400, {"error": "too long"}))
    with serving(refusing) as url:
        server = AnswerServer(url, ["target"])
        with pytest.raises(UserError, match=r"status 400\): it says .*too long"):
            list(answer_all([server], REQUESTS[:1], Sampling(1.0), 1, 160))
    assert len(refusing.asked) == 1, "what is refused is not asked for again"
    with serving(Engine(reply=lambda asked: (503, {"error": "full"}))) as url:
        server = AnswerServer(url, ["target"])
        with pytest.raises(UserError, match=rf"{url} refuses /v1/completions \(status 503\): it says .*full"):
            list(answer_all([server], REQUESTS, Sampling(1.0), 4, 160))


def test_what_is_no_server_of_the_target_is_refused() -> None:
    with serving(Engine(model="models/other")) as url, pytest.raises(UserError) as caught:
        AnswerServer(url, ["target"])
    assert "serves served, not target" in str(caught.value)
    assert str(caught.value).endswith("name it in answers.served_name.")
    with pytest.raises(UserError, match=r"answers\.servers is localhost:80: give the address of a server"):
        AnswerServer("localhost:80", ["target"])
    with serving(Engine(kind="vLLM", versions=False)) as url, pytest.raises(UserError, match="neither vLLM nor"):
        AnswerServer(url, ["target"])


def test_a_run_of_answers_goes_on_and_grows(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every whole answer is kept, also behind one that is slow or fails, in the order of the prompts; answers that are there are not
    asked for again."""
    monkeypatch.setattr(served, "_WAITS", ())
    failed = threading.Event()
    talk = [Conversation(f"c{i}", "chat", ({"role": "user", "content": f"why {i}?"},)) for i in range(9)]
    prompts = prepare_prompts(tiny_tokenizer(), talk, max_new_tokens=lambda name: 6, max_length=120)
    broken = [True]

    def reply(asked: dict[str, Any]) -> tuple[int, Any]:
        if broken[0] and asked["prompt"] == list(prompts[1].ids):
            failed.wait(20)  # still open when another one fails
        if broken[0] and asked["prompt"] == list(prompts[5].ids):
            time.sleep(0.2)
            threading.Timer(0.5, failed.set).start()
            return 500, "broken"
        return 200, as_vllm([7, 8, target.eos_ids[0]], True)

    def make(engine: Engine, first: int, path: Path, **how: Any) -> list[dict[str, Any]]:
        with serving(engine) as url:
            server = AnswerServer(url, ["target"])
            options = {"sampling": Sampling(1.0), "seed": 0, "batch": 3, "servers": [server]}
            regenerate(target, tiny_tokenizer(), prompts[:first], path, **options, **how)
        return [json.loads(line) for line in path.read_text().splitlines()]

    path = tmp_path / "answers.jsonl"
    with pytest.raises(UserError, match="status 500"):
        make(Engine(reply=reply), 7, path)
    assert len(Path(f"{path}.partial").read_text().splitlines()) == 1
    assert len([*tmp_path.glob("answers.jsonl.part-*")]) >= 3
    broken[0], engine = False, Engine(reply=reply)
    rows = make(engine, 7, path)
    assert [row["id"] for row in rows] == [f"c{i}" for i in range(7)]
    assert [row["finish_reason"] for row in rows] == ["eos"] * 7
    assert {row["server"][:17] for row in rows} == {"http://127.0.0.1:"}
    assert 2 <= len(engine.asked) <= 3
    assert not [*tmp_path.glob("answers.jsonl.part*")]
    engine, grown = Engine(reply=reply), tmp_path / "grown.jsonl"
    assert len(make(engine, 9, grown, kept=[path])) == 9
    assert sorted(asked["prompt"] for asked in engine.asked) == sorted(list(p.ids) for p in prompts[7:])
    assert len(read_answers(grown).samples) == 9


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(0.8, top_k=8, top_p=0.9),
    Sampling(1.0, repetition_penalty=1.3),
    Sampling(),
]


@pytest.mark.full
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_target_s_own_answers_are_told_from_others(sampling: Sampling, target: Target, tmp_path: Path) -> None:
    """Own samples pass; those of another temperature, of rounded weights or without the filters do not."""
    talk = [Conversation(f"c{i}", "chat", ({"role": "user", "content": f"why {i}?"},)) for i in range(30)]
    prompts = prepare_prompts(tiny_tokenizer(), talk, max_new_tokens=lambda name: 24, max_length=120)

    def samples(name: str, how: Sampling, model: Target = target) -> Any:
        path = tmp_path / f"{name}.jsonl"
        regenerate(model, tiny_tokenizer(), prompts, path, sampling=how, seed=1)
        return read_answers(path).samples

    own = likeness(target, samples("own", sampling), sampling)
    assert not own.differs, own
    assert own.tokens > 100
    hotter = Sampling(sampling.temperature + 0.5, repetition_penalty=sampling.repetition_penalty)
    assert likeness(target, samples("hotter", hotter), sampling).differs
    other = tiny_model("llama", vocab_size=len(tiny_tokenizer()), initializer_range=0.08)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * 0.5 * weight.std())
    assert likeness(target, samples("other", sampling, Target(other, path="o", fingerprint="1")), sampling).differs


def test_the_gap_is_that_of_a_slow_oracle(target: Target) -> None:
    requests = [Request.seeded(f"r{i}", "chat", (3, 4 + i), 9, 0) for i in range(4)]
    answers = list(decode(target, TargetAlone(), requests, Sampling(0.9), 2))
    from draftsmith.data.conversations.masks import tokenize_answers

    rows = [
        {"id": a.request.sample_id, "slice": "s", "prompt_ids": list(a.request.prompt_ids), "output_ids": a.output_ids}
        for a in answers
    ]
    found = likeness(target, tokenize_answers(iter(rows)).samples, Sampling(0.9))
    gaps = []
    for answer in answers:
        ids = [*answer.request.prompt_ids, *answer.output_ids]
        for at in range(len(answer.request.prompt_ids), len(ids)):
            logits = target.head.logits(target.forward(torch.tensor([ids[:at]])).last[0, -1])
            logp = (logits.double() / 0.9).log_softmax(-1)
            gaps.append(float((logp.exp() * logp).sum() - logp[ids[at]]))
    assert found.tokens == len(gaps)
    assert found.gap == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
