"""What stages decide by themselves: the held-out split, and what a run directory remembers."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith import storage
from draftsmith.data.answers.generate import split_heldout
from draftsmith.errors import UserError
from draftsmith.recipe.record import DATA_STAGES, FOLLOWERS, INSIDE, KNOWN, STAGES
from draftsmith.stages.run import RunDirectory

pytestmark = pytest.mark.full


def test_split_is_stable_and_keeps_turns_together() -> None:
    ids = [f"c#{i}" for i in range(30) for turn in (1, 2, 3)]
    train, heldout = split_heldout(ids, 20)
    assert sorted(train + heldout) == list(range(90))
    assert 20 <= len(heldout) <= 22
    assert not {ids[i] for i in train} & {ids[i] for i in heldout}
    assert split_heldout(ids, 20) == (train, heldout)
    train, heldout = split_heldout(["large"] * 30 + ids, 20)
    assert len(heldout) <= 22, "a group larger than what is asked for is learned from"
    assert set(range(30)) <= set(train)
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


def test_a_training_that_is_made_again_takes_its_dashboards(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin("train", {})
    for name in ("wandb", "trackio", "mlflow", "tensorboard"):
        (tmp_path / "train" / name).mkdir(parents=True)
    for name in ("wandb_id", "trackio_id", "mlflow_id", "metrics.jsonl", "dashboards.jsonl"):
        (tmp_path / "train" / name).write_text("")
    run.finish("train", {})
    run.begin("train", {}, redo=True)
    assert [path.name for path in (tmp_path / "train").iterdir()] == [".earlier"]
    run.finish("train", {})
    assert not (tmp_path / "train").exists()


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
    bad = [
        "not json",
        '{"train": {"surprise": 1}}',
        "[1]",
        '{"sources": {}}',
        '{"train": [1]}',
        "{",
        '{"train": {"inputs": 1}}',
    ]
    for text in bad:
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run\.json.*changed by hand"):
            RunDirectory(tmp_path).record("train")


def test_two_processes_do_not_make_one_run(tmp_path: Path) -> None:
    """The first holds the directory until it is done; what is done anybody may use meanwhile."""
    program = (
        "import sys; from pathlib import Path; from draftsmith.stages.run import RunDirectory\n"
        "run = RunDirectory(Path(sys.argv[1])); run.begin('answers', {'a': 1}); print('begun', flush=True)\n"
        "sys.stdin.readline()"
    )
    done = RunDirectory(tmp_path)
    done.begin("export", {"a": 1})
    (tmp_path / "export" / "eagle3").mkdir(parents=True)
    done.finish("export", {})
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
        half = tmp_path / ".answers.jsonl.draftsmith-0123456789ab.tmp"
        half.touch()
        assert run.begin("export", {"a": 1})
        assert half.exists(), "the other one may be writing it"
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


FILES_OF = {
    "answers": ["answers.jsonl"],
    "features": ["features/index.json", "features/shard-00000.safetensors"],
    "train": ["train/best/config.json", "train/best/model.safetensors", "train/summary.json", "train/step_10/DONE"],
    "evaluate": ["evaluation/t0/result.json", "evaluation/report.html"],
    "export": ["export/eagle3/config.json", "export/eagle3/model.safetensors", "export/eagle3/README.md"],
}


def make_stage(run: RunDirectory, stage: str, text: str = "") -> None:
    """Leave the files of a stage that has begun, and finish it."""
    for name in FILES_OF[stage]:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(text or f"what {stage} made")
    run.finish(stage, {})


def make_run(path: Path) -> RunDirectory:
    """A run whose stages are all done, with a file or more each."""
    run = RunDirectory(path)
    for stage in FILES_OF:
        run.begin(stage, {"a": 1})
        make_stage(run, stage)
    return run


def listing(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_files_that_a_run_did_not_make_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    foreign = ["train/notes.md", "train/step_by_step/a", "features/mine.txt", "export/copy/a.json", "evaluation/t0.md"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert not run.begin("answers", {"a": 2}, redo=True)
    for stage in FILES_OF:
        run.begin(stage, {"a": 2})
        make_stage(run, stage)
    ours = [name for names in FILES_OF.values() for name in names]
    assert listing(tmp_path) == sorted([".lock", "run.json", *foreign, *ours])
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "answers.jsonl").rename(tmp_path / "answers.jsonl.partial")
    with pytest.raises(UserError, match=r"answers.jsonl.partial is there, but .*run.json does not know"):
        RunDirectory(tmp_path).begin("answers", {"a": 1})
    assert (tmp_path / "answers.jsonl.partial").exists()


def contents(path: Path) -> dict[str, str]:
    return {name: (path / name).read_text() for name in listing(path) if name not in (".lock", "run.json")}


def die_after(operations: int, patch: pytest.MonkeyPatch) -> None:
    """Let this process be killed, as it were, before the next operation on files after so many."""
    left = [operations]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def operate(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return operate

    for name in ("unlink", "rename", "replace", "rmdir", "mkdir"):
        patch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("stage", ["answers", "features"])
def test_a_command_that_dies_while_data_grow_loses_nothing(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "flush", lambda path: None)
    make_run(tmp_path / "whole")
    now, more, cut, done = {"a": 1, "conversations": 1}, {"conversations"}, 0, False
    while not done:
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "whole", folder)
        run = RunDirectory(folder)
        with monkeypatch.context() as patch:
            die_after(cut, patch)
            try:
                run.grow(stage, now)
                done = True
            except KeyboardInterrupt:
                cut += 1
        run._release()
        again = RunDirectory(folder)
        if again.changed(stage, now):
            again.grow(stage, now)
        assert not again.begin(stage, now)
        assert [path.read_text() for path in again.kept(stage, more)] == [f"what {stage} made"] * len(FILES_OF[stage])
        make_stage(again, stage, "new")
        assert [name for name in contents(folder) if ".earlier" in name] == []
    assert cut > 3


@pytest.mark.parametrize("redo", ["answers", "features", "train", "evaluate", "export"])
def test_a_command_that_dies_while_it_makes_a_stage_again_loses_nothing(
    redo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before every operation on files: the earlier version is there again, or waits until the new one is done."""
    done = cut = 0
    monkeypatch.setattr(storage, "flush", lambda path: None)  # nobody pulls the plug here
    whole = contents(make_run(tmp_path / "whole").path)
    while not done:
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "whole", folder)
        run = RunDirectory(folder)
        with monkeypatch.context() as patch:
            die_after(cut, patch)
            try:
                run.begin(redo, {"a": 2}, redo=True)
                make_stage(run, redo, "new")
                done = cut
            except KeyboardInterrupt:
                cut += 1
        run._release()
        again = RunDirectory(folder)
        with again.writing():
            pass
        found = contents(folder)
        if all(again.holds(stage, {"a": 1}) for stage in FILES_OF):
            assert found == whole, "it is as if nothing had happened"
            continue
        assert again.record(redo).inputs == {"a": 2}
        kept = {name.replace(".earlier/", ""): text for name, text in found.items() if ".earlier/" in name}
        lost = whole.keys() - found.keys() - kept.keys()
        assert not lost or again.record(redo).state == "done", f"cut at {cut}: {lost}"
        for stage in FOLLOWERS[redo]:
            if stage in FILES_OF and stage != redo:
                assert {name: whole[name] for name in FILES_OF[stage]}.items() <= kept.items()
                assert not again.holds(stage, {"a": 1})
                assert not again.begin(stage, {"a": 1})
                make_stage(again, stage, "new")
        if again.record(redo).state != "done":
            assert not again.begin(redo, {"a": 2})
            make_stage(again, redo, "new")
        assert set(contents(folder).values()) <= {"new", *(f"what {stage} made" for stage in FILES_OF)}
        assert contents(folder).keys() == whole.keys(), "nothing is left over"
    assert done > 5


