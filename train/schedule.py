"""The micro-batches of each process and optimizer step: a pure function of the recipe and the lengths.

A window is the micro-batches of one optimizer step over all processes and accumulation steps. Because the
plan is pure, resuming is skipping, and 2 processes see what 1 process with twice the accumulation sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from draftsmith.data.batch import TrainBatch, collate, plan_batches
from draftsmith.data.features.store import FeatureSource
from draftsmith.decoder.sampling import row_key
from draftsmith.recipe.schema import TrainSpec


@dataclass(frozen=True)
class TrainData:
    """Features and which of them are trained on and which are held out. identity: what identifies them, for dashboards."""

    source: FeatureSource
    train: list[int]
    heldout: list[int]
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Micro:
    """A micro-batch: sample indices per packed row. `counts` is False for a filler that completes the last window."""

    rows: tuple[tuple[int, ...], ...]
    counts: bool


@dataclass(frozen=True)
class Schedule:
    """All micro-batches of a training run, in order."""

    lengths: Sequence[int]
    spec: TrainSpec
    seed: int
    processes: int

    @property
    def window(self) -> int:
        """Micro-batches per optimizer step, over all processes."""
        return self.processes * self.spec.accumulation

    def epoch(self, number: int) -> list[Micro]:
        """Return epoch `number`'s micro-batches, filled up to whole windows."""
        plan = plan_batches(
            self.lengths, row_tokens=self.spec.row_tokens, rows=self.spec.rows, seed=self.seed, epoch=number
        )
        micros = [Micro(tuple(tuple(row) for row in batch), True) for batch in plan]
        missing = -len(micros) % self.window
        return micros + [Micro(micros[0].rows, False)] * missing

    def share(self, number: int, rank: int, skip_steps: int = 0) -> list[Micro]:
        """Return the micro-batches of process `rank` in an epoch, after `skip_steps` optimizer steps."""
        micros = self.epoch(number)[skip_steps * self.window :]
        return micros[rank :: self.processes]


class MicroBatches(Dataset):
    """Read and pack the features of a list of micro-batches. seed: the epoch's, from which each document's is drawn."""

    def __init__(
        self,
        source: FeatureSource,
        index: Sequence[int],
        micros: Sequence[Micro],
        layers: tuple[int, ...],
        row_tokens: int,
        seed: int,
    ) -> None:
        self.source, self.index, self.micros = source, index, micros
        self.layers, self.row_tokens, self.seed = layers, row_tokens, seed

    def __len__(self) -> int:
        return len(self.micros)

    def __getitem__(self, index: int) -> tuple[TrainBatch, bool]:
        micro = self.micros[index]
        rows = [self.source.get_many([self.index[i] for i in row], self.layers) for row in micro.rows]
        seeds = [[row_key(self.seed, "train", self.index[i]) for i in row] for row in micro.rows]
        return collate(rows, self.row_tokens, seeds=seeds), micro.counts
