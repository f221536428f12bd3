"""The plan of micro-batches: every sample once, the same for any number of processes."""

import pytest
import torch

from draftsmith.data.batch import Features
from draftsmith.decoder.sampling import row_key
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.schedule import Micro, MicroBatches, Schedule

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


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 4), (2, 2), (4, 1), (3, 1)])
def test_micro_batches_are_dealt_out_in_turns(processes: int, accumulation: int, skip: int) -> None:
    """From what one process sees in an epoch: no micro-batch is lost, seen twice, or in another window."""
    window = processes * accumulation
    whole = plan(1, window).epoch(1)
    schedule = plan(processes, accumulation)
    for rank in range(processes):
        dealt = [micro for place, micro in enumerate(whole) if place % processes == rank and place >= skip * window]
        assert schedule.share(1, rank, skip) == dealt
        assert schedule.share(1, rank) == schedule.share(1, rank, 0)
        assert len(dealt) == (len(whole) // window - skip) * accumulation


def test_fillers_repeat_the_first_and_do_not_count() -> None:
    alone = Schedule([5], TrainSpec(row_tokens=32, rows=1), seed=3, processes=3)
    assert alone.epoch(0) == [Micro(((0,),), True), Micro(((0,),), False), Micro(((0,),), False)]
    whole = plan(5, 1).epoch(0)
    assert {micro.rows for micro in whole if not micro.counts} == {whole[0].rows}


class Source:
    """Samples of three tokens, each named by its number."""

    def get_many(self, indices: list[int], layer_ids: tuple[int, ...]) -> list[Features]:
        assert layer_ids == (2, 4)
        return [self.sample(i) for i in indices]

    @staticmethod
    def sample(i: int) -> Features:
        states, ids = torch.zeros(3, 2), torch.arange(3) + 10 * i
        return Features(ids, torch.ones(3).bool(), states, states, ids.int(), torch.zeros(3), str(i), "s")


def test_micro_batches_are_read_through_the_index_with_a_seed_for_each_document() -> None:
    micros = [Micro(((2, 0), (1,)), True), Micro(((1,),), False)]
    batches = MicroBatches(Source(), [7, 5, 9], micros, (2, 4), 8, seed=6)  # type: ignore[arg-type]
    assert len(batches) == 2
    (first, counts), (second, filler) = batches[0], batches[1]
    assert (counts, filler) == (True, False)
    assert first.ids.tolist() == [[90, 91, 92, 70, 71, 72, 0, 0], [50, 51, 52, 0, 0, 0, 0, 0]]
    seven, five, nine = (row_key(6, "train", i) for i in (7, 5, 9))
    assert first.seeds.tolist() == [[nine] * 3 + [seven] * 3 + [0] * 2, [five] * 3 + [0] * 5]
    assert second.seeds.tolist() == [[five] * 3 + [0] * 5]
