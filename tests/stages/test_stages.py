"""What stages decide by themselves: the held-out split, and what a run directory remembers."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data.answers.generate import split_heldout
from draftsmith.errors import UserError
from draftsmith.stages.run import DATA_STAGES, FOLLOWERS, STAGES, RunDirectory

pytestmark = pytest.mark.full


def test_split_is_stable_and_keeps_turns_together() -> None:
    ids = [f"c#{i}" for i in range(30) for turn in (1, 2, 3)]
    train, heldout = split_heldout(ids, 20)
    assert sorted(train + heldout) == list(range(90))
    assert 20 <= len(heldout) <= 22
    assert not {ids[i] for i in train} & {ids[i] for i in heldout}
    assert split_heldout(ids, 20) == (train, heldout)
    with pytest.raises(UserError, match=r"data\.heldout is 90"):
        split_heldout(ids, 90)
    with pytest.raises(UserError, match="takes every conversation"):
        split_heldout(["one", "one"], 1)


def test_what_was_changed_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin("train", {"loss": {"feature_weight": None, "also": {}}, "gone": None})
    (tmp_path / "train" / "best").mkdir(parents=True)
    run.finish("train", {})
    with pytest.raises(UserError, match=r"\(loss.feature_weight was None, is 0\.0\)"):
        run.begin("train", {"loss": {"feature_weight": 0.0, "also": []}, "gone": None})
    with pytest.raises(UserError, match="gone was None, is None"):
        run.begin("train", {"loss": {"feature_weight": None, "also": {}}})


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


def test_removing_what_runs_share_leaves_the_other_runs_heads(tmp_path: Path) -> None:
    """The directory of another run, of which this one makes answers and hidden states alone."""
    own, shared = RunDirectory(tmp_path), RunDirectory(tmp_path, DATA_STAGES)
    for stage in STAGES:
        own.begin(stage, {})
        own.finish(stage, {})
    (tmp_path / "answers.jsonl").write_text("{}\n")
    (tmp_path / "train" / "best").mkdir(parents=True)
    with pytest.raises(UserError, match="choose another --data_dir, or add --redo answers"):
        shared.begin("answers", {"more": 1})
    assert not shared.begin("answers", {"more": 1}, redo=True)
    assert not (tmp_path / "answers.jsonl").exists()
    assert (tmp_path / "train" / "best").exists()
    assert own.record("train") is not None
    assert own.record("features") is None


def test_a_run_file_changed_by_hand_is_named(tmp_path: Path) -> None:
    for text in ("not json", '{"train": {"surprise": 1}}', "[1]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run\.json cannot be read"):
            RunDirectory(tmp_path).record("train")


def test_two_processes_do_not_make_one_run(tmp_path: Path) -> None:
    """The first holds the directory until it is done; what is done anybody may use meanwhile."""
    program = (
        "import sys; from pathlib import Path; from draftsmith.stages.run import RunDirectory\n"
        "run = RunDirectory(Path(sys.argv[1])); run.begin('answers', {'a': 1}); print('begun', flush=True)\n"
        "sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        run, before = RunDirectory(tmp_path), (tmp_path / "run.json").read_bytes()
        with pytest.raises(UserError, match="Another draftsmith is at work"):
            run.begin("answers", {"a": 1})
        with pytest.raises(UserError, match="Another draftsmith is at work"):
            run.begin("answers", {"a": 1}, redo=True)
        assert (tmp_path / "run.json").read_bytes() == before
    assert not run.begin("answers", {"a": 1}), "the other one has ended, however it did"


def test_what_changed_is_told_shortly(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin("answers", {"beside": {}, "method": "eagle3", "a": list(range(100))})
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(UserError) as refused:
        run.begin("answers", {"method": "medusa", "a": None, "b": 1})
    text = str(refused.value)
    assert text.index("method was 'eagle3', is 'medusa'") < text.index("a was [0, 1, 2")
    assert "beside" not in text
    assert len(text) < 400
