"""The gate: what a threshold may say, what it is held against, that it never passes by looking at nothing, and its JUnit XML."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.eval.gate import gate
from draftsmith.eval.gate.gate import ThresholdCheck, check_names, check_results, parse_thresholds, to_junit
from draftsmith.eval.results.metrics import METRICS, Metric
from draftsmith.eval.results.result import DrafterResult, Hardware, Measures, Result, Settings, TargetInfo, write_result
from draftsmith.eval.results.served import Served


def measures(tau: float, /, **changes: Any) -> Measures:
    values: dict[str, Any] = {
        "tau": tau,
        "tau_interval": (tau - 0.25, tau + 0.25),
        "tau_simulated": tau + 0.5,
        "tau_simulated_interval": (tau + 0.25, tau + 0.75),
        "speedup": tau / 2,
        "speedup_spread": (tau / 2 - 0.125, tau / 2 + 0.125),
        "acceptance_rate": 0.5,
        "decode_tok_s": 100 * tau,
        "decode_tok_s_spread": (90 * tau, 110 * tau),
    }
    return Measures(**{"prompts": 12, **values, **changes})


def result(temperature: float, drafters: dict[str, float], **changes: Any) -> Result:
    """Every drafter has the slices chat and code.v2: code is one better than overall, chat one worse."""
    return Result(
        command="",
        commit=None,
        date="",
        hardware=Hardware("invented", 1, 1, 1.0, None),
        versions={},
        recipe=None,
        target=TargetInfo("t"),
        settings=Settings(temperature, None, None, 5, 1, "float32", 0, 3),
        drafters={
            name: DrafterResult(
                measures(tau, **changes),
                {"chat": measures(tau - 1, **changes), "code.v2": measures(tau + 1, **changes)},
            )
            for name, tau in drafters.items()
        },
    )


SERVED = Served((), (), 0.0, 11, 12, 1, False, Hardware("invented", 1, 1, 1.0, None), "", None, "")
LOSSY = "medusa medusa_63, typical (lossy)"
RESULTS = {
    "a": result(0.0, {"eagle3": 3.5, LOSSY: 3.0}),
    "b": result(1.0, {"eagle3": 2.5, LOSSY: 2.0}),
}


def run(*texts: str, results: dict[str, Result] = RESULTS) -> list[ThresholdCheck]:
    return check_results(results, parse_thresholds(texts))


def found(*texts: str) -> list[tuple[str, str, float, bool]]:
    return [(c.source, c.drafter, c.measured, c.passed) for c in run(*texts)]


def test_a_bare_threshold_applies_to_every_drafter_at_every_setting() -> None:
    assert found("tau=2.5") == [
        ("a", "eagle3", 3.5, True),
        ("a", LOSSY, 3.0, True),
        ("b", "eagle3", 2.5, True),
        ("b", LOSSY, 2.0, False),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eagle3:tau@T1=2.6", [("b", "eagle3", 2.5, False)]),
        (f"{LOSSY}:code.v2.tau.low@T0=3.75", [("a", LOSSY, 3.75, True)]),
        ("eagle3:code.v2.tau@T=1=3.51", [("b", "eagle3", 3.5, False)]),
        ("eagle3:overall.tau_simulated@t1.0=3", [("b", "eagle3", 3.0, True)]),
        ("eagle3:tau_simulated.low@T1=3", [("b", "eagle3", 2.75, False)]),
        ("eagle3:speedup.low@T0=1.7", [("a", "eagle3", 1.625, False)]),
        ("eagle3:decode_tok_s.low@T0=350", [("a", "eagle3", 315.0, False)]),
        ("eagle3:acceptance_rate@T0=0.6", [("a", "eagle3", 0.5, False)]),
    ],
)
def test_what_a_threshold_names(text: str, expected: list[Any]) -> None:
    assert found(text) == expected


def test_lists_and_repeats_add_up() -> None:
    assert len(run("tau=2,chat.tau=1.5", " code.v2.tau = 3 ")) == 12
    both = found(f"eagle3:tau@T0=2, {LOSSY}:tau@T0=2")
    assert [name for _, name, _, _ in both] == ["eagle3", LOSSY]


def test_a_message_says_who_where_what_and_how_much() -> None:
    (check,) = run("eagle3:code.v2.tau.low@T1=3.4")
    assert check.message == "eagle3 at T=1: code.v2.tau.low 3.25 is below the threshold 3.4 (b)."
    warm = replace(RESULTS["b"], settings=replace(RESULTS["b"].settings, top_k=50, top_p=0.9, batch=8))
    (check,) = run("eagle3:tau=2", results={"c": warm})
    assert check.message == "eagle3 at T=1, top_k=50, top_p=0.9, batch 8: tau 2.5 reaches the threshold 2 (c)."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no threshold"),
        ("=3", "is no threshold"),
        ("tau=high", "not a number"),
        ("tau=nan", "not a number"),
        ("tau=2,", "is no threshold"),
        (",tau=2", "'' is no threshold"),
        ("tau,code.tau=2", "'tau' is no threshold"),
        ("tau=2,,eagle3:tau=3", "'' is no threshold"),
        ("codetau=2", "no metric"),
        ("acceptance_rate.low=0.2", "'acceptance_rate.low' ends in no metric"),
        ("tau_simulated.low=1", "nothing could miss it, as tau_simulated.low is never below 1"),
        ("tau@1=2", "no metric"),
        ("tau=1", "nothing could miss it, as tau is never below 1"),
        ("speedup=-1", "nothing could miss it"),
        ("eagle3:=3", "'' ends in no metric"),
        ("eagle3:tau@1.5=3", "'tau@1.5' ends in no metric"),
        ("acceptance_rate=60", "nothing could reach it, as acceptance_rate is never above 1"),
    ],
)
def test_malformed_thresholds_are_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_thresholds([text])
    assert "\n" not in str(caught.value)


def test_where_less_is_better_a_threshold_is_what_must_not_be_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Metric("looping", sign=-1, bounds=(0, 1))
    monkeypatch.setitem(gate._METRICS, "looping", (row, row.value))
    monkeypatch.setattr(
        gate, "_THRESHOLD", re.compile(gate._THRESHOLD.pattern.replace("<metric>", "<metric>looping|"), re.DOTALL)
    )
    some = {"c": result(0.0, {"eagle3": 3.0}, looping=0.25)}
    kept, missed = run("looping=0.25,looping=0.2", results=some)
    assert (kept.passed, missed.passed) == (True, False)
    assert kept.message == "eagle3 at T=0: looping 0.25 keeps to the threshold 0.25 (c)."
    assert missed.message == "eagle3 at T=0: looping 0.25 is above the threshold 0.2 (c)."
    assert run("looping=0", results=some)[0].passed is False, "which a good drafter reaches"
    for text, said in (
        ("looping=1", "nothing could miss it, as looping is never above 1"),
        ("looping=-0.1", "nothing could reach it, as looping is never below 0"),
    ):
        with pytest.raises(UserError, match=said):
            parse_thresholds([text])


def test_the_worse_end_is_the_upper_one_where_less_is_better() -> None:
    fast = measures(3.0)
    assert Metric("tau").worse_end(fast) == 2.75
    assert Metric("tau", sign=-1).worse_end(fast) == 3.25


def test_the_manual_lists_what_can_have_a_threshold() -> None:
    text = (Path(__file__).parents[3] / "docs/read-a-report.md").read_text()
    listed = re.search(r"The metrics are (.*?)\. `--junit", text, re.DOTALL)
    assert listed is not None
    rows = [metric for metric in METRICS if metric.bounds]
    assert re.findall(r"`(\w+)`", listed[1]) == [row.name for row in rows]
    assert re.findall(r"`(\w+)`, which has no `.low`", listed[1]) == [row.name for row in rows if not row.has_ends]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cod.tau=2", "no slice cod for eagle3 in a; there are overall, chat, code.v2"),
        ("eagle3:code.v2.tau=2", r"no slice code\.v2 for eagle3 in c"),
        ("eagle:tau=2", "no drafter eagle; there are eagle3, medusa medusa_63"),
        ("tau@T0.5=2", "no temperature 0.5; there are 0, 1"),
    ],
)
def test_names_that_are_not_there_are_refused(text: str, said: str) -> None:
    bare = replace(RESULTS["b"], drafters={"eagle3": DrafterResult(measures(2.0), {"chat": measures(2.0)})})
    with pytest.raises(UserError, match=said):
        run(text, results={**RESULTS, "c": bare})
    with pytest.raises(UserError, match="no drafter"):
        run("tau=2", results={"e": replace(bare, drafters={})})


@pytest.mark.parametrize("metric", ["tau", "tau.low", "speedup", "speedup.low", "decode_tok_s.low"])
def test_what_was_not_measured_is_refused(metric: str) -> None:
    nulls = {"tau", "tau_interval", "speedup", "speedup_spread", "decode_tok_s", "decode_tok_s_spread"}
    simulated = result(0.0, {"eagle3": 3.0}, **dict.fromkeys(nulls))
    with pytest.raises(UserError, match=f"{metric} was not measured for eagle3 at T=0") as caught:
        run(f"{metric}=2", results={"s": simulated})
    assert ("use tau_simulated" in str(caught.value)) == metric.startswith("tau")
    assert run("tau_simulated=2", results={"s": simulated})[0].passed


@pytest.mark.parametrize("metric", ["tau.low", "tau_simulated.low"])
def test_a_number_without_an_interval_has_no_lower_end(metric: str) -> None:
    bare = result(0.0, {"eagle3": 3.0}, tau_interval=None, tau_simulated_interval=None, prompts=4)
    said = f"{metric} was not measured for eagle3 at T=0.*over 4 prompts there is no interval"
    with pytest.raises(UserError, match=said):
        run(f"{metric}=2", results={"s": bare})


@pytest.mark.parametrize("metric", ["speedup.low", "decode_tok_s.low"])
def test_a_spread_takes_ten_prompts_and_two_repeats(metric: str) -> None:
    """As on the page: of one repeat it is the number itself."""
    ends = {"speedup_spread": (1.8, 1.9), "decode_tok_s_spread": (18.0, 19.0), "speedup": 1.85, "decode_tok_s": 18.5}
    many, few = (result(0.0, {"eagle3": 3.0}, **ends, prompts=prompts) for prompts in (12, 9))
    once = replace(many, settings=replace(many.settings, repeats=1))
    assert run(f"{metric}=1", results={"s": many})[0].passed
    for found in (once, few):
        with pytest.raises(UserError, match=f"{metric} was not measured for eagle3 .*it takes two repeats and 10"):
            run(f"{metric}=1", results={"s": found})


def test_names_are_checked_before_work() -> None:
    def check(text: str, **changes: Any) -> None:
        known: dict[str, Any] = {"slices": {"code": 10}, "temperatures": [0.0, 1.0], "drafters": ["eagle3"]}
        check_names(parse_thresholds([text]), **{**known, **changes})

    check("eagle3:code.tau@T1=2")
    check("tau_simulated=2,code.acceptance_rate=0.4,tau_simulated.low=2", decode=False)
    check("tau.low=2", slices={"code": 4, "chat": 6}, repeats=1)
    check("speedup=2", repeats=1)
    for text, changes, said in (
        ("chat.tau=2", {}, "no slice chat; there are overall, code"),
        ("tau@T2=2", {}, "no temperature 2"),
        ("eagle:tau=2", {}, "no drafter eagle; there is eagle3"),
        ("tau=2", {"decode": False}, "use tau_simulated"),
        ("code.speedup.low=2", {"decode": False}, "needs decoding"),
        ("tau.low=2", {"slices": {"code": 4, "chat": 5}}, "9 prompts, and there is no interval over fewer than 10"),
        ("speedup.low=2", {"repeats": 1}, "evaluate.repeats is 1, and what is timed once has no interval"),
        ("code.tau_simulated.low=2", {"slices": {"code": 4, "chat": 6}}, "code has 4 prompts"),
    ):
        with pytest.raises(UserError, match=said):
            check(text, **changes)


def test_report_writes_first_and_then_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name / "result.json" for name in RESULTS]
    for path, invented in zip(paths, RESULTS.values(), strict=True):
        path.parent.mkdir()
        write_result(path, invented)
    out = tmp_path / "report"
    words = ["report", *map(str, paths), "--output", str(out)]
    assert main([*words, "--fail-under", "tau=2,code.v2.tau=3"]) == 0
    assert "gate: passed (checks: 8)" in capsys.readouterr().err
    (out / "report.html").unlink()
    assert main([*words, "--fail-under", "tau=2.25", "--fail-under=eagle3:code.v2.tau=4"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"draftsmith: medusa medusa_63, typical (lossy) at T=1: tau 2 is below the threshold 2.25 ({paths[1]}).",
        f"draftsmith: eagle3 at T=1: code.v2.tau 3.5 is below the threshold 4 ({paths[1]}).",
    ]
    assert (out / "report.html").exists()


@pytest.mark.parametrize(("threshold", "said"), [("tua=2", "no metric"), ("code.tau=2", "no slice code")])
def test_report_refuses_before_or_after_it_writes(
    threshold: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path / "result.json", RESULTS["a"])
    words = ["report", str(tmp_path / "result.json"), "--output", str(tmp_path / "report"), "--fail-under", threshold]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "report").exists() is (threshold == "code.tau=2"), "which depends on the results"


def test_a_report_of_servers_has_no_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its drafters are those of the evaluation beside them, whatever the servers reach."""
    write_result(tmp_path / "result.json", replace(RESULTS["a"], served=SERVED))
    words = ["report", str(tmp_path / "result.json"), "--output", str(tmp_path / "report"), "--fail-under", "tau=2"]
    assert main(words) == 2
    assert f"{tmp_path / 'result.json'} is of running servers, and its drafters are those" in capsys.readouterr().err


