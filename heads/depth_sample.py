"""Which rows a head that drafts in parallel is trained on at each depth: fewer the deeper, by a draw per document.

All depths of all rows would be as many times the rows as there are depths. Shapes: B batch rows, L tokens, R rows of one
depth (flat b*L+t), U rows of depth 0.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.noise import SAMPLE, uniforms
from draftsmith.heads.row_plan import plan_rows


class Shares(Protocol):
    """How many rows are kept: of n rows of a document at depth d int((n - d) * max(keep**d, keep_min))."""

    @property
    def keep(self) -> float: ...
    @property
    def keep_min(self) -> float: ...
    @property
    def steps(self) -> int: ...


def sample_depths(batch: TrainBatch, masks: Iterator[Tensor], shares: Shares) -> Iterator[Tensor]:
    """Yield the rows [B, L] bool of depth 0, 1, ..., `shares.steps` of them: all that `masks` yields first, then of those
    kept before which `masks` still counts as many as `shares` says, or all where there are no more.

    The draw is by the documents' seeds and the rows' positions alone: the same however documents are packed.
    """
    first_BL = next(masks)
    plan = plan_rows(batch.document, first_BL)
    number_U = plan.documents.flatten()[plan.rows]
    count_D = torch.bincount(number_U, minlength=int(plan.documents.max()) + 1)
    seeds_U, place_U = batch.seeds.flatten()[plan.rows], batch.position.flatten()[plan.rows]
    uniform_US = uniforms(seeds_U, place_U, SAMPLE, shares.steps)
    kept_U = torch.ones_like(plan.rows, dtype=torch.bool)
    yield first_BL
    for depth in range(1, shares.steps):
        pool_U = kept_U & next(masks).flatten()[plan.rows]
        share = max(shares.keep**depth, shares.keep_min)
        wanted_D = ((count_D - depth).clamp(min=0).double() * share).long()
        rank_U = _ranks(number_U, torch.where(pool_U, uniform_US[:, depth], 2.0), count_D)
        kept_U = pool_U & (rank_U < wanted_D[number_U])
        yield torch.zeros_like(first_BL).flatten().index_fill(0, plan.rows[kept_U], True).view_as(first_BL)


def _ranks(number_U: Tensor, key_U: Tensor, count_D: Tensor) -> Tensor:
    """Return each row's place in the ascending order of the keys of its document; number_U is ascending."""
    order = key_U.argsort(stable=True)
    order = order[number_U[order].argsort(stable=True)]
    start_D = count_D.cumsum(0) - count_D
    place_U = torch.empty_like(order)
    place_U[order] = torch.arange(len(order), device=order.device)
    return place_U - start_D[number_U]
