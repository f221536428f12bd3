"""Sums over rows whose distributions are never all in memory.

A row's loss compares two distributions over the vocabulary. Kept for a backward pass, those of 4,096 rows at 7 steps and 152,000
tokens take tens of gigabytes. Here rows come in pieces, and the gradients of a piece are made right behind its loss, in the
forward pass: what is kept is a gradient of each input, as large as the input. Nothing is computed twice.

`plan_loss` says before a batch's logits are there which positions the teacher is asked about and which rows each piece has, `divisor_of`
what divides the sum. Pieces go by positions, so that each is asked about once; with D-PACE by blocks, the steps of one row, whose weights
depend on each other.

Shapes: B batch rows, L tokens, R_k rows of step k (flat indices b*L+t), U teacher positions of all steps, S steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import StepOutput
from draftsmith.heads.losses.divergences import Teacher
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.plan import LossPlan


@dataclass(frozen=True)
class Piece:
    """Some rows of some steps, and what the head says of them besides logits.

    Attributes:
        plan: of the loss.
        parts: the steps, their numbers and their rows here.
        teacher: the target's distribution.
        feature, confidence: those of `StepOutput`.
        first_block, blocks: with D-PACE the number of the piece's first block, and how many there may be.
        source, inputs: a step of these, and the rows' `inputs`.
    """

    plan: LossPlan
    parts: Sequence[tuple[StepOutput, int, slice]]
    teacher: Teacher
    feature: Tensor | None
    confidence: Tensor | None
    first_block: int
    blocks: int
    source: StepOutput
    inputs: Sequence[Tensor]

    def of_steps(self, table_S: Tensor) -> Tensor:
        """Return [R, ...], each row's entry of a table [S, ...] of the steps."""
        shape = table_S.shape[1:]
        return joined([table_S[k].expand(own.stop - own.start, *shape) for _, k, own in self.parts])

    @property
    def rows(self) -> Tensor:
        """[R] the flat indices."""
        return joined([step.rows[own] for step, _, own in self.parts])

    @property
    def step(self) -> Tensor:
        """[R] the numbers of the steps."""
        return self.of_steps(torch.arange(len(self.plan.depths_S), device=self.source.rows.device))

    @property
    def positions(self) -> Tensor:
        """[R] the flat indices of the teacher's positions."""
        return joined([step.rows[own] + (1 + step.offset) for step, _, own in self.parts])

    @property
    def block(self) -> Tensor:
        """[R] the number of the row's block among the piece's, with D-PACE."""
        return joined([self.plan.blocks[k][own] for _, k, own in self.parts]) - self.first_block


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; those of one as they are."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


