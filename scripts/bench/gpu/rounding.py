"""How far the numbers of a device's fast ways are from exact ones, at the shapes of a large head."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead
from draftsmith.heads.layers.compiled import compiling
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.ttt_attention import eager_ttt_attention, ttt_attention, why_eager
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from scripts.bench.gpu.shapes import STEPS, Facts, Shape, make_batch, make_head, make_target


def numbers(device: torch.device, shape: Shape) -> Facts:
    """Compare attention in bf16 with its definition in float32, and the gradients of a head's step in bf16 with those in float32, over
    one draft step and over all; run both twice."""
    yield "attention", attention(device, shape)
    target = make_target(device, replace(shape, layers=8))
    batch, head = make_batch(target, 1, shape.row).to(device), make_head(target, shape).to(device)
    for steps in (1, STEPS):
        with compiling(None, device):  # as training does
            exact, rounded, again = (_gradients(target, head, batch, steps, half=half) for half in (False, True, True))
        errors = sorted((_error(rounded[name], exact[name]), name) for name in exact)
        facts = {"median": errors[len(errors) // 2][0], "largest": errors[-1][0], "of": errors[-1][1]}
        yield (
            f"gradients of {steps} steps",
            facts | {"same_again": all(torch.equal(rounded[n], again[n]) for n in exact)},
        )


def attention(device: torch.device, shape: Shape) -> dict[str, Any]:
    """Return the errors of a step's attention and of its gradients, two documents to a row, relative to their sizes."""
    D, L = shape.hidden // shape.heads, shape.row
    document = (torch.arange(L)[None] >= L // 2).long().to(device)
    plan = plan_rows(document, torch.ones_like(document, dtype=torch.bool)).pack()
    generator = torch.Generator().manual_seed(0)
    own = (STEPS - 1, L, shape.groups, D)
    sizes = [(L, shape.heads, D), *[(1, L, shape.groups, D)] * 2, own, own]
    inputs = [torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in sizes]
    gradient = torch.randn(sizes[0], generator=generator).to(device, torch.bfloat16)

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*given[:3], given[3:4], given[4:], plan, D**-0.5)
        out.backward(gradient.to(out.dtype))
        return [out.detach(), *(x.grad for x in given if x.grad is not None)]

    fast, exact = run(ttt_attention, torch.bfloat16), run(eager_ttt_attention, torch.float32)
    errors = [_error(a, b) for a, b in zip(fast, exact, strict=True)]
    slow = why_eager(D, torch.bfloat16, device)
    return {
        "kernel": "flash" if slow is None or device.type == "cpu" else f"eager ({slow[0]})",
        "output": errors[0],
        "gradients": dict(zip(("query", "key", "value", "own key", "own value"), errors[1:], strict=True)),
        "same_again": all(torch.equal(a, b) for a, b in zip(fast, run(ttt_attention, torch.bfloat16), strict=True)),
    }


def _gradients(target: Target, head: DraftHead, batch: TrainBatch, steps: int, *, half: bool) -> dict[str, Tensor]:
    head.zero_grad()
    with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
        output = head(batch, steps)
    loss = head_loss(output, batch, target.head, head.draft_vocab, LossSpec(decay=0.8))
    (loss.loss_sum / loss.rows).backward()
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def _error(ours: Tensor, exact: Tensor) -> float:
    """Return the norm of a difference relative to the exact norm."""
    return float((ours.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30))
