"""Sums over rows whose distributions are never all in memory.

A row's loss compares two distributions over the vocabulary. Kept for a backward pass, those of 4,096 rows at 7 steps and 152,000
tokens take tens of gigabytes. Here rows come in pieces, and the gradients of a piece are made right behind its loss, in the
forward pass: what is kept is a gradient of each input, as large as the input. Nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_HALF_SCALE = 1024.0
"""What gradients of fp16 inputs are held at: the loss scale comes later, and small ones would be zero until then."""


class _Ready(torch.autograd.Function):
    """A sum whose gradients are there already: `scale` times the sum has the gradient `gradients` for each of `leaves`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Sequence[Tensor], scale: float, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.scale = scale
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place, as a gradient may be as large as the output projection; a second pass is an error.
        return None, None, None, *(gradient.mul_(d_total / ctx.scale) for gradient in ctx.saved_tensors)


def sum_pieces(
    terms: Callable[..., tuple[Tensor, Tensor]], tensors: Sequence[Tensor], pieces: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sums over all rows of what `terms` returns for some, the first with a gradient of `tensors` and of the parameters
    that `terms` uses.

    Args:
        terms: (number of a piece, its rows of `tensors`) -> a scalar, and figures [...] without gradient. Its first call shows which
            parameters it uses.
        tensors: [R, ...] each.
        pieces: indices of rows; each row is in one of them.

    The gradients of parameters are summed in their own dtype, which is fp32 under autocast.
    """
    graded = torch.is_grad_enabled()
    scale = _HALF_SCALE if any(x.dtype == torch.float16 for x in tensors) else 1.0
    given = [i for i, x in enumerate(tensors) if graded and x.requires_grad]
    gradients = [torch.zeros_like(tensors[i]) for i in given]
    parameters: list[Tensor] = []
    summed: list[Tensor] = []
    sums: list[tuple[Tensor, Tensor]] = []
    for number, rows_R in enumerate(pieces):
        leaves = [x.detach()[rows_R].requires_grad_(i in given) for i, x in enumerate(tensors)]
        # As views: autocast would keep its copies of leaves until the last piece.
        total, figures = terms(number, *(x.view_as(x) for x in leaves))
        sums.append((total.detach(), figures))
        if not total.requires_grad:
            continue
        own = [leaves[i] for i in given]
        first = not parameters
        parameters = parameters or _parameters(total, own)
        of_rows, of_parameters = _gradients(total * scale, own, parameters)
        for into, gradient in zip(gradients, of_rows, strict=True):
            into[rows_R] = gradient
        summed = of_parameters if first else [into.add_(more) for into, more in zip(summed, of_parameters, strict=True)]
        del of_rows, of_parameters  # before the next piece
    total, figures = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
    if graded:
        total = _Ready.apply(total, [*gradients, *summed], scale, *(tensors[i] for i in given), *parameters)
    return total, figures


def _gradients(
    total: Tensor, rows: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of a piece's rows and of parameters; a gradient of nothing is zero."""
    given = [*rows, *parameters]
    found = torch.autograd.grad(total, given, materialize_grads=True) if given else ()
    return list(found[: len(rows)]), list(found[len(rows) :])


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
