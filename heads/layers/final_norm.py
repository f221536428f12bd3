"""Initialise a draft's final norm from the target's, for drafters whose norm feeds the target's output projection.

With a final norm of ones, the draft's logits have another scale and other proportions than the target's: a Llama's norm weights
are far from one. A drafter that starts from the target's weights need not learn them again.

Shapes: B rows, n tokens, Ht target hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.heads.target.probe import is_close, probe_ids
from draftsmith.heads.target.target import Target


@torch.no_grad()
def start_norm(norm: nn.Module, target: Target, scale: float = 1.0) -> float:
    """Copy the weight [Ht] of the target's final norm into the draft's, unless their widths differ or the target's norm is of
    another kind. scale: of the target's logits, where the draft's projection has none of its own. Return the part of the
    scale that is left for the projection: 1 where the norm has taken it."""
    weight, found = norm.weight, final_norm_weight(target)
    if found is None or not isinstance(weight, Tensor) or weight.shape != found.shape:
        return scale
    weight.copy_(found * scale)
    return 1.0


@torch.no_grad()
def final_norm_weight(target: Target) -> Tensor | None:
    """Return w [Ht] in fp32 where the target's final norm is x / rms(x) * w, None where it is of another kind (one that
    subtracts the mean, or has a bias), or is not a module beside the layers.

    It is measured and not looked up, as some architectures store w - 1: a run over a few tokens shows what the norm was
    given and what it made of it.
    """
    seen: list[tuple[Tensor, Any]] = []

    def note(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            seen.append((args[0], output))

    handles = [child.register_forward_hook(note) for child in target.decoder.children()]
    try:
        last_BnH = target.forward(probe_ids(target)).last
    finally:
        for handle in handles:
            handle.remove()
    made = [given for given, output in seen if output is last_BnH]
    if len(made) != 1 or made[0].shape != last_BnH.shape:
        return None
    x_BnH, y_BnH = made[0].float(), last_BnH.float()
    unit_BnH = x_BnH * x_BnH.square().mean(-1, keepdim=True).rsqrt()
    # Least squares per entry: the dtype of the target rounds every single quotient.
    weight_H = (y_BnH * unit_BnH).sum((0, 1)) / unit_BnH.square().sum((0, 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return weight_H if is_close((unit_BnH * weight_H).to(target.dtype), last_BnH) else None
