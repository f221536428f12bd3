"""Answers and hidden states that several processes make are those of one, however many there are and whenever they are killed."""

import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.data.features.extract import extract
from draftsmith.data.features.index import read_index
from draftsmith.data.team import Team
from draftsmith.train.meeting import meeting, together
from scripts.bench.killing import kill_at
from tests.data.answers.test_generate import answer
from tests.data.answers.test_generate import target as answering
from tests.data.features.test_extract import SMALL, make_samples
from tests.data.features.test_store import all_bytes
from tests.models import make_target

pytestmark = pytest.mark.full
assert answering  # a fixture


def in_processes(
    size: int,
    work: Callable[[Team], None],
    log: Path,
    killed: Callable[[Callable[[], int]], Callable[[], int]] | None = None,
) -> list[int]:
    """Fork processes that meet and do `work`; return their exit codes. When one is killed, the others are, as launchers do. killed: makes the
    work of the last one end early."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(size):
        if child := os.fork():
            children[child] = rank
            continue
        code = 70
        try:
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({name: str(value) for name, value in place.items()})
            sys.stderr = log.open("a", buffering=1)

            def join() -> int:
                with together():
                    work(meeting())
                return 0

            code = (killed(join) if killed and rank == size - 1 else join)()
        except BaseException as error:  # noqa: BLE001 - which the log says
            print(repr(error), file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    codes = [0] * size
    while children:
        pid, status = os.wait()
        if pid in children:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            if os.WIFSIGNALED(status):
                for other in children:
                    os.kill(other, signal.SIGKILL)
    return codes


def test_hidden_states_are_those_of_one_process_whatever_is_killed(tmp_path: Path) -> None:
    target, samples = make_target(), make_samples(60)
    extract(target, samples, tmp_path / "one", **SMALL)
    assert len(read_index(tmp_path / "one").shards) > 6

    def work(folder: str) -> Callable[[Team], None]:
        # Only rank 0 needs the samples.
        return lambda team: (
            extract(target, () if team.rank else samples, tmp_path / folder, **SMALL, team=team) and None
        )

    for size in (2, 3):
        assert in_processes(size, work(str(size)), tmp_path / "log") == [0] * size
        assert all_bytes(tmp_path / str(size)) == all_bytes(tmp_path / "one")
    said = (tmp_path / "log").read_text()
    total = sum(len(sample.ids) for sample in samples)
    assert said.count(f"{total / 1000:.2f}k/{total / 1000:.2f}k tok") == 2, said
    draw = random.Random(0)
    for round_ in range(3):
        folder = tmp_path / f"killed-{round_}"
        for size in (2, 3):
            at = draw.randrange(1, 12)
            killed = in_processes(
                size, work(folder.name), tmp_path / "log", lambda join, at=at, folder=folder: kill_at(at, folder, join)
            )
            assert -9 in killed
        assert not read_index(folder).complete
        assert in_processes(2, work(folder.name), tmp_path / "log") == [0, 0]
        assert all_bytes(folder) == all_bytes(tmp_path / "one")


def test_answers_are_those_of_one_process_whatever_is_killed(answering: object, tmp_path: Path) -> None:
    answer(answering, tmp_path / "one" / "a.jsonl", batch=1)
    whole = all_bytes(tmp_path / "one")
    for size in (2, 3):
        folder = tmp_path / str(size)

        def work(team: Team, folder: Path = folder) -> None:
            answer(answering, folder / "a.jsonl", batch=1, team=team)

        killed = in_processes(size, work, tmp_path / "log", lambda join, folder=folder: kill_at(3, folder, join))
        assert -9 in killed
        assert all_bytes(folder) != whole
        assert in_processes(size, work, tmp_path / "log") == [0] * size
        # What is half-written is swept with the run directory.
        assert {name: data for name, data in all_bytes(folder).items() if ".draftsmith-" not in name} == whole
