"""`draftsmith report`: a page that has no plan leaves none of an earlier one beside it, and one verdict rests on one evaluation."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.eval.clocks.costs import measure_table
from draftsmith.eval.planner.decision import remove_decision
from draftsmith.eval.results.result import read_result
from draftsmith.stages.planning import plan_stage
from tests.workplace import make_workplace, options, save_untrained

RUN = Path(__file__).resolve().parents[2] / "docs" / "results" / "plan"
PLAN = {"plan.json", "routing.json", "settings"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an evaluation with its plan."""
    shutil.copytree(RUN, tmp_path / "run" / "evaluation")
    return tmp_path / "run" / "evaluation"


def named(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_without_costs_the_plan_of_an_earlier_report_goes(run: Path, tmp_path: Path) -> None:
    command = ["report", *(str(run / name / "result.json") for name in ("t0", "t1")), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert named(tmp_path / "out") >= PLAN
    (tmp_path / "out" / "settings" / "vllm" / "notes.txt").write_text("mine")
    (run / "costs.json").unlink()
    assert main(command) == 0
    assert "No plan was made" in (tmp_path / "out" / "report.md").read_text()
    assert named(tmp_path / "out") & PLAN == {"settings"}
    left = [path for path in (tmp_path / "out" / "settings").rglob("*") if path.is_file()]
    assert [path.read_text() for path in left] == ["mine"], "what no plan left stays"
    shutil.copy(RUN / "costs.json", run)
    assert main(command) == 0
    assert named(tmp_path / "out") >= PLAN, "and keeps no later plan away"


def test_plans_of_others_stay(run: Path) -> None:
    results = [read_result(run / "t0" / "result.json")]
    for name in ("plan.json", "routing.json"):
        kept = (run / name).read_text()
        (run / name).write_text('{"verdict": "mine"}')
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert plan_stage(results, None, run) is None
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        (run / name).write_text(kept)
    (run / "plan.json").unlink()
    remove_decision(run)
    assert (run / "settings" / "vllm" / "start.sh").is_file(), "no plan says whose they are"


def test_costs_of_no_draft_leave_no_plan(run: Path) -> None:
    value = json.loads((run / "costs.json").read_text())
    for point in value["points"]:
        for kind in ("draft_ms", "admit_ms"):
            point[kind] = {}
    (run / "costs.json").write_text(json.dumps(value))
    assert plan_stage([read_result(run / "t0" / "result.json")], run / "costs.json", run) is None
    assert not named(run) & PLAN


def test_one_verdict_rests_on_one_evaluation(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "t1" / "result.json"
    value = json.loads(path.read_text())
    value["recipe"]["output_dir"] = "runs/other"
    path.write_text(json.dumps(value))
    words = ["report", str(run / "t0" / "result.json"), str(path), "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert (
        "their runs are runs/eagle3-tiny and runs/other: plan for one evaluation at a time" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_empty_plan_batches_make_no_plan_of_an_earlier_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs stay, for the evaluation that plans again."""
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", partial(measure_table, seconds=0.0))
    place = make_workplace(tmp_path)
    own = ["--evaluate.plan_contexts", "[12]", "--evaluate.temperatures", "[0.0]", "--evaluate.max_new_tokens", "8"]
    words = [*options(place, place / "run"), "--head", str(save_untrained(place)), *own]
    folder = place / "run" / "evaluation"
    for batches, planned in (("[1]", True), ("[]", False), ("[1]", True)):
        command = [*words, "--evaluate.plan_batches", batches]
        assert main(["evaluate", *command]) == 0
        assert (folder / "costs.json").is_file()
        assert ("plan.json" in named(folder)) is planned
        assert ("No plan was made" not in (folder / "report.md").read_text()) is planned
    head = command.index("--head")
    assert main(["report", *command[:head], *command[head + 2 :], "--evaluate.plan_batches", "[]"]) == 0
    assert not named(folder) & PLAN
