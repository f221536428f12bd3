"""Optimizers and the learning-rate curve.

AdamW for everything, or Muon (Jordan et al. 2024) for the weight matrices inside the head with AdamW for
its output projection, adapters, norms and biases.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from draftsmith.heads.base import DraftHead
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.muon import Muon

_Groups = dict[tuple[float, bool], list[nn.Parameter]]
"""Parameters by the multiple of the learning rate, and by whether they decay."""


def build_optimizers(head: nn.Module, spec: TrainSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a head's trainable parameters, one group per multiple of the learning rate that the head
    names (`DraftHead.lr_factor`), norms and biases apart, which no weight decay pulls to 0; every group remembers its peak
    as `peak_lr`."""
    matrices: _Groups = {}
    others: _Groups = {}
    factor_of = head.lr_factor if isinstance(head, DraftHead) else lambda name: 1.0
    outer = ("lm_head", "embed_tokens", *(head.trains.no_muon if isinstance(head, DraftHead) else ()))
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            inner = parameter.ndim == 2 and not any(part in name for part in outer)
            chosen = matrices if inner and spec.optimizer == "muon" else others
            decays = not spec.weight_decay or parameter.ndim > 1
            chosen.setdefault((factor_of(name), decays), []).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        groups = _groups(matrices, spec.muon_lr)
        optimizers.append(Muon(groups, lr=spec.muon_lr, weight_decay=spec.weight_decay))
    if others:
        betas = (spec.betas[0], spec.betas[1])
        groups = _groups(others, spec.lr)
        optimizers.append(torch.optim.AdamW(groups, lr=spec.lr, betas=betas, weight_decay=spec.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _groups(parameters: _Groups, lr: float) -> list[dict[str, Any]]:
    return [
        {"params": some, "lr": lr * factor} | ({} if decays else {"weight_decay": 0.0})
        for (factor, decays), some in parameters.items()
    ]


def lr_factor(step: int, total: int, spec: TrainSpec) -> float:
    """Return the share of the peak rate at `step` of `total`: linear warmup, then a cosine down to `final_lr`.

    A pure function of the step, so that a resumed run needs no scheduler state.
    """
    warmup = max(1, round(spec.warmup * total))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return spec.final_lr + (1 - spec.final_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_lr(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