def test_a_second_try_keeps_what_was_whole(tmp_path: Path) -> None:
    """--redo twice: the first new version is half-made and goes; what was finished before stays until one is done."""
    make_run(tmp_path)
    for value in (2, 3):
        run = RunDirectory(tmp_path)
        assert not run.begin("train", {"a": value}, redo=True)
        (tmp_path / "train" / "step_1").mkdir(parents=True)
        (tmp_path / "train" / "step_1" / "DONE").write_text(str(value))
        run._release()
    kept = contents(tmp_path)
    assert kept["train/step_1/DONE"] == "3"
    assert kept["train/.earlier/best/model.safetensors"] == "what train made"
    assert kept["evaluation/.earlier/t0/result.json"] == "what evaluate made"
    run = RunDirectory(tmp_path)
    make_stage(run, "train", "new") if not run.begin("train", {"a": 3}) else None
    assert not [name for name in contents(tmp_path) if name.startswith("train/.earlier")]
    assert "evaluation/.earlier/t0/result.json" in contents(tmp_path), "until it is measured again"


def test_more_data_take_what_an_earlier_version_has(tmp_path: Path) -> None:
    """Also a change of the data that follows before the first is made; of files of one name those of the whole version stay."""
    run, more = make_run(tmp_path), {"conversations"}
    index = tmp_path / "features" / ".earlier" / "index.json"
    for number in (1, 2):
        run.grow("features", {"a": 1, "conversations": number})
        assert run.kept("features", more) == [index, index.with_name("shard-00000.safetensors")]
        assert index.read_text() == "what features made"
        assert run.kept("features", set()) == []
        assert run.changed("features", {"a": 2}) == ["a", "conversations"], "what is kept counts as work"
        run._release()
        run = RunDirectory(tmp_path)
        (tmp_path / "features" / "index.json").write_text("half")
    assert not run.begin("features", {"a": 1, "conversations": 2})
    assert not run.redone("features")
    make_stage(run, "features", "new")
    assert not index.parent.exists()
    assert run.holds("features", {"a": 1, "conversations": 2})
    assert run.record("train") is not None, "heads stay"


