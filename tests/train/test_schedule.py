"""The plan of micro-batches: every sample once, the same for any number of processes."""

import pytest

from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.schedule import Schedule

LENGTHS = [7, 30, 12, 25, 9, 31, 16, 3, 22, 14, 28]


def plan(processes: int, accumulation: int) -> Schedule:
    return Schedule(LENGTHS, TrainSpec(row_tokens=32, rows=1, accumulation=accumulation), seed=3, processes=processes)


def test_every_sample_once_and_whole_windows() -> None:
    schedule = plan(2, 2)
    for epoch in (0, 1):
        micros = schedule.epoch(epoch)
        assert len(micros) % 4 == 0
        seen = [i for m in micros if m.counts for row in m.rows for i in row]
        assert sorted(seen) == list(range(len(LENGTHS)))
    assert schedule.epoch(0) != schedule.epoch(1)
    assert schedule.epoch(0) == plan(2, 2).epoch(0)


@pytest.mark.parametrize("skip", [0, 1])
def test_two_processes_share_the_windows_of_one(skip: int) -> None:
    alone = plan(1, 4).share(0, 0, skip)
    pair = [plan(2, 2).share(0, rank, skip) for rank in (0, 1)]
    for start in range(0, len(alone), 4):
        window = {m.rows for m in alone[start : start + 4] if m.counts}
        halves = {m.rows for share in pair for m in share[start // 2 : start // 2 + 2] if m.counts}
        assert window == halves
