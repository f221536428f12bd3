"""What a training pass needs to know of a batch's tokens, masks and documents: found on the CPU, before the step, so that the step has
nothing to ask of the device.

Shapes: B batch rows, L tokens, R_k rows of step k (flat indices b*L+t), U teacher positions of all steps, S steps.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import Pass, TrainBatch
from draftsmith.heads.layers.row_plan import RowPlan, plan_rows


@dataclass(frozen=True)
class Span:
    """What a piece has: of the positions, and of the rows of each step."""

    positions: slice
    rows: list[slice]


@dataclass(frozen=True)
class LossPlan:
    """What the loss needs to know: which positions the teacher is asked about, and which rows each piece has.

    positions_U: flat indices of the positions that the teacher is asked about, ascending.
    indices: [R_k] of each step, the number of each row's position.
    known: the same, for the host.
    blocks: [R_k] of each step, the number of each row's block, with D-PACE; else none.
    known_blocks: the same, for the host.
    weights: [B*L] weights of rows, None where all are 1.
    depths_S: weights of the steps.
    counts_S: the rows of each step.
    places_SS: the unit matrix in float64: by it, figures of rows become sums by step.
    """

    positions_U: Tensor
    indices: tuple[Tensor, ...]
    known: tuple[np.ndarray, ...]
    blocks: tuple[Tensor, ...]
    known_blocks: tuple[np.ndarray, ...]
    weights: Tensor | None
    depths_S: Tensor
    counts_S: Tensor
    places_SS: Tensor

    def spans(self, count: int) -> list[Span]:
        """Return the pieces of `count` positions, or blocks."""
        by = self.known_blocks or self.known
        units = 1 + max((int(index[-1]) for index in by if len(index)), default=0)
        edges_P = np.arange(0, units, count)
        begins = list(zip(*(np.searchsorted(index, edges_P).tolist() for index in by), strict=True))
        ends = [*begins[1:], [len(index) for index in by]]
        pieces = [[slice(*span) for span in zip(*both, strict=True)] for both in zip(begins, ends, strict=True)]
        if not self.known_blocks:
            return [Span(slice(edge, edge + count), rows) for edge, rows in zip(edges_P.tolist(), pieces, strict=True)]
        return [Span(self._asked(rows), rows) for rows in pieces]

    def _asked(self, rows: list[slice]) -> slice:
        """Return the positions from the first to the last that these rows of the steps ask about."""
        asked = [index[own] for index, own in zip(self.known, rows, strict=True) if own.stop > own.start]
        return slice(min((int(at[0]) for at in asked), default=0), max((int(at[-1]) + 1 for at in asked), default=0))


@dataclass(frozen=True)
class Plan:
    """What `DraftHead.plan` found; it travels with the batch.

    Attributes:
        made_for: the number of steps asked for, and whether the head was in training mode.
        rows: [R_k] of each step, ascending: those that `DraftHead.supervised` names.
        among: [R_k] of each step, where its rows stand among those that the method computed before.
        queries: the rows whose attention is computed, by pieces or by steps.
        passes: the documents, for a model that reads them unpacked.
        tuned: [R] the rows of a tuned target's loss.
        draw: what seeds dropout inside of others' layers.
        loss: what the loss needs to know, where its settings were known.
    """

    made_for: tuple[int, bool]
    rows: tuple[Tensor, ...]
    among: tuple[Tensor, ...] = ()
    queries: tuple[RowPlan, ...] = ()
    passes: tuple[Pass, ...] = ()
    tuned: Tensor | None = None
    draw: int | None = None
    loss: LossPlan | None = None

    @property
    def scored(self) -> list[tuple[int, Tensor]]:
        """The offsets and rows of the steps, and behind them those of a tuned target."""
        return [*enumerate(self.rows), *([] if self.tuned is None else [(-1, self.tuned)])]

    def laid_out(self, device: torch.device) -> "Plan":
        """Return the plan with what the kernels of a device need besides."""
        if device.type != "cuda":
            return self
        return replace(self, queries=tuple(queries.pack() for queries in self.queries))


def flat_rows(mask_BL: Tensor) -> Tensor:
    """Return the flat indices [R] of the rows marked in a mask, ascending."""
    return mask_BL.flatten().nonzero().flatten()


def plan_queries(batch: TrainBatch, rows: Tensor) -> RowPlan:
    """Return the plan whose query rows are the flat indices `rows`."""
    needed = torch.zeros(batch.ids.numel(), dtype=torch.bool).index_fill(0, rows, True)
    return plan_rows(batch.document, needed.view_as(batch.ids))
