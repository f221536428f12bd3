"""One rule for every file that an option names: what draftsmith wrote is replaced, what others wrote is named and stays."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import TABLE_MARK
from draftsmith.storage import check_file

pytestmark = pytest.mark.full
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
RUN = RESULTS / "plan"

COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "out/report.html": lambda run, out: ["report", str(run / "t0" / "result.json"), "--output", str(out)],
    "out/report.md": lambda run, out: ["report", str(run / "t0" / "result.json"), "--output", str(out)],
    "out/plan.json": lambda run, out: ["report", str(run / "t0" / "result.json"), "--output", str(out)],
    "out/routing.json": lambda run, out: ["report", str(run / "t0" / "result.json"), "--output", str(out)],
    "out/c.md": lambda run, out: ["compare", *[str(run / "t0" / "result.json")] * 2, "--output", str(out / "c.md")],
    "out/c.json": lambda run, out: ["compare", *[str(run / "t0" / "result.json")] * 2, "--output", str(out / "c.json")],
    "out/gate.xml": lambda run, out: [
        *("report", str(run / "t0" / "result.json"), "--output", str(out), "--fail-under", "tau_simulated=1.01"),
        *("--junit", str(out / "gate.xml")),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_others_wrote_is_named_and_stays(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "evaluation", tmp_path / "out"
    shutil.copytree(RUN, run)
    out.mkdir()
    words = COMMANDS[name](run, out)
    for _ in range(2):  # what we wrote ourselves is replaced
        assert main(words) in (0, 3)
        assert (tmp_path / name).read_text()
    for text in ("mine", '{"verdict": "draftsmith"}', "# draftsmith and I\n"):
        (tmp_path / name).write_text(text)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(words) == 2
        assert f"would replace {tmp_path / name}, which draftsmith did not write" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (tmp_path / name).write_text("")  # as mktemp makes it
    assert main(words) in (0, 3)


def test_settings_of_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUN, tmp_path / "evaluation")
    mine = tmp_path / "out" / "settings" / "vllm" / "start.sh"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main(COMMANDS["out/plan.json"](tmp_path / "evaluation", tmp_path / "out")) == 2
    assert "no plan of draftsmith is beside" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_tables_of_costs_are_known() -> None:
    tables = list(RESULTS.rglob("costs.json"))
    assert tables
    for table in tables:
        check_file("--output", table, (".json",), TABLE_MARK)
    for result in RESULTS.rglob("result.json"):
        with pytest.raises(UserError, match=re.escape(str(result))):
            check_file("--output", result, (".json",), TABLE_MARK)
