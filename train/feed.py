"""What feeds the steps: micro-batches that threads read and plan ahead, and copy to the device as a whole.

A micro-batch lies in one buffer of a ring that is kept, pinned where it goes to a GPU; a side stream copies the next one while a step
computes. States that the target computes online are not copied to the CPU. Which thread reads what changes no value and no order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch, lay_texts, state_places
from draftsmith.data.features.store import FeatureSource
from draftsmith.data.memory import lay, upload
from draftsmith.decoder.sampling import row_key
from draftsmith.heads.base import DraftHead, count_rows
from draftsmith.heads.losses.pieces import divisor_of, plan_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.schedule import Micro, TrainData


@dataclass(frozen=True)
class Fed:
    """A micro-batch with its plan.

    divisor: its share of `loss_divisor`. rows: its rows of step 0 that count, each for a token to learn. covered: these tokens that
    some block predicts, for a head that samples blocks; else all. tokens: without padding. counts: `Micro.counts`. samples: by row, as
    numbers of the source. buffer: where it lies, None for ordinary memory.
    """

    batch: TrainBatch
    divisor: float
    rows: int
    covered: int
    tokens: int
    counts: bool = True
    samples: tuple[tuple[int, ...], ...] = ()
    buffer: "Buffer | None" = None


def plan_batch(batch: TrainBatch, head: DraftHead, loss: LossSpec, device: torch.device) -> Fed:
    """Return a batch on the CPU with the plan of a training step on `device`. head: in training mode."""
    bare = batch.without_states()
    plan = head.plan(bare, head.trains.steps)
    offsets, rows = zip(*plan.scored, strict=True)
    plan = replace(plan.laid_out(device), loss=plan_loss(rows, offsets, bare, loss))
    divisor, count = float(divisor_of(plan.rows, bare, loss)), int(count_rows(bare))
    covered = len(torch.cat([at + k for k, at in enumerate(plan.rows)]).unique()) if head.trains.blocks else count
    return Fed(replace(batch, plan=plan), divisor, count, covered, int((batch.document >= 0).sum()))


def read_batch(
    source: FeatureSource, rows: Sequence[Sequence[int]], layer_ids: Sequence[int], length: int
) -> TrainBatch:
    """Return a batch of samples of a source, packed in these rows of at most `length` tokens."""
    batch = lay_texts([[source.text(i) for i in row] for row in rows], length)
    return _fill(_with_states(batch, source, layer_ids, source.computed_on), source, rows, layer_ids)


def _with_states(
    batch: TrainBatch, source: FeatureSource, layer_ids: Sequence[int], device: torch.device | None
) -> TrainBatch:
    """Return a batch whose states are still to be filled in."""
    shapes = [(*batch.ids.shape, n * source.hidden_size) for n in (len(layer_ids), 1)]
    aux, last = (torch.empty(shape, dtype=source.dtype, device=device) for shape in shapes)
    return replace(batch, aux=aux, last=last)


def _fill(
    batch: TrainBatch, source: FeatureSource, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> TrainBatch:
    places = state_places(batch, [[source.lengths[i] for i in row] for row in rows])
    source.fill([i for row in rows for i in row], places, layer_ids)
    return batch


class Buffer:
    """Memory for a micro-batch at a time. copied: the event behind the copy of the last one to a GPU."""

    def __init__(self, pinned: bool) -> None:
        self._whole, self._pinned = torch.empty(0, dtype=torch.uint8), pinned
        self.piece = self._whole
        self.copied: Any = None

    def take(self, size: int) -> Tensor:
        """Return `size` bytes, as soon as they are not read any more."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        if size > len(self._whole):
            # More than was asked for, as plans differ in size.
            self._whole = torch.empty(size + size // 16, dtype=torch.uint8, pin_memory=self._pinned)
        self.piece = self._whole[:size]
        return self.piece


class Feed:
    """The micro-batches of a training run on one process.

    head: in training mode, whatever becomes of it meanwhile. With `train.workers` 0 a batch is read when it is asked for.
    """

    def __init__(self, data: TrainData, head: DraftHead, spec: TrainSpec, device: torch.device) -> None:
        self._data, self._head, self._spec, self._device = data, copy(head), spec, device
        on_gpu = device.type == "cuda"
        self._buffers = [Buffer(on_gpu) for _ in range(spec.accumulation + spec.workers)]
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._unsent, self._sent = deque[Any](), deque[Any]()
        self._left = deque[Fed]()
        self._sender: Any = None

    def windows(self, micros: Iterable[tuple[Micro, int]]) -> Iterator[list[Fed]]:
        """Yield the micro-batches of each optimizer step, in order. A window's memory is used again once the next one is asked for.
        micros: with the epoch's seed, from which each document's is drawn."""
        waiting, free, reading = iter(micros), deque(self._buffers), deque[Any]()
        self._unsent.clear()
        self._sent.clear()
        ahead = self._spec.workers > 0
        with _threads(self._spec.workers) as readers, _threads(int(ahead and self._side is not None)) as self._sender:
            while True:
                for micro, seed in islice(waiting, len(free)):
                    reading.append(readers.submit(self._read, micro, free.popleft(), seed))
                    if self._side is not None:
                        self._unsent.append(reading[-1])
                if not reading:
                    return
                self._send()
                window = [reading.popleft().result() for _ in range(self._spec.accumulation)]
                self._left = deque(window)
                yield window
                while self._left:  # of a step that was left out
                    self.batch(self._left[0])
                free.extend(fed.buffer for fed in window)

    def batch(self, fed: Fed) -> TrainBatch:
        """Return the batch on the device; the copy of the one behind it begins. In the order of windows, of which some may be left out."""
        first = self._left.popleft()
        assert fed is first, "the batches of a window in order"
        batch = fed.batch if self._side is None else self._arrived(fed)
        if self._data.source.computed_on is not None:
            layer_ids = self._head.reads.layer_ids
            batch = _with_states(batch, self._data.source, layer_ids, batch.ids.device)
            batch = _fill(batch, self._data.source, fed.samples, layer_ids)
        return batch

    def _read(self, micro: Micro, buffer: Buffer, seed: int) -> Fed:
        source, index, layer_ids = self._data.source, self._data.train, self._head.reads.layer_ids
        rows = tuple(tuple(index[i] for i in row) for row in micro.rows)
        seeds = [[row_key(seed, "train", i) for i in row] for row in rows]
        batch = lay_texts([[source.text(i) for i in row] for row in rows], self._spec.row_tokens, seeds=seeds)
        if source.computed_on is None:
            batch = _with_states(batch, source, layer_ids, torch.device("meta"))
        fed = plan_batch(batch, self._head, self._spec.loss, self._device)
        batch = lay(fed.batch, buffer.take)
        batch = batch if source.computed_on is not None else _fill(batch, source, rows, layer_ids)
        return replace(fed, batch=batch, counts=micro.counts, samples=rows, buffer=buffer)

    def _send(self) -> None:
        if self._side is not None and self._unsent and not self._sent:
            self._sent.append(self._sender.submit(self._copy, self._unsent.popleft()))

    def _copy(self, reading: Any) -> TrainBatch:
        fed: Fed = reading.result()
        assert fed.buffer is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            batch: TrainBatch = upload(fed.batch, fed.buffer.piece, self._device)
            fed.buffer.copied = torch.cuda.Event()
            fed.buffer.copied.record(self._side)
        return batch

    def _arrived(self, fed: Fed) -> TrainBatch:
        """Return the copy of a batch, for which what is computed from now on waits."""
        self._send()
        batch: TrainBatch = self._sent.popleft().result()
        assert fed.buffer is not None
        now = torch.cuda.current_stream(self._device)
        now.wait_event(fed.buffer.copied)
        # The allocator knows the side stream alone, on which the memory was asked for.
        batch.ids.record_stream(now)
        self._send()
        return batch


@contextmanager
def _threads(count: int) -> Iterator[Any]:
    """Yield an executor of so many threads, which end with the context; of none, what is submitted runs when its result is asked for."""
    if not count:
        yield SimpleNamespace(submit=lambda work, *given: SimpleNamespace(result=cache(partial(work, *given))))
        return
    pool = ThreadPoolExecutor(count, "feed")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
