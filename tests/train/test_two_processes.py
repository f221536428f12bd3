"""Two processes give the trajectory of one with twice the accumulation, through the real command line."""

from pathlib import Path

import pytest

from draftsmith.heads.registry import method_names, methods
from tests.train.runs import make_run


@pytest.mark.parametrize("method", sorted(method_names()))
def test_two_processes_are_one_with_twice_the_accumulation(method: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, method)
    run.copy("two")
    # Checkpoints all the time: the processes must agree on when.
    script = [f"train/{methods()[method].launcher}", "--train.checkpoint_minutes", "0.001"]
    said = run.launch("two", script, {"ACCELERATE_USE_CPU": "true"})
    progress = [run.progress(name) for name in ("one", "two")]
    assert [p["window"] for p in progress] == [2, 2], said
    assert [p["layout"] for p in progress] == ["plain", "plain"]
    run.check_same("two")
