"""Plan the attention of a training pass: which rows of a batch are queries, and the keys that each may see.

Shapes: B batch rows, L tokens, R query rows (flat b*L+t), n documents of a group, m its longest, T tokens of all
documents up to their last query row.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from draftsmith.target.kernels import upload

BUCKET = 32  # documents whose lengths round up to the same multiple share a call


@dataclass(frozen=True)
class Group:
    """Documents of about one length, a line each, up to their last query row.

    tokens_nm: flat index of each token, B*L past a document's end. queries_nm: its index among the query rows,
    R where it is none of them.
    """

    tokens_nm: Tensor
    queries_nm: Tensor


@dataclass(frozen=True)
class Packed:
    """The same documents end to end, without padding.

    tokens_T: flat index of each token. place_R: the index in T of each query row. starts: [documents + 1] int32, where
    each document starts, and T. longest: tokens of the longest document.
    """

    tokens_T: Tensor
    place_R: Tensor
    starts: Tensor
    longest: int


@dataclass(frozen=True)
class RowPlan:
    """The query rows of a batch and the keys they see: the rows of their own document up to themselves.

    rows: [R] int64 flat indices of the queries, ascending. documents: [B, L] numbers that differ between any two
    documents of the batch. spans: (first flat index, tokens up to the last query row) of the documents with query rows,
    ascending. window: how many tokens each row sees, its own the last of them; None for all. packed: see `pack`.
    """

    rows: Tensor
    documents: Tensor
    spans: tuple[tuple[int, int], ...]
    window: int | None = None
    packed: Packed | None = None

    def within(self, window: int | None) -> "RowPlan":
        """Return the plan in which the same rows see no more than `window` tokens."""
        return self if window == self.window else replace(self, window=window)

    def ranks(self, key_R: Tensor) -> Tensor:
        """Return [R]: the place of each query row in the ascending order of its document's keys."""
        number_R = self.documents.flatten()[self.rows]
        order = key_R.argsort(stable=True)
        order = order[number_R[order].argsort(stable=True)]
        place_R = torch.empty_like(order)
        place_R[order] = torch.arange(len(order), device=order.device)
        return place_R - torch.searchsorted(number_R, number_R)

    @cached_property
    def context(self) -> "RowPlan":
        """The plan in which every token that a query row may see is a query row."""
        device = self.rows.device
        if self.packed is not None:
            rows = self.packed.tokens_T
            return replace(self, rows=rows, packed=replace(self.packed, place_R=torch.arange(len(rows), device=device)))
        tokens = [torch.arange(first, first + length, device=device) for first, length in self.spans]
        return replace(self, rows=torch.cat(tokens) if tokens else self.rows)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The documents grouped by length, for kernels that take lines of one length."""
        device, past = self.rows.device, self.documents.numel()
        query_index = torch.full((past + 1,), len(self.rows), device=device)
        query_index[self.rows] = torch.arange(len(self.rows), device=device)
        groups = []
        by_length = sorted(self.spans, key=lambda span: span[1])
        for _, members in groupby(by_length, key=lambda span: -(-span[1] // BUCKET)):
            first, length = torch.tensor(list(members), device=device).T[..., None]
            offset = torch.arange(int(length.max()), device=device)
            tokens_nm = torch.where(offset < length, first + offset, past)
            groups.append(Group(tokens_nm, query_index[tokens_nm]))
        return tuple(groups)

    def pack(self) -> "RowPlan":
        """Return the plan with the documents end to end, for kernels that take documents of any length."""
        if not self.spans:
            return self
        device = self.rows.device
        first, length = upload(self.spans, device).T
        starts = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        total = sum(tokens for _, tokens in self.spans)
        shift = torch.repeat_interleave(first - starts[:-1], length, output_size=total)
        number = torch.arange(total, device=device)
        tokens_T = number + shift
        index = torch.empty(self.documents.numel(), dtype=torch.int64, device=device)
        index[tokens_T] = number
        longest = max(tokens for _, tokens in self.spans)
        return replace(self, packed=Packed(tokens_T, index[self.rows], starts.int(), longest))


def plan_rows(document_BL: Tensor, needed_BL: Tensor) -> RowPlan:
    """Return the plan whose query rows are marked in `needed_BL` (bool); each must lie in a document (id >= 0)."""
    assert not (needed_BL & (document_BL < 0)).any(), "a row in the padding cannot be supervised"
    before_BL = torch.nn.functional.pad(document_BL[:, :-1], (1, 0), value=-2)
    starts_BL = document_BL != before_BL
    number_BL = starts_BL.flatten().cumsum(0).unflatten(0, starts_BL.shape) - 1
    rows = needed_BL.flatten().nonzero()[:, 0]
    start = starts_BL.flatten().nonzero()[:, 0]
    stop = start.scatter_reduce(0, number_BL.flatten()[rows], rows + 1, "amax")
    spans = tuple((a, b - a) for a, b in torch.stack((start, stop), 1).tolist() if b > a)
    return RowPlan(rows, number_BL, spans)
