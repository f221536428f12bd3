"""The values that data passes to heads (samples, hidden states, batches), and which samples go through a model together.

Shapes: B batch rows, L tokens, A aux layers, Ht target hidden size. In `Pass`: M documents of one pass, n its longest, R their tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.memory import move
from draftsmith.errors import UserError


@dataclass(frozen=True)
class Tokenized:
    """One conversation as the target reads it.

    ids: [L] int64 token ids. mask: [L] bool, True where the token is an assistant token to learn
    (tokens that the template forces belong to the prompt). sample_id names the source line, slice
    is any word that groups samples in reports. conversation: where several samples are turns of one, its id.
    """

    ids: Tensor
    mask: Tensor
    sample_id: str
    slice: str
    conversation: str | None = None


@dataclass(frozen=True)
class Features:
    """What the frozen target computed for one Tokenized.

    aux: [L, A*Ht] residual streams entering the aux layers, concatenated in layer order.
    last: [L, Ht] post-final-norm states. top1: [L] int32 argmax and logsumexp: [L] float32 of the
    target's full-vocabulary logits at each position (both describe the distribution of the *next* token).
    """

    ids: Tensor
    mask: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    logsumexp: Tensor
    sample_id: str
    slice: str


@dataclass(frozen=True)
class States:
    """What the target computed for R tokens, or where it belongs: see Features."""

    aux: Tensor
    last: Tensor
    top1: Tensor
    logsumexp: Tensor

    def copy_(self, other: "States | Features") -> None:
        """Copy the values of as many tokens."""
        for name, part in vars(self).items():
            part.copy_(getattr(other, name))


@dataclass(frozen=True)
class TrainBatch:
    """Documents packed into rows: everything a head needs for one training pass.

    ids [B, L] int64; mask [B, L] bool; document [B, L] int64, a number per document within the row
    and -1 on padding; position [B, L] int64, counted from 0 in every document; aux [B, L, A*Ht];
    last [B, L, Ht]; top1 [B, L] int64; logsumexp [B, L] float32. seed [B, L] int64: a number per document and epoch,
    the same at each of its tokens, for what training draws by chance (noise, samples of rows), so that the draw is the
    same however documents are packed and shared out; None means zeros. plan: the `Plan` of heads/plan.py, made for one head.
    """

    ids: Tensor
    mask: Tensor
    document: Tensor
    position: Tensor
    aux: Tensor
    last: Tensor
    top1: Tensor
    logsumexp: Tensor
    seed: Tensor | None = None
    plan: Any = None

    @property
    def seeds(self) -> Tensor:
        """The seeds [B, L], zeros where there are none."""
        return torch.zeros_like(self.ids) if self.seed is None else self.seed

    def without_states(self) -> "TrainBatch":
        """Return the same batch with `aux` and `last` of width 0: enough to count rows, without most of the bytes."""
        none = torch.empty(*self.ids.shape, 0, device=self.ids.device)
        return replace(self, aux=none, last=none)

    def to(self, device: torch.device | str) -> "TrainBatch":
        """Return the same batch on `device`."""
        moved: TrainBatch = move(self, device)
        return moved


Row = list[int]
Batch = list[Row]

WINDOW_SHARDS = 32
"""Shards whose samples are shuffled together: few enough to stay open, and enough that the order is random."""
# Samples are packed among at most this many neighbours of the shuffled order: enough for rows to fill up, and few
# enough that the order stays random.
_NEIGHBOURS = 1024
# A chunk has this many times batch_tokens: long enough for little padding, short enough that its features stay in memory
# (0.5 GB for an 8B target with three layers at the default).
CHUNK_BATCHES = 8


def plan_batches(
    lengths: Sequence[int], *, row_tokens: int, rows: int, seed: int, epoch: int, shards: Tensor | None = None
) -> list[Batch]:
    """Plan one epoch: batches of at most `rows` rows, each a list of sample indices of at most `row_tokens` tokens.

    A pure function of its arguments, so that a run resumes by skipping batches. Every sample appears exactly
    once; only the last batch has fewer rows. Best fit, longest first, among neighbours of the shuffled order.
    shards: number of the file of each sample, None where they lie in none. Files are shuffled, and samples among those of
    WINDOW_SHARDS files, so that an epoch reads each file in one stretch.
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
    packed: list[Row] = []
    for window in _windows(len(lengths), shards, generator):
        # Parts of one size: a last one of a few samples would make batches of hardly any.
        for part in window.tensor_split(max(1, -(-len(window) // _NEIGHBOURS))):
            filled = _best_fit(part.tolist(), lengths, row_tokens)
            # Longest first would put the long samples of a part into its first batches.
            packed += [filled[i] for i in torch.randperm(len(filled), generator=generator).tolist()]
    return [packed[start : start + rows] for start in range(0, len(packed), rows)]


def _windows(count: int, shards: Tensor | None, generator: torch.Generator) -> list[Tensor]:
    """Return the numbers 0..count-1, shuffled, in windows of few shards; one window where there are few or none."""
    order = torch.randperm(count, generator=generator)
    if shards is None:
        return [order]
    present, shard = shards.unique(return_inverse=True)
    windows = -(-len(present) // WINDOW_SHARDS)
    if windows < 2:
        return [order]
    # Windows of one size, as with parts.
    window = torch.randperm(len(present), generator=generator)[shard] * windows // len(present)
    return list(order[window[order].argsort(stable=True)].split(window.bincount().tolist()))


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


def lay_texts(
    rows: Sequence[Sequence[tuple[Tensor, Tensor]]], length: int, *, seeds: Sequence[Sequence[int]] | None = None
) -> TrainBatch:
    """Lay documents, each its ids and mask, one after the other in rows that are padded to `length`; their states have width 0.

    Padding has document -1, mask False and zeros elsewhere; positions count from 0 in every document. seeds:
    TrainBatch.seed of each document.
    """
    filled = [sum(len(ids) for ids, _ in row) for row in rows]
    assert rows, "a batch needs a row"
    assert all(filled), "every row needs a document"
    assert max(filled) <= length, f"a row of {max(filled)} tokens in a batch of {length}"
    ids, position = torch.zeros(2, len(rows), length, dtype=torch.int64)
    document, mask, seed = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    for b, row in enumerate(rows):
        start = 0
        for number, (own, learned) in enumerate(row):
            here = slice(start, start + len(own))
            ids[b, here], mask[b, here], document[b, here] = own, learned, number
            position[b, here] = torch.arange(len(own))
            if seeds is not None:
                seed[b, here] = seeds[b][number]
            start += len(own)
    zeros = torch.zeros(len(rows), length)
    none, top1 = zeros[..., None][..., :0], torch.zeros_like(ids)
    return TrainBatch(ids, mask, document, position, none, none, top1, zeros, None if seeds is None else seed)


def state_places(batch: TrainBatch, lengths: Sequence[Sequence[int]]) -> list[States]:
    """Return where the states of each document of a batch lie, row by row; what lies behind the documents is set to 0."""
    parts, places = (batch.aux, batch.last, batch.top1, batch.logsumexp), []
    for b, row in enumerate(lengths):
        start = 0
        for length in row:
            places.append(States(*(part[b, start : start + length] for part in parts)))
            start += length
        for part in parts[:2]:
            part[b, start:].zero_()
    return places


def collate(rows: list[list[Features]], length: int, *, seeds: Sequence[Sequence[int]] | None = None) -> TrainBatch:
    """Lay documents with their states one after the other in rows, as `lay_texts` does."""
    batch = lay_texts([[(d.ids, d.mask) for d in row] for row in rows], length, seeds=seeds)
    states = [torch.empty(*batch.ids.shape, x.shape[-1], dtype=x.dtype) for x in (rows[0][0].aux, rows[0][0].last)]
    batch = replace(batch, aux=states[0], last=states[1])
    places = state_places(batch, [[len(d.ids) for d in row] for row in rows])
    for place, document in zip(places, (document for row in rows for document in row), strict=True):
        place.copy_(document)
    return batch


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


@dataclass(frozen=True)
class Pass:
    """Some documents, a padded row each, for models that read a document a row. positions_Mn: flat indices b*L+t of
    their tokens, a document's first one on its padding. places_R: where in M*n their tokens stand. positions_R: flat indices of these."""

    positions_Mn: Tensor
    places_R: Tensor
    positions_R: Tensor


def plan_documents(document_BL: Tensor, most_tokens: int) -> tuple[Pass, ...]:
    """Return passes over all documents (id >= 0), of at most so many tokens each, padding included; a longer document is alone."""
    L, flat = document_BL.shape[1], document_BL.flatten()
    before = torch.cat([flat.new_full((1,), -1), flat[:-1]])
    begins = (flat != before).logical_or_(torch.arange(len(flat)) % L == 0).nonzero().flatten()
    lengths = torch.diff(begins, append=begins.new_tensor([len(flat)]))
    real = flat[begins] >= 0
    starts, lengths = begins[real], lengths[real]
    passes = []
    for group in plan_passes(lengths.tolist(), most_tokens):
        start_M1, length_M1 = (x[list(group)][:, None] for x in (starts, lengths))
        step_n = torch.arange(int(length_M1.max()))
        real_Mn = step_n < length_M1
        positions_Mn = (start_M1 + step_n).where(real_Mn, start_M1)
        places_R = real_Mn.flatten().nonzero().flatten()
        passes.append(Pass(positions_Mn, places_R, positions_Mn.flatten()[places_R]))
    return tuple(passes)