@pytest.mark.parametrize("left", ["answers.jsonl", "answers.jsonl.partial"])
@pytest.mark.parametrize("redo", [False, True])
def test_answers_of_every_unfinished_version_are_kept(
    redo: bool, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before every operation on files: the first version stays as it was, and of --redo only what came later is taken."""
    monkeypatch.setattr(storage, "flush", lambda path: None)
    first, partial = "first\n" if left == "answers.jsonl" else "first\nfi", "answers.jsonl.partial"
    run, more = RunDirectory(tmp_path / "whole"), {"conversations"}
    run.begin("answers", {"a": 1})
    (run.path / left).write_text(first)
    if left == "answers.jsonl":
        run.finish("answers", {})
    run.begin("answers", {"a": 2}, redo=True) if redo else run.grow("answers", {"a": 1, "conversations": 2})
    (run.path / partial).write_text("second\nse")
    run._release()
    now, cut, done = {"a": 1 + redo, "conversations": 3}, 0, False
    while not done:
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "whole", folder)
        run = RunDirectory(folder)
        with monkeypatch.context() as patch:
            die_after(cut, patch)
            try:
                run.grow("answers", now)
                done = True
            except KeyboardInterrupt:
                cut += 1
        run._release()
        for number in (3, 4):
            again, now = RunDirectory(folder), now | {"conversations": number}
            if again.changed("answers", now):
                again.grow("answers", now)
            assert not again.begin("answers", now)
            assert again.redone("answers") == redo
            assert (folder / ".earlier" / left).read_text() == first
            kept = [path.read_text() for path in again.kept("answers", more)]
            lines = {line for text in kept for line in text.splitlines() if line in ("first", "second", "third")}
            assert lines == {"second"} | ({"third"} if number == 4 else set()) | (set() if redo else {"first"})
            assert again.kept("answers", set()) == [] or redo
            (folder / partial).write_text("third\nth" if number == 3 else "fourth\n")
            again._release()
        if cut % 2:
            make_stage(RunDirectory(folder), "answers", "new")
        else:  # from nothing, and where that comes to nothing, the first version is back
            assert not RunDirectory(folder).begin("answers", {"a": 3}, redo=True)
            with RunDirectory(folder).writing():
                pass
        assert contents(folder) == ({"answers.jsonl": "new", partial: "fourth\n"} if cut % 2 else {left: first})
    assert cut > 3


def test_stores_of_two_versions_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index goes last: until it is there, there is more to move, and once it is, what came later goes."""
    run, features = make_run(tmp_path), tmp_path / "features"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, to: path.replace(to) if "shard" in path.name else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.grow("features", {"a": 1, "conversations": 1})
    assert (features / "index.json").exists()
    run._release()
    for number in (2, 3):
        run = RunDirectory(tmp_path)
        run.grow("features", {"a": 1, "conversations": number})
        assert [path.name for path in run.kept("features", {"conversations"})] == [
            "index.json",
            "shard-00000.safetensors",
        ]
        for name in ("index.json", "shard-00000.safetensors", "shard-00001.safetensors"):
            (features / name).write_text("later")
        run._release()
    assert set(contents(features / ".earlier").values()) == {"what features made"}


def test_hidden_states_made_again_take_nothing_from_before(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.begin("features", {"a": 1}, redo=True)
    (tmp_path / "features").mkdir(exist_ok=True)
    (tmp_path / "features" / "index.json").write_text("half")
    run.grow("features", {"a": 1, "conversations": 1})
    assert run.kept("features", {"conversations"}) == []
    assert not (tmp_path / "features" / "index.json").exists()
    assert run.redone("features")


def test_what_was_growing_is_as_before_where_redo_comes_to_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    whole = contents(tmp_path)
    run.grow("answers", {"a": 1, "conversations": 1})
    (tmp_path / "answers.jsonl.partial").write_text("half")
    run.begin("answers", {"a": 2}, redo=True)
    assert run.kept("answers", {"a", "conversations"}) == []
    run.put_back()
    assert contents(tmp_path) == whole
    assert run.holds("answers", {"a": 1})


@pytest.mark.parametrize(
    "name",
    ["train/best/notes.md", "evaluation/t0/notes.md", "evaluation/settings/vllm/my.sh", "export/eagle3/chat.txt"],
)
def test_a_file_of_the_users_in_a_folder_of_ours_is_named(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"{name} was not made by draftsmith, but --redo would remove it"):
        run.begin("train", {"a": 2}, redo=True)
    assert contents(tmp_path) == before
    assert run.holds("train", {"a": 1})


def test_hidden_states_that_would_not_fit_twice_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    for redo in ("answers", "features"):
        with pytest.raises(UserError, match=r"features holds 0\.0 GiB.*free some space, choose another --output_dir"):
            run.begin(redo, {"a": 1}, redo=True)
    assert contents(tmp_path) == before
    run.begin("train", {"a": 1}, redo=True)


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("answers.jsonl", "answers"),
        ("features/shard-00000.safetensors", "features"),
        ("train/best/model.safetensors", "train"),
        ("export/eagle3/config.json", "export"),
    ],
)
def test_files_that_changed_since_are_named(file: str, stage: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / file).write_text("something else of another length")
    with pytest.raises(UserError, match=rf"{file} was changed since the stage '{stage}' was done: .*--redo {stage}"):
        RunDirectory(tmp_path).begin(stage, {"a": 1})


