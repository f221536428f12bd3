"""Which samples go through a model together: rows packed for training, and batches of one forward pass.

Shapes: B rows, L tokens, A aux layers, Ht target hidden size.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import Features, TrainBatch
from draftsmith.errors import UserError

Row = list[int]
Batch = list[Row]

# Samples are packed among at most this many neighbours of the shuffled order: enough for rows to fill up, and few
# enough that the order stays random.
_NEIGHBOURS = 1024
# A chunk has this many times batch_tokens: long enough for little padding, short enough that its features stay in memory
# (0.5 GB for an 8B target with three layers at the default).
CHUNK_BATCHES = 8


def plan_batches(lengths: Sequence[int], *, row_tokens: int, rows: int, seed: int, epoch: int) -> list[Batch]:
    """Plan one epoch: batches of at most `rows` rows, each a list of sample indices of at most `row_tokens` tokens.

    A pure function of its arguments, so that a run resumes by skipping batches. Every sample appears exactly
    once; only the last batch has fewer rows. Best fit, longest first, among neighbours of the shuffled order.
    Raises UserError for a sample longer than `row_tokens`.
    """
    assert rows > 0, "a batch needs at least one row"
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > row_tokens:
        raise UserError(
            f"Sample number {longest} has {lengths[longest]} tokens and does not fit a row of {row_tokens}: raise "
            "train.row_tokens, or lower data.max_length so that long samples are dropped or truncated before."
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator)
    packed: list[Row] = []
    # Parts of one size: a last one of a few samples would make batches of hardly any.
    for part in order.tensor_split(max(1, -(-len(order) // _NEIGHBOURS))):
        filled = _best_fit(part.tolist(), lengths, row_tokens)
        # Longest first would put the long samples of a part into its first batches.
        packed += [filled[i] for i in torch.randperm(len(filled), generator=generator).tolist()]
    return [packed[start : start + rows] for start in range(0, len(packed), rows)]


def _best_fit(samples: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """Put each sample, longest first, into the row that it leaves least space in."""
    filled: list[Row] = []
    space: list[tuple[int, int]] = []  # (tokens free, row), ascending
    for sample in sorted(samples, key=lengths.__getitem__, reverse=True):
        at = bisect_left(space, (lengths[sample], -1))
        if at < len(space):
            free, row = space.pop(at)
        else:
            free, row = row_tokens, len(filled)
            filled.append([])
        filled[row].append(sample)
        insort(space, (free - lengths[sample], row))
    return filled


def collate(rows: list[list[Features]], length: int, *, seeds: Sequence[Sequence[int]] | None = None) -> TrainBatch:
    """Lay the documents of each row one after the other and pad to `length`.

    Padding has document -1, mask False and zeros elsewhere; positions count from 0 in every document. seeds:
    TrainBatch.seed of each document.
    """
    filled = [sum(len(document.ids) for document in row) for row in rows]
    assert rows, "a batch needs a row"
    assert all(filled), "every row needs a document"
    assert max(filled) <= length, f"a row of {max(filled)} tokens in a batch of {length}"
    return TrainBatch(
        ids=_stack([[d.ids.long() for d in row] for row in rows], length),
        mask=_stack([[d.mask.bool() for d in row] for row in rows], length),
        document=_stack([[torch.full_like(d.ids.long(), n) for n, d in enumerate(row)] for row in rows], length, -1),
        position=_stack([[torch.arange(len(d.ids), device=d.ids.device) for d in row] for row in rows], length),
        aux=_stack([[d.aux for d in row] for row in rows], length),
        last=_stack([[d.last for d in row] for row in rows], length),
        top1=_stack([[d.top1.long() for d in row] for row in rows], length),
        logsumexp=_stack([[d.logsumexp.float() for d in row] for row in rows], length),
        seed=None if seeds is None else _stack(_repeat(seeds, rows), length),
    )


def _repeat(seeds: Sequence[Sequence[int]], rows: list[list[Features]]) -> list[list[Tensor]]:
    pairs = (zip(row, documents, strict=True) for row, documents in zip(seeds, rows, strict=True))
    return [[torch.full_like(d.ids, seed, dtype=torch.int64) for seed, d in row] for row in pairs]


def _stack(rows: list[list[Tensor]], length: int, padding: int = 0) -> Tensor:
    """Return [B, length, ...] from each row's documents [L, ...]; one allocation, each value copied once."""
    first = rows[0][0]
    out = first.new_full((len(rows), length, *first.shape[1:]), padding)
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            out[b, start : start + len(document)] = document
            start += len(document)
    return out


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples start..end-1 and the forward passes that compute them, each a tuple of sample numbers."""

    start: int
    end: int
    batches: tuple[tuple[int, ...], ...]


def plan_passes(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, ...]]:
    """Group numbers 0..len-1 by falling length so that rows * longest row <= batch_tokens (one row may exceed it)."""
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if current and (len(current) + 1) * lengths[current[0]] > batch_tokens:
            batches.append(tuple(current))
            current = []
        current.append(number)
    return [*batches, tuple(current)] if current else batches


def plan_chunks(lengths: Sequence[int], batch_tokens: int) -> list[Chunk]:
    """Cut the samples, in order, into chunks and each chunk into forward passes.

    A pure function of its arguments: the rounding of a state depends on the batch it was computed in, so a resumed run
    must form the same batches.
    """
    chunks: list[Chunk] = []
    start = tokens = 0
    for end, length in enumerate(lengths, start=1):
        tokens += length
        if tokens >= CHUNK_BATCHES * batch_tokens or end == len(lengths):
            batches = plan_passes(lengths[start:end], batch_tokens)
            chunks.append(Chunk(start, end, tuple(tuple(start + i for i in batch) for batch in batches)))
            start, tokens = end, 0
    return chunks
