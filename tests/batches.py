"""Batches for draft heads, made of random documents read by a tiny target."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import compute_features
from draftsmith.heads.base import DraftHead
from draftsmith.heads.export.export import agree
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
    read = [
        [
            compute_features(target, [Tokenized(ids, turns(len(ids)), "", "")], layer_ids, torch.float32)[0]
            for ids in row
        ]
        for row in rows
    ]
    batch = collate(read, width or max(sum(len(ids) for ids in row) for row in rows))
    some = float(
        torch.tensor(target.vocab_size).log()
    )  # in place of 0, at which padding would have a mass beyond all bounds
    return replace(batch, logsumexp=batch.logsumexp.masked_fill(batch.document < 0, some))


def same_logits(a: DraftHead, b: DraftHead, target: Target) -> bool:
    """Whether two heads train from the same logits, up to rounding."""
    batch = pack(target, documents_of(target), a.reads.layer_ids)
    return all(agree(x.logits, y.logits) for x, y in zip(a(batch, 3).steps, b(batch, 3).steps, strict=True))