def test_a_flipped_byte_is_seen_and_missing_results_are_made_again(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "answers.jsonl").write_text("what answers wade")
    (tmp_path / "train" / "best" / "model.safetensors").unlink()
    (tmp_path / "evaluation" / "t0" / "result.json").unlink()
    (tmp_path / "export" / "eagle3" / "model.safetensors").unlink()
    (tmp_path / "export" / "eagle3" / "README.md").write_text("edited")
    with pytest.raises(UserError, match=r"answers\.jsonl was changed"):
        RunDirectory(tmp_path).holds("answers", {"a": 1})
    with pytest.raises(UserError, match=r"best/model\.safetensors is gone"):
        RunDirectory(tmp_path).holds("train", {"a": 1})
    assert RunDirectory(tmp_path).holds("features", {"a": 1})
    assert not RunDirectory(tmp_path).holds("evaluate", {"a": 1})
    assert not RunDirectory(tmp_path).holds("export", {"a": 1})


def test_records_of_earlier_versions_hold_no_files(tmp_path: Path) -> None:
    make_run(tmp_path)
    entries = json.loads((tmp_path / "run.json").read_text())
    for entry in entries.values():
        del entry["files"]
    (tmp_path / "run.json").write_text(json.dumps(entries))
    assert all(RunDirectory(tmp_path).holds(stage, {"a": 1}) for stage in entries)


