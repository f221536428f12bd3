"""Two processes of a training, here two threads: how they meet, wait, agree and end."""

import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from draftsmith.errors import StoppedError, UserError
from draftsmith.train import meeting as meetings
from draftsmith.train.meeting import Meeting, OthersFailedError, _ending, together
from draftsmith.train.process import World

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(meetings, "_GRACE", 0.5)


def both(*work: Callable[[Meeting], Any]) -> list[Any]:
    """Let rank 0 and rank 1 meet, each then does its work; return what came out, or the exceptions."""

    kept = []  # rank 0 serves the store: it stays until both are done

    def one(rank: int) -> Any:
        try:
            kept.append(met := Meeting(World(rank, 2, rank), io.StringIO()))
            return work[rank](met)
        except (UserError, OthersFailedError, RuntimeError, KeyError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_equal_facts_pass_and_others_are_refused_by_all() -> None:
    assert both(*[lambda met: met.compare({"step": 3}, "x")] * 2) == [None, None]


def test_rank_0_which_serves_the_others_does_not_end_before_they_are_done() -> None:
    def slow(met: Meeting) -> float:
        time.sleep(0.5)
        done = time.monotonic()
        met.leave()
        return done

    def first(met: Meeting) -> float:
        met.leave()
        return time.monotonic()

    ended, done = both(first, slow)
    assert ended >= done


def test_facts_that_differ_are_named_with_their_ranks() -> None:
    errors = both(
        lambda met: met.compare({"seed": 0, "step": 40}, "copy it"),
        lambda met: met.compare({"seed": 0, "step": 0}, "copy it"),
    )
    for error in errors:
        assert isinstance(error, UserError)
        assert str(error).startswith("step is 40 for rank 0 on ")
        assert "but 0 for rank 1 on " in str(error)
        assert str(error).endswith(": copy it.")


def test_a_folder_that_is_shared_passes_and_keeps_no_file(tmp_path: Path) -> None:
    assert both(*[lambda met: met.check_shared("--output_dir", tmp_path / "run")] * 2) == [None, None]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_of_each_machine_is_refused(tmp_path: Path) -> None:
    errors = both(
        lambda met: met.check_shared("--output_dir", tmp_path / "a"),
        lambda met: met.check_shared("--output_dir", tmp_path / "b"),
    )
    assert all(isinstance(error, UserError) and "on a disk that all machines share" in str(error) for error in errors)
    assert list((tmp_path / "a").iterdir()) == []


def test_rank_0_goes_first() -> None:
    order: list[int] = []

    def work(met: Meeting) -> bool:
        with met.first() as first:
            order.append(met.here.rank)
        return first

    assert both(work, work) == [True, False]
    assert order == [0, 1]


def test_those_who_wait_end_with_the_one_that_failed() -> None:
    def fails(met: Meeting) -> Any:
        return _ending(met, UserError("data.heldout is 8"))

    def waits(met: Meeting) -> Any:
        with met.first():
            return "the data are there"

    error, ended = both(fails, waits)
    assert str(error) == "data.heldout is 8", "rank 0 says its own sentence, as one process would"
    assert isinstance(ended, OthersFailedError)
    assert ended.code == 2


def test_a_process_that_has_vanished_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "_SAY_SECONDS", 0.02)
    monkeypatch.setattr(meetings, "_SILENT_SECONDS", 0.5)
    beat = Meeting._beat
    monkeypatch.setattr(Meeting, "_beat", lambda met: None if met.rank else beat(met))
    ends = time.monotonic() + 10

    def wait(met: Meeting) -> str:
        met.wait(lambda: "nothing is heard of" in met.output.getvalue() or time.monotonic() > ends)
        return met.output.getvalue()

    said, _ = both(wait, lambda met: None)
    assert "hidden states; nothing is heard of rank 1: see there" in said


def test_a_mistake_that_all_find_is_said_once() -> None:
    ends = both(*[lambda met: _ending(met, UserError("the recipe is wrong"))] * 2)
    assert sorted(type(end).__name__ for end in ends) == ["SystemExit", "UserError"]
    assert [end.code for end in ends if isinstance(end, SystemExit)] == [2]


def test_a_failure_of_another_rank_names_it() -> None:
    error, _ = both(lambda met: None, lambda met: _ending(met, UserError("The loss became nan at step 3")))[::-1]
    assert str(error).startswith("The loss became nan at step 3 (rank 1 of 2 on ")


def test_a_stop_that_all_agreed_on_is_said_by_rank_0() -> None:
    said, silent = both(*[lambda met: _ending(met, StoppedError("stopped", 143))] * 2)
    assert isinstance(said, StoppedError)
    assert isinstance(silent, SystemExit)
    assert silent.code == 143


def test_a_lost_process_is_a_sentence_with_the_way_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    error, _ = both(lambda met: _ending(met, gone), lambda met: None)
    assert "Another process of this training is gone" in str(error)
    assert "run the same command again to go on from what is done; there is no checkpoint yet" in str(error)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == str(error)


def test_a_bug_keeps_its_traceback_and_says_where_it_was() -> None:
    error, _ = both(lambda met: None, lambda met: _ending(met, KeyError("x")))[::-1]
    assert isinstance(error, KeyError)
    assert "rank 1 of 2 on" in error.__notes__[0]


def test_rank_0_says_for_how_many_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "MEET", timedelta(seconds=0.6))
    monkeypatch.setattr(meetings, "_SAY_SECONDS", 0.1)
    output = io.StringIO()
    with pytest.raises(UserError, match=r"Only 1 of 2 processes came to 127\.0\.0\.1:\d+"):
        Meeting(World(0, 2, 0), output)
    assert "waiting for 1 of 2 processes at 127.0.0.1:" in output.getvalue()


def test_two_processes_of_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "MEET", timedelta(seconds=1))

    def meet(_: int) -> Any:
        try:
            return Meeting(World(0, 2, 0), io.StringIO())
        except UserError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(meet, range(2)))
    assert any("Two processes have RANK 0" in str(one) or "cannot meet" in str(one) for one in found)


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Met:
        here = World(1, 2, 1)

        def leave(self) -> None:
            pass

    monkeypatch.setattr(meetings, "_meeting", Met())
    monkeypatch.setattr(meetings, "world", lambda: Met.here)
    with together():
        print("twice")
        print("warning: twice", file=sys.stderr)
    print("once")
    assert capsys.readouterr() == ("once\n", "")


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("started", [{}, {"LOCAL_WORLD_SIZE": "2"}], ids=["by hand", "by a launcher"])
def test_a_rank_whose_master_never_answers_says_so(
    listens: bool, started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there, or another program is at this port: while it waits, and when it gives up."""
    monkeypatch.setattr(meetings, "MEET", timedelta(seconds=1))
    monkeypatch.setattr(meetings, "_SAY_SECONDS", 0.2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    voice = io.StringIO()
    with socket.socket() as silent:
        if listens:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        place = f"127.0.0.1:{os.environ['MASTER_PORT']}"
        why = (
            "has not answered for 0 minutes" if listens else f"Nobody is at {place}, where rank 1 of 2 .* for 0 minutes"
        )
        with pytest.raises(UserError, match=why) as refused:
            Meeting(World(1, 2, 1), voice)
    assert place in str(refused.value)
    assert (f"rank 0 at {place} (rank 1 of 2 on " in voice.getvalue()) is not bool(started)


def test_processes_that_are_started_again_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the store of their launcher, which has outlived those before."""
    port = int(os.environ["MASTER_PORT"])
    launcher = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert both(*[lambda met: met.compare({"step": 3}, "x")] * 2) == [None, None]
    assert launcher is not None
