"""Dashboards and metrics.jsonl after a kill, a failure and a new start."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.errors import StoppedError, UserError
from draftsmith.recipe.schema import TrackingSpec
from draftsmith.train.dashboards import Tracker, read_kept
from draftsmith.train.trackers import TensorBoard, flatten


def test_resume_cuts_lines_after_the_checkpoint_and_half_lines(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, TrackingSpec(), "x", {}, 0)
    for step in (1, 2, 3):
        tracker.log({"step": step, "loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    resumed = Tracker(tmp_path, TrackingSpec(), "x", {}, 2)
    resumed.log({"step": 3, "loss": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] == 0.5


def test_a_resumed_run_foretells_what_one_that_was_never_cut_does(tmp_path: Path) -> None:
    for name, cut in (("whole", None), ("cut", 20)):
        (tmp_path / name).mkdir()
        tracker = Tracker(tmp_path / name, TrackingSpec(), "x", {}, 0)
        for step, tau in ((10, 1.4), (20, 1.7), (30, 1.9), (40, 2.0)):
            record = {"step": step, "tokens": 100 * step, "tau": {"overall": tau, "slices": {}}}
            found = tracker.foresee(record, 40, 5)
            assert (found is None) is (step in (10, 40)), (
                "one evaluation is too few, and at the end there is nothing to foretell"
            )
            assert ("forecast" in record) is (found is not None)
            tracker.log(record)
            if step == cut:
                tracker = Tracker(tmp_path / name, TrackingSpec(), "x", {}, cut)
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_a_run_that_starts_again_begins_the_file_anew(tmp_path: Path) -> None:
    for _ in range(2):
        Tracker(tmp_path, TrackingSpec(), "x", {}, 0).log({"step": 0, "tau": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "tau": 2.0}\n'


ONLINE = TrackingSpec(wandb="online")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What W&B is given: the ids of runs, steps with their losses, exit codes. fails: the step whose figures it does not take."""
    told = SimpleNamespace(ids=[], logged=[], codes=[], fails=None)

    def log(values: dict[str, float], step: int) -> None:
        told.logged.append((step, values.get("train/loss")))
        if step == told.fails:
            raise ConnectionError("the network is down")

    run = SimpleNamespace(
        log=log, finish=lambda exit_code: told.codes.append(exit_code), define_metric=lambda *_, **__: None
    )
    monkeypatch.setattr("wandb.init", lambda **options: told.ids.append(options["id"]) or run)
    return told


def test_a_run_that_starts_again_is_a_dashboard_of_its_own(tmp_path: Path, wandb: SimpleNamespace) -> None:
    for step in (0, 5, 0):
        with Tracker(tmp_path, ONLINE, "x", {}, step):
            pass
    assert wandb.ids[0] == wandb.ids[1] != wandb.ids[2]


def test_a_dashboard_that_fails_on_the_way_ends_no_training(
    tmp_path: Path, wandb: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.fails = 2
    with Tracker(tmp_path, ONLINE, "x", {}, 0) as tracker:
        for step in (1, 2, 3):
            tracker.log({"step": step})
    assert tracker.failed, "so that an evaluation's figures are given again"
    assert [step for step, _ in wandb.logged] == [1, 2]
    assert "Weights & Biases failed and gets no more figures (the network is down)" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_a_dashboard_that_does_not_start_is_said_and_the_others_end(
    tmp_path: Path, wandb: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoard, "start", lambda board: (_ for _ in ()).throw(OSError("no\nroom")))
    with pytest.raises(UserError, match=r"TensorBoard did not start \(no room\): leave tensorboard out"):
        Tracker(tmp_path, TrackingSpec(wandb="online", backends=["tensorboard"]), "x", {}, 0)
    assert wandb.codes == [1]


def test_a_dashboard_that_is_added_later_gets_the_steps_so_far(tmp_path: Path, wandb: SimpleNamespace) -> None:
    for spec, steps in ((TrackingSpec(), (1, 2, 3, 4)), (ONLINE, (3, 4, 5))):
        with Tracker(tmp_path, spec, "x", {}, steps[0] - 1) as tracker:
            for step in steps:
                tracker.log({"step": step, "loss": 1.0 / step})
    assert wandb.logged == [(step, 1.0 / step) for step in (1, 2, 3, 4, 5)]


def test_damage_to_what_dashboards_are_given_again_is_named(tmp_path: Path) -> None:
    path = tmp_path / "dashboards.jsonl"
    path.write_text('{"clocks": {"1": {"speed": 1.0}}}\n{"clocks": {"1": {"speed": 2.0}}}\n{"clocks": {"2')
    assert read_kept(path) == {"clocks": {"1": {"speed": 2.0}}}
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"dashboards.jsonl, line 1 holds nothing for a dashboard: remove the file"):
        read_kept(path)


def test_flatten_leaves_out_what_is_missing() -> None:
    assert flatten({"a": None, "b": {"c": [1, None]}}) == {"b/c/0": 1}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("The loss became nan"), 2),
        (StoppedError("interrupted"), 130),
        (StoppedError("preempted", 143), 143),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a bug"), 1),
    ],
)
def test_a_run_that_did_not_finish_ends_as_such_on_wandb(
    error: BaseException, code: int, tmp_path: Path, wandb: SimpleNamespace
) -> None:
    with pytest.raises(type(error)), Tracker(tmp_path, ONLINE, "x", {}, 0):
        raise error
    assert wandb.codes == [code]
