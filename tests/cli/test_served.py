"""`evaluate --url` and `what-if`: from servers on loopback to result.json and its page, and one sentence for each mistake."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.eval.engines.comparison import rates_for
from draftsmith.eval.results.result import read_result, write_result
from tests.eval.engines.fake_server import Engine, serving
from tests.eval.planner.plans import result
from tests.helpers import write_rows

pytestmark = pytest.mark.full
COSTS = str(Path(__file__).parents[2] / "docs/results/smollm2/eagle3/costs.json")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A command for a server of the target alone and one that drafts three tokens and accepts two, without a recipe."""
    monkeypatch.chdir(tmp_path)
    prompts = (
        {"id": f"p{i}", "slice": "chat", "messages": [{"role": "user", "content": f"why {i}?"}]} for i in range(12)
    )
    write_rows(tmp_path / "prompts.jsonl", *prompts)
    with serving(Engine(), 0.004) as a, serving(Engine(k=3, accepts=(2,)), 0.004) as b:
        own = ["--evaluate.max_new_tokens", "25", "--evaluate.plan_batches", "[1,2,64]", "--evaluate.repeats", "1"]
        yield ["evaluate", "--url", a, "--url", b, "--evaluate.prompts", '["prompts.jsonl"]', *own]


def test_servers_become_a_result_and_a_page(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "12 prompts, so 64 at once are left out" in printed.err
    found = read_result("served/result.json")
    assert (found.drafters, found.target.path) == ({}, "served")
    served = found.served
    assert served is not None
    assert [level.concurrency for level in served.levels] == [1, 2]
    assert (served.prompts, served.max_tokens, served.temperature, served.injected) == (12, 25, 0.0, False)
    for level in served.levels:
        drafting = level.sides[1]
        assert drafting.acceptance is not None
        assert drafting.acceptance.tau == pytest.approx(3, abs=0.05)
        assert drafting.predicted is None
        for kind in ("html", "md"):
            page = Path(f"served/report.{kind}").read_text()
            assert "On running servers" in page
            assert f"{drafting.speedup:.2f}×" in page
    capsys.readouterr()
    for command in (["what-if"], ["acceptance", "engine.log"]):
        assert main([*command, "--report", "served/result.json"]) == 2
        assert "served/result.json is of running servers alone and has no drafter" in capsys.readouterr().err
    assert main(["report", "served/result.json", "--output", "again"]) == 0
    assert Path("again/report.md").read_text() == Path("served/report.md").read_text()


def test_servers_are_sent_the_filters_that_the_result_tells(words: list[str]) -> None:
    """Also where they are at the value that turns another one off."""
    engine = Engine()
    with serving(engine) as url:
        own = ["--evaluate.temperatures", "[1.0]", "--evaluate.top_k", "1", "--evaluate.min_p", "0.1"]
        assert main([*words[:1], "--url", url, "--url", url, *words[5:], *own]) == 0
    asked = engine.asked[-1]
    assert {key: asked.get(key) for key in ("temperature", "top_k", "min_p")} == {
        "temperature": 1.0,
        "top_k": 1,
        "min_p": 0.1,
    }
    assert (asked["top_p"], asked["repetition_penalty"]) == (1.0, 1.0), "as generation_config.json may say otherwise"
    assert read_result("served/result.json").settings.filters == {
        "top-k": 1,
        "top-p": None,
        "min-p": 0.1,
        "repetition penalty": None,
    }


def test_an_evaluation_stands_beside_and_injected_rounds_predict(words: list[str], tmp_path: Path) -> None:
    write_result("result.json", result(0.0, {"overall": 0.5}))
    assert main([*words, "--injected", "--output", "injected"]) == 0
    before = read_result("injected/result.json").served
    assert before is not None
    assert before.injected
    assert "the texts are worth nothing" in Path("injected/report.md").read_text()
    assert main([*words, "--report", "result.json", "--costs", "injected/result.json"]) == 0
    found = read_result("served/result.json")
    assert found.drafters == read_result("result.json").drafters
    assert found.served is not None
    for level, earlier in zip(found.served.levels, before.levels, strict=True):
        side, injected = level.sides[1], earlier.sides[1]
        assert side.predicted_tau == pytest.approx(1 + 0.5 + 0.25 + 0.125), "of the report, at the served draft length"
        assert injected.speedup is not None
        assert injected.acceptance is not None
        assert side.predicted == pytest.approx(1.875 * injected.speedup / injected.acceptance.tau)
        assert f"{side.predicted:.2f}×" in Path("served/report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--no-decode"], "--no-decode is for the decoder here, and --url measures running servers"),
        (["--model", "other"], "serves served, not other"),
        (["--report", "hot.json"], "--report hot.json is of temperature 0.7, but evaluate.temperatures begins with 0"),
        (
            ["--report", "hot.json", "--evaluate.temperatures", "[0.7]", "--evaluate.top_p", "0.9"],
            "--report hot.json has another top-p than is asked for here",
        ),
        (["--costs", "hot.json"], "--costs hot.json is of no running servers"),
        (["--seconds", "0"], "--seconds is '0': give a number of seconds above 0"),
        (["--evaluate.repetition_penalty", "1.1"], "evaluate.repetition_penalty is no option that servers agree on"),
        (["--output", "mine"], "would replace mine/report.md, which draftsmith did not write"),
        (["--evaluate.prompts", "[]"], "evaluate.prompts is empty: name prompt sets"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result("hot.json", result(0.7, {"overall": 0.5}))
    Path("mine").mkdir()
    Path("mine/report.md").write_text("mine")
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err
    assert not Path("served").exists()


def test_options_of_servers_need_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--recipe", "eagle3/tiny", "--injected"]) == 2
    assert "--injected is for running servers: name them with --url" in capsys.readouterr().err


@pytest.mark.parametrize(("tau", "k"), [(1.0, 3), (1.02, 5), (2.5, 5), (3.999, 3), (6.0, 5), (1.5, 1)])
def test_rates_give_the_wanted_tau(tau: float, k: int) -> None:
    rates = rates_for(tau, [0.5**i for i in range(1, k + 1)])
    assert 1 + sum(rates) == pytest.approx(tau, abs=1e-5)
    assert sorted(rates, reverse=True) == list(rates)
    assert all(abs(rate - rates[0] ** i) < 1e-5 for i, rate in enumerate(rates, 1)), "one probability at every position"


def test_what_if_prints_what_engines_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "--tau", "2.5", "--tau", "3", "--draft-length", "4"]) == 0
    told = capsys.readouterr().out
    sums = [1 + sum(json.loads(text)) for text in re.findall(r'"synthetic_acceptance_rates": (\[.*?\])', told)]
    assert sums == [pytest.approx(2.5, abs=1e-5), pytest.approx(3, abs=1e-5)]
    own = [1 + sum(map(float, text.split(","))) for text in re.findall(r"--spec-synth-rates (\S+)", told)]
    assert own == sums
    assert re.findall(r"SGLANG_SIMULATE_ACC_LEN=(\S+)", told) == ["2.5", "3"]
    for wrong, message in (
        (["--tau", "6.1"], "tau 6.1 cannot be injected, as with 5 drafted tokens it is from 1 to 6"),
        ([], "needs the tau of a head that is not there yet"),
        (["--tau", "2", "prompts"], "but not prompts"),
        (["--tau", "2", "--drafter", "eagle3"], "--drafter eagle3 names a drafter of a report or of a table of costs"),
        (
            ["--tau", "2", "--costs", COSTS, "--drafter", "eagle"],
            f"{COSTS} has no drafter 'eagle' (did you mean eagle3?)",
        ),
    ):
        assert main(["what-if", *wrong]) == 2
        assert message in capsys.readouterr().err


