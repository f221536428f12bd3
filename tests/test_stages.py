"""What stages decide by themselves: the held-out split, and what a run directory remembers."""

from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.run import FOLLOWERS, STAGES, RunDirectory
from draftsmith.stages import split_heldout


def test_split_is_stable_and_keeps_turns_together() -> None:
    ids = [f"c{i}#{turn}" for i in range(30) for turn in (1, 2, 3)]
    train, heldout = split_heldout(ids, 20)
    assert sorted(train + heldout) == list(range(90))
    assert 20 <= len(heldout) <= 22
    assert not {ids[i].split("#")[0] for i in train} & {ids[i].split("#")[0] for i in heldout}
    assert split_heldout(ids, 20) == (train, heldout)
    with pytest.raises(UserError, match=r"data\.heldout is 90"):
        split_heldout(ids, 90)


def test_a_stage_is_reused_refused_or_begun(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert not run.begin("answers", {"answers": {"temperature": 1.0}})
    (tmp_path / "answers.jsonl").write_text("{}\n")
    run.finish("answers", {"answers": 1})
    assert run.begin("answers", {"answers": {"temperature": 1.0}})
    with pytest.raises(UserError, match=r"answers\.temperature was 1\.0, is 0\.5"):
        run.begin("answers", {"answers": {"temperature": 0.5}})
    (tmp_path / "answers.jsonl").unlink()
    assert not run.begin("answers", {"answers": {"temperature": 1.0}}), "lost files are made again"
    assert not run.begin("answers", {"answers": {"temperature": 0.5}}), "nothing is there to be refused"


def test_a_training_that_failed_at_once_is_not_held_against_the_next(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert not run.begin("train", {"lr": 1e9})
    (tmp_path / "train").mkdir()
    assert not run.begin("train", {"lr": 1e-4})


def test_removing_takes_what_follows_and_no_more(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for stage in STAGES:
        run.begin(stage, {})
    run.remove("evaluate")
    assert run.record("export") is not None
    assert run.record("evaluate") is None
    run.remove("features")
    assert run.record("answers") is not None
    assert all(run.record(stage) is None for stage in FOLLOWERS["features"])


def test_a_run_file_changed_by_hand_is_named(tmp_path: Path) -> None:
    for text in ("not json", '{"train": {"surprise": 1}}', "[1]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run\.json cannot be read"):
            RunDirectory(tmp_path).record("train")