class _Ready(torch.autograd.Function):
    """A sum whose gradients are there already: `scale` times the sum has the gradient `gradients` for each of `leaves`."""

    @staticmethod
    def forward(ctx: Any, total: list[Tensor], gradients: Sequence[Tensor], scale: float, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.scale = scale
        return total[0]  # in a list, so that it is no input, which would have to be copied

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place, as a gradient may be as large as the output projection; a second pass is an error. As a vector of one number,
        # which is not rounded to the dtype of the gradients.
        factor = (d_total / ctx.scale).reshape(1)
        return None, None, None, *(gradient.mul_(factor) for gradient in ctx.saved_tensors)


def sum_pieces(
    terms: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
    pieces: Sequence[Sequence[slice]],
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the sums over all rows of what `terms` returns for some, the first with a gradient of `tensors` and of the parameters
    that `terms` uses.

    Args:
        terms: (number of a piece, its rows of each of `tensors`) -> a scalar, and figures [...] without gradient. Its first call
            shows which parameters it uses.
        tensors: [R_i, ...] each.
        pieces: the rows of each tensor that a piece has; each row is in one piece.
        scale: what the backward pass will multiply the sum by, as near as is known: gradients in fp16 are made at it, so that
            none is too small or too large.

    The gradients of parameters are summed in their own dtype, which is fp32 under autocast.
    """
    graded = torch.is_grad_enabled()
    given = [i for i, x in enumerate(tensors) if graded and x.requires_grad]
    gradients: list[Tensor] = []
    parameters: list[Tensor] = []
    summed: list[Tensor] = []
    sums: list[Tensor] = []
    for number, rows in enumerate(pieces):
        leaves = [
            x.detach()[own].requires_grad_(i in given) for i, (x, own) in enumerate(zip(tensors, rows, strict=True))
        ]
        # As views: autocast would keep its copies of leaves until the last piece.
        total, figures = terms(number, *(x.view_as(x) for x in leaves))
        found = [total.detach(), figures]
        sums = [x + y for x, y in zip(sums, found, strict=True)] if sums else found
        if not total.requires_grad:
            continue
        own = [leaves[i] for i in given]
        first = not gradients and not parameters
        if first:
            gradients, parameters = [torch.empty_like(tensors[i]) for i in given], _parameters(total, own)
        at_scale = torch.full_like(total, scale)
        found = list(torch.autograd.grad(total, [*own, *parameters], at_scale, materialize_grads=True))
        of_parameters = found[len(own) :]
        if own:
            torch._foreach_copy_([x[rows[i]] for x, i in zip(gradients, given, strict=True)], found[: len(own)])
        if first:  # where two parameters are added up, autograd gives one gradient for both
            summed = [x.clone() if any(x is y for y in of_parameters[:i]) else x for i, x in enumerate(of_parameters)]
        else:
            for into, gradient in zip(summed, of_parameters, strict=True):
                into.add_(gradient)
        del found, of_parameters  # before the next piece
    total, figures = sums
    if graded:
        gradients = gradients or [torch.zeros_like(tensors[i]) for i in given]
        total = _Ready.apply([total], [*gradients, *summed], scale, *(tensors[i] for i in given), *parameters)
    return total, figures


def _parameters(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors other than `leaves` that the gradient of `total` arrives at."""
    known, found, queue = {id(x) for x in leaves}, {}, [total.grad_fn]
    seen = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            found[id(variable)] = variable
        queue += [following for following, _ in node.next_functions]
    return list(found.values())


def plan_loss(rows: Sequence[Tensor], offsets: Sequence[int], batch: TrainBatch, spec: LossSpec) -> LossPlan:
    """Return the plan of rows [R_k] and offsets of steps, those of a tuned target (offset -1) behind the others. All on the CPU."""
    asked = [at + 1 + offset for at, offset in zip(rows, offsets, strict=True)]
    positions_U, inverse = torch.unique(torch.cat(asked), return_inverse=True)
    indices = inverse.split([len(at) for at in asked])
    assert all((index.diff() >= 0).all() for index in indices), "the rows of a step ascend"
    weights = None
    if spec.normalize == "sequence":
        counts, key = document_rows(batch, rows[0])
        weights = counts.clamp_min(1.0).reciprocal()[key]
    depths = [spec.step_weight(offset) for offset in offsets if offset >= 0]
    known, blocks = tuple(index.numpy() for index in indices), tuple[Tensor, ...]()
    if spec.dpace:
        blocks = torch.unique(torch.cat([*rows]), return_inverse=True)[1].split([len(at) for at in rows])
    known_blocks = tuple(index.numpy() for index in blocks)
    counts_S = torch.tensor([len(at) for at in rows[: len(depths)]])
    of_steps = (torch.tensor(depths), counts_S, torch.eye(len(depths), dtype=torch.float64))
    return LossPlan(positions_U, indices, known, blocks, known_blocks, weights, *of_steps)


def divisor_of(rows: Sequence[Tensor], batch: TrainBatch, spec: LossSpec) -> Tensor:
    """Return the divisor of `loss_divisor` from the rows of the steps, those of all steps for "weights"."""
    if spec.normalize == "positions":
        return torch.tensor(batch.ids.numel())
    if spec.normalize == "weights":
        counts = torch.tensor([len(at) for at in rows])
        return (counts * torch.tensor([spec.step_weight(k) for k in range(len(rows))], dtype=torch.float32)).sum()
    if spec.normalize == "sequence":
        return document_rows(batch, rows[0])[0].count_nonzero()
    return torch.tensor(len(rows[0]))


def document_rows(batch: TrainBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the rows each document has, and each flat position's document number in that count."""
    marked = torch.zeros(batch.ids.numel(), device=rows.device).index_fill(0, rows, 1.0)
    row = torch.arange(len(batch.ids), device=rows.device)[:, None]
    key = (row * (batch.document.max() + 2) + batch.document + 1).flatten()
    return torch.bincount(key, marked), key
