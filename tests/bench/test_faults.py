"""The bench of faults kills where it says, and finds a run that is not what it was."""

import os
import signal
import time
from pathlib import Path

import pytest

from scripts.bench.faults import WAYS, missing, outcome
from scripts.bench.killing import counted, in_children, kill_after, kill_at


def write_three(folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    for name in ("a", "b", "c"):
        (folder / f"{name}.tmp").write_text(name)
        (folder / f"{name}.tmp").rename(folder / name)
    print("done")
    return 0


def test_a_kill_comes_before_its_operation(tmp_path: Path) -> None:
    run, log, number = tmp_path / "run", tmp_path / "log", tmp_path / "number"
    assert in_children(log, counted(run, number, lambda: write_three(run))) == 0
    assert int(number.read_text()) == 1 + 3 * 2
    assert log.read_text() == "done\n"
    for at, left in enumerate(([], ["a.tmp"], ["a"], ["a", "b.tmp"]), start=2):
        for file in run.iterdir():
            file.unlink()
        assert in_children(log, kill_at(at, run, lambda: write_three(run))) == -9
        assert sorted(os.listdir(run)) == left
    assert in_children(log, kill_at(8, run, lambda: write_three(run))) == 0


def test_a_kill_after_some_time_and_exit_codes(tmp_path: Path) -> None:
    def endless() -> int:
        while True:
            pass

    def fails() -> int:
        raise RuntimeError("a bug")

    assert in_children(tmp_path / "log", kill_after(0.05, endless)) == -9
    assert in_children(tmp_path / "log", lambda: 2) == 2
    assert in_children(tmp_path / "log", fails) == 70
    assert "RuntimeError: a bug" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_damage_is_seen(way: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "model.safetensors"
    file.write_bytes(b"some bytes")
    before = outcome(tmp_path)
    WAYS[way](file)
    assert outcome(tmp_path) != before
    (tmp_path / ".a.draftsmith-0123456789ab.tmp").touch()
    assert outcome(tmp_path)["left over"]


def test_what_is_set_aside_is_not_missing_but_left_over(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("{}")
    good = outcome(tmp_path)["digests"]
    (tmp_path / ".earlier").mkdir()
    (tmp_path / "answers.jsonl").rename(tmp_path / ".earlier" / "answers.jsonl")
    assert not missing(tmp_path, good)
    assert outcome(tmp_path)["left over"]
    (tmp_path / ".earlier" / "answers.jsonl").unlink()
    assert missing(tmp_path, good) == ["answers.jsonl"]


def test_the_rank_beside_one_that_is_killed_is_ended(tmp_path: Path) -> None:
    def endless() -> int:
        (tmp_path / os.environ["RANK"]).touch()
        while True:
            time.sleep(0.1)

    def killed() -> int:
        while not (tmp_path / "1").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_children(tmp_path / "log", killed, endless) == -9
    assert in_children(tmp_path / "log", lambda: 0, lambda: int(os.environ["WORLD_SIZE"])) == 2
