"""Two processes give the trajectory of one with twice the accumulation, for every method."""

from pathlib import Path

import pytest

from draftsmith.heads.registry import methods
from tests.train.runs import ROOT, TinyRun, launch_two, make_run

pytestmark = pytest.mark.slow

IN_ONE_PAIR = sorted(set(methods()) - {"eagle3"})


def check(run: TinyRun, said: str) -> None:
    progress = [run.progress(name) for name in ("one", "two")]
    assert [p["window"] for p in progress] == [2, 2], said
    assert [p["layout"] for p in progress] == ["plain", "plain"]
    run.check_same("two")


def test_the_real_command_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, "eagle3")
    run.copy("two")
    script = [f"train/{methods()['eagle3'].launcher}", "--train.checkpoint_minutes", "0.001"]
    check(run, run.launch("two", script, {"ACCELERATE_USE_CPU": "true"}))


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, TinyRun], str]:
    """A run of every other method, each trained by one process, and all of them by one pair."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {method: make_run(folder / method, method) for method in IN_ONE_PAIR}
    for run in runs.values():
        run.copy("two")
    script = [str(ROOT / "tests" / "train" / "several.py"), str(folder), *IN_ONE_PAIR]
    return runs, launch_two(script, {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("method", IN_ONE_PAIR)
def test_two_processes_are_one_with_twice_the_accumulation(
    method: str, trained: tuple[dict[str, TinyRun], str]
) -> None:
    runs, said = trained
    check(runs[method], said)