ODD = 'a "head" <of> Tom & Jerry\x00\x1b[31m\ud800\ufffe\n'


def test_a_case_per_threshold_drafter_and_setting_in_a_suite_per_result() -> None:
    checks = check_results(RESULTS, parse_thresholds(["tau=2.5,eagle3:code.v2.tau.low@T1=3.5"]))
    text = to_junit(checks)
    assert text.startswith("<?xml ")
    assert "time" not in text, "so that the same checks give the same text"
    root = ElementTree.fromstring(text)
    counts = ("name", "tests", "failures", "errors", "skipped")
    assert [root.tag, *(root.get(key) for key in counts)] == ["testsuites", "draftsmith", "5", "2", "0", "0"]
    suites = [[suite.get(key) for key in counts] for suite in root]
    assert suites == [["a", "2", "0", "0", "0"], ["b", "3", "2", "0", "0"]]
    assert [len(suite.findall("testcase")) for suite in root] == [2, 3]
    assert [(case.get("classname"), case.get("name"), len(case)) for case in root[1]] == [
        ("eagle3", "tau@T1", 0),
        (LOSSY, "tau@T1", 1),
        ("eagle3", "code.v2.tau.low@T1", 1),
    ]
    (failure,) = root[1][2]
    said = "eagle3 at T=1: code.v2.tau.low 3.25 is below the threshold 3.5 (b)."
    assert (failure.get("type"), failure.get("message"), failure.text) == ("threshold", said, said)


def test_names_are_escaped_and_what_xml_cannot_hold_is_left_out() -> None:
    odd = result(0.0, {ODD: 3.0})
    drafter = odd.drafters[ODD]
    odd = replace(odd, drafters={ODD: replace(drafter, slices={"\x07<b>&": drafter.overall})})
    checks = check_results({"\x1f'r'.json": odd}, parse_thresholds(["tau=2,\x07<b>&.tau=4"]))
    text = to_junit(checks)
    text.encode("utf-8")
    (suite,) = ElementTree.fromstring(text)
    assert suite.get("name") == "'r'.json"
    assert {case.get("classname") for case in suite} == {'a "head" <of> Tom & Jerry[31m\n'}
    assert [case.get("name") for case in suite] == ["tau@T0", "<b>&.tau@T0"]
    assert "is below the threshold 4" in (suite[1][0].text or "")
