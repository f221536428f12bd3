"""How a head came to be, read from run directories: of this version, of earlier ones, half-written and damaged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.training.forecast import Forecast, Point, forecast
from draftsmith.eval.training.history import History, read_history, tell, trained_length, untaught
from draftsmith.heads.vocab import Coverage
from tests.eval.training.curves import CURVES

COVERAGE = {"training": 1.0, "heldout": 0.91, "heldout_by_slice": {"chat": 0.91}}
TAUS = (1.2, 1.6, 1.9, 2.1, 2.05, 2.2)


def line(step: int, tau: float, **more: Any) -> dict[str, Any]:
    figures = {"heldout_accuracy": [0.4, 0.3], "heldout_chance": 0.1, "tau": {"overall": tau, "slices": {"chat": tau}}}
    return {"step": step, "tokens": 100 * step, "epoch": step / 30, "loss": 1.0, **figures, **more}


def make_run(folder: Path, *, done: bool = True) -> Path:
    """Write what a training leaves, a step without an evaluation between two with one."""
    steps = [{"step": 5, "tokens": 500, "epoch": 0.1, "loss": 2.0}]
    steps += [line(10 * i, tau) for i, tau in enumerate(TAUS, 1)]
    if not done:
        promised = {"tokens": 6000, "tau": 2.5, "low": 2.2, "high": 2.8}
        steps = [*steps[:3], line(30, 1.9, forecast=promised)]
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    facts: dict[str, Any] = {}
    if done:
        (folder / "train" / "summary.json").write_text(json.dumps({"step": 60, "tokens": 6000, "rows": 2500}))
        facts = {"answers": 40, "heldout_answers": 8, "coverage": COVERAGE}
    stage = {"inputs": {"num_speculative_tokens": 5, "method": "eagle3"}, "facts": facts, "state": "done"}
    (folder / "run.json").write_text(json.dumps({"train": stage}))
    return folder


def read(folder: Path) -> History:
    found = read_history(folder)
    assert found is not None
    return found


def test_a_finished_run(tmp_path: Path) -> None:
    past = read(make_run(tmp_path / "run"))
    points = tuple(Point(10 * i, 1000 * i, tau) for i, tau in enumerate(TAUS, 1))
    assert past == History(
        method="eagle3",
        answers=40,
        heldout_answers=8,
        supervised_tokens=2500,
        epochs=2.0,
        points=points,
        accuracy=0.4,
        chance=0.1,
        num_speculative_tokens=5,
        coverage=Coverage(1.0, 0.91, {"chat": 0.91}),
        finished=True,
        forecast=None,
    )
    assert (past.best, past.tokens, past.learned_nothing) == (points[-1], 6000, False)
    told = "\n".join(tell(past))
    for words in (
        "40 answers, 2,500 supervised tokens, 2 epochs",
        "tau 1.20 at step 10, 2.20 at step 60",
        "91.0%",
        "twice",
    ):
        assert words in told


def test_a_longer_training_is_foretold_from_where_the_rate_had_not_fallen(tmp_path: Path) -> None:
    past = read(make_run(tmp_path / "run"))
    first_half = forecast(past.points[:3], 12_000, 5)
    assert first_half is not None
    assert past.twice == replace(first_half, low=max(first_half.low, 2.2), tau=max(first_half.tau, 2.2))
    assert past.at(6000) == forecast(past.points, 6000, 5)
    sunk = replace(past, points=tuple(Point(p.step, p.tokens, 4 - p.tau) for p in past.points))
    assert sunk.twice is not None
    assert sunk.twice.low >= sunk.best.tau, "more data do not make a worse head"
    assert replace(past, points=past.points[:3]).twice is None, "one evaluation in its first half"
    assert replace(past, num_speculative_tokens=None).twice is None


def test_trainings_with_more_data_end_in_the_interval_or_above_it() -> None:
    """The embedded target's, whose pilots take a dozen steps to a hundred: half of the forecasts for twice to five times the data
    hold, and whatever misses them is better than they say."""
    runs = json.loads((CURVES / "embedded.json").read_text())["runs"]
    above = within = 0
    for pilot, whole in (
        (a, b) for a in runs for b in runs if (a["drafter"], a["rates"]) == (b["drafter"], b["rates"])
    ):
        if 1.9 < whole["answers"] / pilot["answers"] < 6:
            points = tuple(Point(x["step"], x["tokens"], x["heldout_tau"]) for x in pilot["evaluations"])
            past = History(None, None, None, None, None, points, None, None, pilot["k"], None, True, None)
            found = past.at(whole["evaluations"][-1]["tokens"])
            assert found is not None
            tau = whole["evaluations"][-1]["heldout_tau"]
            assert tau >= found.low
            within, above = within + (tau <= found.high), above + (tau > found.high)
    assert within + above >= 10
    assert within >= 0.5 * (within + above)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    past = read(make_run(tmp_path / "run", done=False))
    assert not past.finished
    assert past.forecast == Forecast(6000, 2.5, 2.2, 2.8)
    assert (past.answers, past.supervised_tokens, past.coverage) == (None, None, None)
    assert past.at(6000) == forecast(past.points, 6000, 5)
    longer = forecast(past.points, 12_000, 5)  # its three evaluations are in its first half
    assert longer is not None
    assert past.at(12_000) == replace(longer, tau=max(longer.tau, 1.9), low=max(longer.low, 1.9))
    assert not any("twice" in line for line in tell(past))


def test_what_earlier_versions_and_kills_left(tmp_path: Path) -> None:
    """Early runs have another run.json, in the folder of their metrics; a line that a kill cut short is left out."""
    past = read(CURVES.parent / "earlier_run")
    assert (past.answers, past.coverage, past.chance, past.supervised_tokens) == (None, None, None, 3632868)
    assert past.best == past.points[-1]
    run = make_run(tmp_path / "run")
    with (run / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "tau": {"over')
    assert len(read(run).points) == len(TAUS)
    (run / "run.json").unlink()
    (run / "train" / "summary.json").unlink()
    assert read(run).num_speculative_tokens is None
    assert tell(read(run)) == ["learned from 2 epochs: held-out tau 1.20 at step 10, 2.20 at step 60"]
    assert read_history(tmp_path / "nothing") is None
    (run / "train" / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "loss": 1.0}\n')
    assert read_history(run) is None


@pytest.mark.parametrize(
    ("tau", "accuracy", "chance", "nothing"),
    [(1.02, 0.11, 0.1, True), (1.02, 0.3, 0.1, False), (1.02, None, None, True), (1.2, 0.1, 0.1, False)],
)
def test_a_head_that_learned_nothing(
    tau: float, accuracy: float | None, chance: float | None, nothing: bool, tmp_path: Path
) -> None:
    past = read(make_run(tmp_path / "run"))
    past = replace(past, points=(Point(10, 1000, 1.0), Point(20, 2000, tau)), accuracy=accuracy, chance=chance)
    assert past.learned_nothing is nothing
    told = tell(past)
    assert (told[-1] == f"warning: {untaught(past)}") is nothing
    if nothing:
        assert "1.02" in told[-1]
        assert ("guessing" in told[-1]) is (chance is not None)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("train/metrics.jsonl", '{"step": 1, "tau"\n', "line 1"),
        ("train/metrics.jsonl", '["tau"]\n', "line 1 is no step of a training"),
        ("train/metrics.jsonl", '{"step": 1, "tokens": 5, "tau": {"overall": "high"}}\n', "'tau' must be a number"),
        ("train/metrics.jsonl", '{"step": 1, "tau": {"overall": 2.0}}\n', "'tokens' must be an integer"),
        ("train/summary.json", "[]", "summary.json is damaged"),
        ("run.json", '{"train": []}', "run.json is no record of a run"),
        (
            "run.json",
            '{"train": {"inputs": {}, "facts": {"coverage": {"training": 2}}}}',
            "coverage: the key 'heldout'",
        ),
    ],
)
def test_damaged_files_are_named(file: str, text: str, said: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / file).write_text(text)
    with pytest.raises(UserError) as caught:
        read_history(run)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_text_is_that_of_the_run_a_head_lies_in(tmp_path: Path) -> None:
    best = tmp_path / "run" / "train" / "best"
    best.mkdir(parents=True)
    assert trained_length(best) is None
    record = {"train": {"inputs": {}, "facts": {"longest": 77}}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert trained_length(best) == 77
    assert trained_length(tmp_path / "run" / "export" / "eagle3") == 77
    assert trained_length(tmp_path / "elsewhere") is None
    (tmp_path / "run" / "run.json").write_text(json.dumps({"train": {"inputs": {}, "facts": {}}}))
    assert trained_length(best) is None, "an earlier version"
