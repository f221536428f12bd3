"""What lets CI fail, through the command line: --fail-under of an evaluation, --junit beside it, and compare."""

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftsmith.cli.main import main
from draftsmith.eval.results.result import Result, read_result, write_result
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.eagle1 import head as eagle1
from draftsmith.heads.export.export import export_head
from draftsmith.target.target import load_target
from tests.eval.gate.test_compare import decoded, scaled
from tests.exports import sign_again
from tests.workplace import fails, make_workplace, options, save_untrained

GATE = ["--fail-under", "tau=2", "--junit"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an old result and a new one whose tau is lower, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    write(Path("old.json"), decoded())
    write(Path("new.json"), scaled(decoded(), 0.8))
    return tmp_path


def write(path: Path, result: Result) -> None:
    write_result(path, result)


def fails_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one sentence and write nothing; return it."""
    before = {path: path.lstat().st_mtime_ns for path in Path().rglob("*")}
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert {path: path.lstat().st_mtime_ns for path in Path().rglob("*")} == before
    return line


def test_junit_is_written_where_the_gate_is_passed_and_where_it_is_missed(files: Path) -> None:
    report = ["report", "old.json", "new.json", "--output", "report", "--junit", "checks.xml"]
    for threshold, missed in (("tau=1.5", 0), ("tau=2.9", 1), ("tau=9", 2)):
        assert main([*report, "--fail-under", threshold]) == (3 if missed else 0)
        root = ElementTree.parse("checks.xml").getroot()
        assert (root.get("tests"), root.get("failures")) == ("2", str(missed))
        assert [suite.get("name") for suite in root] == ["new.json", "old.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--junit", "checks.xml"], "--junit checks.xml holds the checks of --fail-under"),
        ([*GATE, "checks"], "--junit is checks, which has another ending: name a file that ends in .xml"),
        ([*GATE, "folder.xml"], "--junit is folder.xml, which is a folder or no plain file"),
        ([*GATE, "pipe.xml"], "--junit is pipe.xml, which is a folder or no plain file"),
        ([*GATE, "none/checks.xml"], "There is no folder none for --junit none/checks.xml"),
        ([*GATE, "old.json/checks.xml"], "There is no folder old.json for --junit"),
        ([*GATE, "x" * 300 + ".xml"], "its name is too long"),
        ([*GATE, "a\0b.xml"], "NUL character"),
        (GATE, "--junit needs a value"),
    ],
)
def test_a_file_for_junit_is_refused_before_any_work(
    words: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "folder.xml").mkdir()
    os.mkfifo(files / "pipe.xml")
    for command in (["report", "old.json", "--output", "report"], ["evaluate", "--target.path", "nowhere"], ["run"]):
        assert said in fails_at_once([*command, *words], capsys)


def test_compare_prints_keeps_and_judges(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "old.json", "new.json", "--output", "changes.md"]) == 0
    said = capsys.readouterr()
    assert "worse" in said.out
    assert said.out.splitlines()[-1] == "changes.md"
    assert said.err == ""
    assert "| overall | tau |" in (files / "changes.md").read_text()
    assert main(["compare", "old.json", "new.json", "--fail-if-worse", "--output=changes.json"]) == 3
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("draftsmith: eagle3: tau 2.4 is worse than 3 beyond noise (")
    kept = json.loads((files / "changes.json").read_text())
    assert (kept["old"], kept["new"]) == ("old.json", "new.json")
    assert kept["drafters"][0]["differences"][0]["verdict"] == "worse"
    assert main(["compare", "new.json", "old.json", "--fail-if-worse"]) == 0
    assert capsys.readouterr().err == ""


def write_run(name: str, results: dict[str, float], below: str = "evaluation", tau: float = 3.0) -> None:
    """Write the results of a run, a folder for each temperature."""
    for folder, temperature in results.items():
        (Path(name) / below / folder).mkdir(parents=True)
        settings = replace(decoded().settings, temperature=temperature)
        write(Path(name) / below / folder / "result.json", replace(decoded(tau), settings=settings))


def test_a_run_whose_simulation_is_newer_than_its_evaluation_is_asked_which(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, day in (("evaluation", 2), ("simulation", 1)):
        write_run("a", {"t0": 0.0}, kind)
        path = Path("a", kind, "t0", "result.json")
        write(path, replace(read_result(path), date=f"2026-11-0{day}"))
    assert main(["compare", "a", "a"]) == 0
    assert str(Path("a", "evaluation", "t0")) in capsys.readouterr().out
    write(path, replace(read_result(path), date="2026-11-03"))
    said = "a holds a simulation of 2026-11-03 and an evaluation of 2026-11-02: name the folder"
    assert said in fails_at_once(["compare", "old.json", "a"], capsys)


@pytest.mark.parametrize(
    ("old", "new", "compared"),
    [
        ("a", "b", [0.0, 1.0]),
        ("a/evaluation", "b", [0.0, 1.0]),
        ("a/evaluation/t1", "b", [1.0]),
        ("a/evaluation/t0/result.json", "b/evaluation/t0", [0.0]),
        ("simulated", "b", [0.0]),
    ],
)
def test_compare_takes_the_folders_of_runs(
    old: str, new: str, compared: list[float], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("a", {"t0": 0.0, "t0.7": 0.7, "t1": 1.0})
    write_run("b", {"t0": 0.0, "t1": 1.0}, tau=2.0)
    write_run("simulated", {"t0": 0.0}, "simulation")
    assert main(["compare", old, new, "--fail-if-worse", "--output", "c.json"]) == 3
    told = capsys.readouterr()
    assert ("in a alone: temperature 0.7" in told.out) == (old == "a")
    kept = json.loads(Path("c.json").read_text())
    kept = kept if isinstance(kept, list) else [kept]
    for one, temperature in zip(kept, compared, strict=True):
        assert one["sides"][0] == f"temperature {temperature:g}"
        for side, place in (("old", old), ("new", new)):
            assert one[side].startswith(place)
            assert one[side].endswith(f"t{temperature:g}/result.json")
            assert f"{side}  {one[side]} (temperature {temperature:g})" in told.out
    assert main(["compare", old, new, "--output", "c.json"]) == 0, "its own file is replaced"
    assert main(["compare", old, new, "--output", "c.md"]) == 0
    assert Path("c.md").read_text().count("# Comparison\n") == len(compared)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "compare takes two files or folders, OLD NEW, but 0 files are named"),
        (["old.json"], "but 1 files are named"),
        (["old.json", "new.json", "--fail-under", "tau=2"], "there is no option --fail-under"),
        (["old.json", "none.json"], "none.json"),
        (
            ["old.json", "empty"],
            "There is no result.json in empty: name a result.json, an evaluation's folder, or the directory",
        ),
        (["hot.json", "run"], "hold results of no temperature in common (1 and 0, 0.7)"),
        (["old.json", "twice"], "twice holds several results of one temperature"),
        (["old.json", "run", "--output", "run/evaluation/t0/result.json"], "is one of the results"),
        (["old.json", "new.json", "--output", "changes.txt"], "name a file that ends in .md or .json"),
        (["old.json", "new.json", "--output", "old.json"], "--output old.json is one of the results"),
        (["old.json", "new.json", "--output", "./new.json"], "--output new.json is one of the results"),
        (["old.json", "new.json", "--output", "none/changes.md"], "There is no folder none for --output"),
        (["few.json", "few.json", "--fail-if-worse"], "has no interval in both"),
        (["old.json", "new.json", "--fail-if-worse=1"], "--fail-if-worse is a switch"),
    ],
)
def test_compare_refuses_in_one_sentence(
    words: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("hot.json"), replace(decoded(), settings=replace(decoded().settings, temperature=1.0)))
    write(Path("few.json"), decoded(prompts=4))
    (files / "empty").mkdir()
    write_run("run", {"t0": 0.0, "t0.7": 0.7})
    write_run("twice", {"t0": 0.0, "again": 0.0}, "")
    assert said in fails_at_once(["compare", *words], capsys)


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that evaluate an untrained head on two slices of five prompts."""
    folder = make_workplace(tmp_path_factory.mktemp("gating"), prompts=10)
    fewer = {
        "temperatures": "[0.0]",
        "max_new_tokens": "8",
        "repeats": "1",
        "num_speculative_tokens": "1",
        "max_k": "1",
    }
    fewer |= {"generate": "false"}
    own = [word for key, value in fewer.items() for word in (f"--evaluate.{key}", value)]
    return ["evaluate", "--head", str(save_untrained(folder)), *own, *options(folder, folder / "run")]


@pytest.mark.full
def test_refused_before_anything_is_decoded(evaluate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = fails([*evaluate, "--fail-under", "chat.tau.low=2"], capsys)
    assert "chat has 5 prompts, and there is no interval over fewer than 10" in said
    assert not list(Path(evaluate[-1]).rglob("result.json"))


@pytest.mark.full
def test_a_published_head_of_another_method_than_the_recipes(
    evaluate: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those of the head that is given; what the recipe exports and trains does not concern it."""
    head, target = tmp_path / "eagle1", load_target(str(Path(evaluate[-1]).parent / "target"))
    export_head(eagle1.build(Eagle1Options(), target, None), target, head)
    given = [*evaluate, "--head", str(head), "--output_dir", str(tmp_path / "run")]
    given += ["--export.layout", "eagle3_llama_cpp"]
    given += ["--head.draft_vocab_size", "999999", "--evaluate.beside.ours", evaluate[evaluate.index("--head") + 1]]
    assert main([*given, "--no-decode", "--fail-under", "eagle3:tau_simulated=7.5"]) == 2
    assert "no drafter eagle3; there are eagle1, ours" in capsys.readouterr().err
    assert main([*given, "--no-decode", "--fail-under", "eagle1:code.tau_simulated=7.5"]) == 3
    result = read_result(tmp_path / "run" / "simulation" / "t0" / "result.json")
    assert set(result.drafters) == {"eagle1", "ours"}
    assert main([*given, "--no-decode"]) == 0
    assert "simulate: reusing" in capsys.readouterr().err
    (head / "config.json").write_text(
        (head / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1')
    )
    sign_again(head)
    assert main([*given, "--no-decode"]) == 2
    assert "(the head changed)" in capsys.readouterr().err


@pytest.mark.full
def test_decoded_and_simulated_results_are_written_before_the_gate(
    evaluate: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(evaluate[-1])
    drafts = ["--evaluate.drafts", "[{tree: chain}, {tree: dynamic, depth: 2, branching: 2, total_tokens: 4}]"]
    lines = "eagle3 dynamic 2x2, 4 tokens"
    assert main([*evaluate, *drafts, "--no-decode", "--fail-under", f"{lines}:tau_simulated=1.5"]) == 2
    assert f"{lines} cannot be simulated, so --no-decode leaves it out" in capsys.readouterr().err
    gates = ["--fail-under", "tau=7.5,code.tau=7.5", "--fail-under", "eagle3:chat.tau_simulated=7.5"]
    assert main([*evaluate, *gates]) == 3
    missed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    overall = read_result(run / "evaluation" / "t0" / "result.json").drafters["eagle3"].overall
    assert overall.tau is not None
    assert missed[0].startswith(f"draftsmith: eagle3 at T=0: tau {overall.tau:.4g} is below the threshold 7.5 (")
    assert [line.split(": ")[2].split(" ")[0] for line in missed] == ["tau", "code.tau", "chat.tau_simulated"]
    assert (run / "evaluation" / "report.html").exists()
    assert main([*evaluate, "--fail-under", "speedup=0.001"]) == 0
    assert "gate: passed (checks: 1)" in capsys.readouterr().err
    checks, gates = run.parent / "checks.xml", "code.tau_simulated=7.5,tau_simulated.low=1.000001"
    assert main([*evaluate, "--no-decode", "--fail-under", gates, "--junit", str(checks)]) == 3
    result = read_result(run / "simulation" / "t0" / "result.json")
    simulated = result.drafters["eagle3"]
    assert simulated.overall.tau_simulated_interval is not None
    low, high = simulated.overall.tau_simulated_interval
    assert low <= simulated.overall.tau_simulated <= high
    assert simulated.slices["code"].tau_simulated_interval is None, "five prompts"
    decoded = read_result(run / "evaluation" / "t0" / "result.json")
    assert result.settings.prompts == decoded.settings.prompts, "the same prompts"
    cases = ElementTree.parse(checks).getroot().findall("testsuite/testcase")
    named = [("code.tau_simulated@T0", 1), ("tau_simulated.low@T0", low < 1.000001)]
    assert [(case.get("name"), len(case)) for case in cases] == named
