"""Answers and hidden states that several processes make are those of one, however many there are and whenever they are killed."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.data.features.extract import extract
from draftsmith.data.features.index import read_index
from draftsmith.data.team import Team
from draftsmith.train.meeting import meeting, together
from scripts.bench.killing import in_children, kill_at
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
    killed: Callable[[Callable[[], int]], Callable[[], int]] = lambda join: join,
) -> int:
    """Have processes meet and do `work`; return the first exit code that is not 0. killed: makes the work of the last one end early."""

    def join() -> int:
        with together():
            work(meeting())
        return 0

    return in_children(log, *[join] * (size - 1), killed(join))


def test_hidden_states_are_those_of_one_process_whatever_is_killed(tmp_path: Path) -> None:
    target, samples = make_target(), make_samples(60)
    extract(target, samples, tmp_path / "one", **SMALL)
    assert len(read_index(tmp_path / "one").shards) > 6

    def work(folder: str) -> Callable[[Team], None]:
        # Only rank 0 needs the samples.
        return lambda team: (
            extract(target, () if team.rank else samples, tmp_path / folder, **SMALL, team=team) and None
        )

    total = sum(len(sample.ids) for sample in samples)
    for size in (2, 3):
        assert in_processes(size, work(str(size)), tmp_path / "log") == 0
        assert all_bytes(tmp_path / str(size)) == all_bytes(tmp_path / "one")
        said = (tmp_path / "log").read_text()
        assert said.count(f"{total / 1000:.2f}k/{total / 1000:.2f}k tok") == 1, said
    draw = random.Random(0)
    for round_ in range(3):
        folder = tmp_path / f"killed-{round_}"
        for size in (2, 3):
            at = draw.randrange(1, 12 if size == 2 else 5)  # the second finds what the first has left
            while not (
                killed := in_processes(
                    size,
                    work(folder.name),
                    tmp_path / "log",
                    lambda join, at=at, folder=folder: kill_at(at, folder, join),
                )
            ):
                # On a busy machine the others may leave it fewer chunks than that.
                assert at > 1
                at //= 2
                shutil.rmtree(folder)
            assert killed == -9
        assert not read_index(folder).complete
        assert in_processes(2, work(folder.name), tmp_path / "log") == 0
        assert all_bytes(folder) == all_bytes(tmp_path / "one")


def test_answers_are_those_of_one_process_whatever_is_killed(answering: object, tmp_path: Path) -> None:
    answer(answering, tmp_path / "one" / "a.jsonl", batch=1)
    whole = all_bytes(tmp_path / "one")
    for size in (2, 3):
        folder = tmp_path / str(size)

        def work(team: Team, folder: Path = folder) -> None:
            answer(answering, folder / "a.jsonl", batch=1, team=team)

        killed = in_processes(size, work, tmp_path / "log", lambda join, folder=folder: kill_at(3, folder, join))
        assert killed == -9
        assert all_bytes(folder) != whole
        assert in_processes(size, work, tmp_path / "log") == 0
        # What is half-written is swept with the run directory.
        assert {name: data for name, data in all_bytes(folder).items() if ".draftsmith-" not in name} == whole