def test_what_killed_processes_left_half_written_is_swept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    half = [".run.json.draftsmith-0123456789ab.tmp", "features/.index.json.draftsmith-0123456789ab.tmp"]
    for name in half:
        (tmp_path / name).write_text("half")
    (tmp_path / "export" / ".eagle3.draftsmith-0123456789ab.tmp").mkdir()
    (tmp_path / "export" / "eagle3").rename(tmp_path / "export" / ".eagle3.draftsmith-0123456789ab.old")
    (tmp_path / ".mine.tmp").write_text("mine")
    before = sorted([*(set(listing(tmp_path)) - set(half))])
    assert run.begin("evaluate", {"a": 1}), "also where nothing is made any more"
    after = listing(tmp_path)
    assert "export/eagle3/model.safetensors" in after, "the one that was about to be replaced"
    assert ".mine.tmp" in after
    assert not [name for name in after if ".draftsmith-" in name]
    assert len(after) == len(before)


def test_what_another_run_writes_below_is_not_swept(tmp_path: Path) -> None:
    """A run in the folder that holds the runs, as of --output_dir . , leaves what those below it are writing."""
    make_run(tmp_path)
    make_run(tmp_path / "runs" / "a")
    half = tmp_path / "runs" / "a" / ".run.json.draftsmith-0123456789ab.tmp"
    half.write_text("half")
    assert not RunDirectory(tmp_path).begin("simulate", {})
    assert half.exists()
    assert not RunDirectory(half.parent).begin("simulate", {})
    assert not half.exists()


def test_a_result_that_was_changed_is_measured_again(tmp_path: Path) -> None:
    make_run(tmp_path)
    result = tmp_path / "evaluation" / "t0" / "result.json"
    result.write_text("what evaluate wade")
    assert not RunDirectory(tmp_path).begin("evaluate", {"a": 1})
    assert not result.exists()
    assert (tmp_path / "evaluation" / "report.html").exists()


def test_a_done_stage_that_lacks_what_is_needed_is_made_under_the_lock(tmp_path: Path) -> None:
    make_run(tmp_path)
    run, another = RunDirectory(tmp_path), tmp_path / "export" / "another-layout"
    assert not run.begin("export", {"a": 1}, needed=[another])
    record = RunDirectory(tmp_path).record("export")
    assert record is not None
    assert record.state == "running"


def test_results_of_all_temperatures_are_a_stages_own() -> None:
    for temperature in (0.0, 0.7, 1e-5, 1e20):
        for stage, folder in (("evaluate", "evaluation"), ("simulate", "simulation")):
            place = f"{folder}/t{temperature:g}"
            assert re.fullmatch(KNOWN[stage], place)
            assert INSIDE.fullmatch(f"{place}/result.json")