def test_costs_of_another_target_than_the_report_s_predict_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path / "result.json", result(0.0, {"overall": 0.6}))
    for asked in (["what-if"], words):
        assert main([*asked, "--report", "result.json", "--costs", COSTS]) == 2
        assert f"--costs {COSTS} holds the costs of another target" in capsys.readouterr().err


def test_what_if_takes_the_costs_of_the_report_s_temperature(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, temperatures = Path(COSTS).with_name("t0.7") / "result.json", list[float]()
    monkeypatch.setattr(
        "draftsmith.cli.served.predictor",
        lambda costs, name, report, temperature: temperatures.append(temperature) or (lambda rows, accepted: None),
    )
    for words in (["--report", str(report), "--draft-length", "3"], ["--tau", "2"]):
        assert main(["what-if", *words, "--costs", COSTS]) == 0
    assert temperatures == [0.7, 0.0]
    capsys.readouterr()


def test_servers_are_asked_as_the_recipe_renders_and_calls_are_texts(words: list[str], tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    asked = [
        {"role": "user", "content": "2 and 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "and 3?"},
    ]
    write_rows(tmp_path / "prompts.jsonl", {"id": "p", "slice": "chat", "messages": asked})
    engine = Engine()
    with serving(engine) as url:
        own = ["--evaluate.plan_batches", "[1]", "--data.template.enable_thinking", "false"]
        assert main([*words[:1], "--url", url, "--url", url, *words[5:], *own]) == 0
    sent = engine.asked[-1]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    (made,) = sent["messages"][1]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert made["id"]
    assert "weight" not in sent["messages"][1]
