"""Chats that running servers answer in turns: what is counted, in which order, and a sentence for each thing that goes wrong."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import Drafting
from draftsmith.eval.engines.comparison import make_level, predictor
from draftsmith.eval.engines.load import Answer, Chat, ChatServer, Limits, Tally, take_turns
from draftsmith.eval.ledger.counts import Counts
from draftsmith.eval.results.served import Served
from tests.eval.engines.fake_server import Engine, serving
from tests.eval.planner.plans import plan, result

CHATS = [Chat(f"p{i}", {"messages": [{"role": "user", "content": f"{i}"}], "max_tokens": 9}) for i in range(12)]
LIMITS = Limits(20.0, 60.0)


def first_word(asked: dict[str, Any]) -> str:
    return str(asked["messages"][0]["content"])


@pytest.mark.parametrize("kind", ["vLLM", "llama.cpp"])
def test_what_servers_answered_and_accepted_is_counted(kind: str) -> None:
    """Of vLLM by its counters, of llama.cpp by its answers; the warming answer is none of them."""
    alone, drafting = Engine(kind), Engine(kind, k=3, accepts=(1,))
    with serving(alone, 0) as a, serving(drafting, 0) as b:
        servers = [ChatServer(a, ["target"]), ChatServer(b, ["target"])]
        found = take_turns(servers, CHATS, [1, 3], 2, LIMITS)
    levels = [make_level(rows, tallies, None) for rows, tallies in found.items()]
    for level in levels:
        one, two = level.sides
        assert (one.asked, one.answered, one.tokens, one.unfinished, one.failures) == (24, 24, 24 * 9, 0, ())
        assert (two.answered, two.tokens, two.paired) == (24, 24 * 9, 12)
        assert one.acceptance is None
        assert two.acceptance is not None
        own = drafting.rounds(9)
        assert two.acceptance.rounds == 24 * len(own)
        assert two.acceptance.tau == pytest.approx(1 + sum(kept for _, _, kept in own) / len(own))
        assert two.acceptance.by_answers is (kind == "llama.cpp")
        assert one.speedup is None
        assert two.speedup_interval is not None
        assert two.ttft_s is not None
        assert two.latency_s is not None
        assert 0 < two.ttft_s.p50 <= two.ttft_s.p95
        assert two.ttft_s.p95 <= two.latency_s.p95
    asked = alone.asked[1:]
    assert len(asked) == 48
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    penalty = "repetition_penalty" if kind == "vLLM" else "repeat_penalty"
    assert all(off.items() <= one.items() and one[penalty] == 1 for one in asked), "as engines have others of their own"
    assert all(one["stream_options"] == {"include_usage": True} for one in asked)
    if kind == "vLLM":
        assert len({one["cache_salt"] for one in asked}) == 48
    else:
        assert all(one["cache_prompt"] is False for one in asked)


def test_servers_take_turns_at_the_same_blocks_and_each_begins() -> None:
    order: list[tuple[str, str]] = []

    def noting(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda asked: order.append((name, first_word(asked))) or ""  # type: ignore[func-returns-value]

    with serving(Engine(fault=noting("a")), 0) as a, serving(Engine(fault=noting("b")), 0) as b:
        take_turns([ChatServer(a), ChatServer(b)], CHATS[:8], [2], 1, LIMITS)
    turns = order[2:]
    blocks = [turns[i : i + 4] for i in range(0, 16, 4)]
    assert [{name for name, _ in block} for block in blocks] == [{"a"}, {"b"}, {"b"}, {"a"}]
    assert [sorted(word for _, word in block) for block in blocks] == [list("0123")] * 2 + [list("4567")] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", r"refuses /v1/chat/completions \(status 500\): it says .*out of memory"),
        ("stalls", r"does not answer \(.*timed out\)"),
        ("hangs up", "hung up in the middle of an answer, after 1 chunks of text"),
        ("silent", r"does not say how many tokens an answer has"),
    ],
)
def test_a_request_that_fails_is_named_and_a_server_that_answers_nothing_ends_it(fault: str, message: str) -> None:
    limits = Limits(0.5, 60.0)
    some = Engine("llama.cpp", fault=lambda asked: fault if first_word(asked) in "57" else "")
    with serving(Engine(), 0) as a, serving(some, 0) as b:
        (tallies,) = take_turns([ChatServer(a), ChatServer(b)], CHATS[:8], [4], 1, limits).values()
    level = make_level(4, tallies, None)
    assert [(f.prompt, b in f.why) for f in sorted(level.sides[1].failures, key=lambda f: f.prompt)] == [
        ("p5", True),
        ("p7", True),
    ]
    assert (level.sides[1].answered, level.sides[1].asked, level.sides[1].paired) == (6, 8, 6)
    always = Engine(
        "llama.cpp", fault=lambda asked: "" if first_word(asked) == "0" and len(always.asked) == 1 else fault
    )
    with (
        serving(always, 0) as url,
        pytest.raises(UserError, match=f"{url} answered none of 8 requests, 4 at once: .*{message}"),
    ):
        take_turns([ChatServer(url)], CHATS[:8], [4], 1, limits)
    with serving(Engine("llama.cpp", fault=lambda asked: fault), 0) as url, pytest.raises(UserError, match=message):
        take_turns([ChatServer(url)], CHATS, [4], 1, limits)


def test_nothing_is_waited_for_when_the_time_is_up() -> None:
    engine = Engine(fault=lambda asked: "stalls" if len(engine.asked) > 1 else "")
    with serving(engine, 0) as url:
        (tally,) = take_turns([ChatServer(url)], CHATS, [2], 5, Limits(600.0, 1.0))[2]
    assert (tally.unfinished, tally.answers, tally.failures) == (60, {}, [])
    assert len(engine.asked) == 3, "what was not begun is not asked any more"


def test_another_model_and_no_server_are_one_sentence() -> None:
    with (
        serving(Engine(model="models/other")) as url,
        pytest.raises(UserError, match="serves served, not target: start it with"),
    ):
        ChatServer(url, ["target"])
    with pytest.raises(UserError, match="does not answer"):
        ChatServer(url)
    with serving(Engine(metrics=False, versions=False, k=2, accepts=(1,)), 0) as url:
        server = ChatServer(url)
        (tally,) = take_turns([server], CHATS, [2], 1, LIMITS)[2]
    assert (server.engine, server.model) == ("another engine", "served")
    assert make_level(2, [tally], None).sides[0].acceptance is None


def tally(seconds_per_token: float, accepted: int = 0, prompts: int = 12) -> Tally:
    """Answers of 11 tokens that begin after 1 s; rounds of 4 drafted tokens, of which `accepted` are accepted."""
    counts = Counts(10, 10 * accepted, 40) if accepted else None
    answers = {f"p{i}": [Answer(1.0, 1.0 + 10 * seconds_per_token * (1 + i), (), 11, counts)] for i in range(prompts)}
    return Tally(answers, seconds=10.0)


def test_the_speedup_is_of_pairs_and_has_an_interval_over_prompts() -> None:
    first, second = tally(0.1), tally(0.05, accepted=1)
    del second.answers["p3"]
    level = make_level(2, [first, second], None)
    side = level.sides[1]
    assert (side.paired, side.speedup) == (11, pytest.approx(2.0))
    assert side.speedup_interval == (pytest.approx(2.0), pytest.approx(2.0)), "every prompt is twice as fast"
    assert level.sides[0].tok_s == pytest.approx(12 * 11 / 10)
    assert side.token_s is not None
    assert side.token_s.p50 == pytest.approx(0.05 * sorted(1 + i for i in range(12) if i != 3)[5])
    assert make_level(2, [first, tally(0.05, 1, prompts=5)], None).sides[1].speedup_interval is None


def test_predictions_come_from_costs_or_from_injected_rounds() -> None:
    """Rounds that cost 1.5 passes whatever is accepted: injected tau 3 gave 2.0, so tau 2 gives 4/3."""
    injected = make_level(2, [tally(0.1), tally(0.05, accepted=2)], None)
    past = Served((), (injected,), 0.0, 11, 12, 1, True, None, "", None, "")  # type: ignore[arg-type]
    level = make_level(2, [tally(0.1), tally(0.08, accepted=1)], predictor(past, "eagle3", None))
    assert level.sides[1].predicted == pytest.approx(2 / 1.5)
    assert level.sides[1].predicted_tau == 2
    assert (
        make_level(4, [tally(0.1), tally(0.08, accepted=1)], predictor(past, "eagle3", None)).sides[1].predicted is None
    )
    planned = plan(result(0.0, {"overall": 0.6}))
    (option,) = [o for o in planned.headline[0].options if o.num_speculative_tokens == 4]
    report = planned.results[0].drafters["eagle3"]
    side = make_level(1, [tally(0.1), tally(0.08, 1)], predictor(planned.table, "eagle3", report)).sides[1]
    assert (side.predicted, side.predicted_tau) == (pytest.approx(option.speedup), option.tau)


def test_costs_predict_at_the_temperature_of_the_requests() -> None:
    planned = plan(result(0.7, {"overall": 0.6}))
    warm = Drafting({"eagle3": {str(k): 3.0 * k for k in range(1, 5)}}, {"": 2.5, "eagle3": 5.0})
    points = tuple(replace(point, sampled=warm) for point in planned.table.points)
    table = replace(planned.table, points=points, temperatures=(0.0, 0.7))
    report = planned.results[0].drafters["eagle3"]
    for temperature, costs in ((0.0, planned.table), (0.7, table)):
        side = make_level(1, [tally(0.1), tally(0.08, 1)], predictor(table, "eagle3", report, temperature)).sides[1]
        (cell,) = plan(result(temperature, {"overall": 0.6}), costs=costs).headline
        assert side.predicted == pytest.approx(next(o.speedup for o in cell.options if o.num_speculative_tokens == 4))


@pytest.mark.parametrize(
    ("name", "temperature", "warned"),
    [
        ("hydra", 0.0, "the costs are of eagle3 and not of hydra, so that no speedup is predicted: measure them"),
        (
            "eagle3",
            0.7,
            r"the costs are of temperature 0 and not of 0\.7, so that no speedup is predicted: measure them",
        ),
        ("eagle3", 0.0, None),
        ("", 0.0, None),
    ],
)
def test_costs_of_another_drafter_predict_nothing(
    name: str, temperature: float, warned: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nobody names one, the table's first is meant."""
    table = replace(plan(result(0.0, {"overall": 0.6})).table, temperatures=(0.0,))
    side = make_level(1, [tally(0.1), tally(0.08, 1)], predictor(table, name, None, temperature)).sides[1]
    assert (side.predicted is None) is (side.predicted_tau is None) is (warned is not None)
    assert re.search(warned or "^$", capsys.readouterr().err)


def test_counters_of_tensorrt_llm_are_those_since_they_were_last_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells its version where vLLM does, and takes no key that it does not know."""
    counted = 0

    def page(engine: Engine) -> str:
        nonlocal counted
        rounds, counted = engine.counts["rounds"] - counted, engine.counts["rounds"]
        told = {"numDraftTokens": 3 * rounds, "numRequestsWithDraftTokens": rounds, "numAcceptedTokens": 2 * rounds}
        return json.dumps([{"specDecodingStats": told}] if rounds else [])

    monkeypatch.setattr(Engine, "page", page)
    engine = Engine("vLLM", k=3, accepts=(2,), owner="tensorrt_llm")
    with serving(engine, 0) as url:
        server = ChatServer(url, ["target"])
        found = take_turns([server], CHATS, [1, 3], 1, LIMITS)
    assert server.engine == "TensorRT-LLM 9.9"
    assert not {"cache_salt", "top_k"} & engine.asked[-1].keys()
    for (tally,) in found.values():
        assert tally.counts is not None
        assert (tally.counts.rounds, tally.counts.tau) == (12 * len(engine.rounds(9)), 3)
