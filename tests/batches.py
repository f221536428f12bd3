"""Batches for draft heads, made of random documents read by a tiny target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.target.target import Target

# Lengths of the documents of each batch row; what is left of a row is padding.
PACKED = ((9, 14, 5), (30,), (3, 17))


def documents_of(target: Target, lengths: Sequence[Sequence[int]] = PACKED, seed: int = 0) -> list[list[Tensor]]:
    """Return random token ids [n] per document and row."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(3, target.vocab_size, (n,), generator=generator) for n in row] for row in lengths]


def turns(length: int) -> Tensor:
    """Return a mask [n] with a prompt of 2, an answer of 6, a gap of 3, and an answer for the rest."""
    mask = torch.ones(length, dtype=torch.bool)
    mask[:2] = False
    mask[8:11] = False
    return mask


def pack(
    target: Target, rows: Sequence[Sequence[Tensor]], layer_ids: tuple[int, ...], width: int | None = None
) -> TrainBatch:
    """Let the target read every document alone, and pack them into rows of `width` tokens."""
    B, L = len(rows), width or max(sum(len(d) for d in row) for row in rows)
    H, V = target.hidden_size, target.vocab_size
    batch = TrainBatch(
        ids=torch.zeros(B, L, dtype=torch.int64),
        mask=torch.zeros(B, L, dtype=torch.bool),
        document=torch.full((B, L), -1),
        position=torch.zeros(B, L, dtype=torch.int64),
        aux=torch.zeros(B, L, len(layer_ids) * H),
        last=torch.zeros(B, L, H),
        top1=torch.zeros(B, L, dtype=torch.int64),
        logsumexp=torch.full((B, L), float(torch.tensor(V).log())),
    )
    for b, row in enumerate(rows):
        start = 0
        for number, ids in enumerate(row):
            place = slice(start, start + len(ids))
            seen = target.forward(ids[None], layer_ids=layer_ids)
            logits = target.head.logits(seen.last[0])
            batch.ids[b, place], batch.mask[b, place] = ids, turns(len(ids))
            batch.document[b, place], batch.position[b, place] = number, torch.arange(len(ids))
            batch.aux[b, place], batch.last[b, place] = seen.aux[0], seen.last[0]
            batch.top1[b, place], batch.logsumexp[b, place] = logits.argmax(-1), logits.logsumexp(-1)
            start += len(ids)
    return batch
