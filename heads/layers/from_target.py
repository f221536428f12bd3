"""What a new draft takes over from its target: the scale that it reads embeddings at, and the weights of its final norm.

Shapes: B rows, n tokens, Ht target hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.target.pretrained import is_close, probe_ids
from draftsmith.target.target import Target


def embedding_scale(target: Target) -> float:
    """Return what EAGLE-1 and Hydra multiply embeddings by to bring them to the size of the target's last states: a power of two, so
    that exports, which multiply it into the matrix (`fold`), hold the same numbers.

    Embeddings have a tenth of the states' size or less. Where one matrix reads both as they are, an optimizer step changes the
    response to the state far more than that to the token, which is then learned late.
    """
    state, token = sizes(target)
    return float(2 ** (state / token.clamp_min(1e-9)).log2().round())


@torch.no_grad()
def sizes(target: Target) -> tuple[Tensor, Tensor]:
    """Return the root mean squares of the target's last states and of its embeddings: medians over random tokens, since
    the states of single tokens can be a thousand times larger."""
    ids = probe_ids(target)
    state, token = (
        x.float().square().mean(-1).sqrt().median() for x in (target.forward(ids).last, target.embedding[ids])
    )
    return state, token


def fold(weight: Tensor, tokens: slice, scale: float) -> Tensor:
    """Return the matrix that reads embeddings as they are, from one that reads scaled ones in the columns `tokens`."""
    folded = weight.clone()
    folded[:, tokens] *= scale
    return folded


@torch.no_grad()
def start_norm(norm: nn.Module, target: Target, scale: float = 1.0) -> float:
    """Copy the weight [Ht] of the target's final norm into the draft's, so that its logits start with the target's proportions.

    Nothing is copied where the widths differ or the target's norm is of another kind. Weights above the size of the target's last
    states are scaled down to it, to a power of two: Gemma's are largest where its states are next to nothing, which a draft's are
    not yet.

    Args:
        norm: the draft's final norm, which feeds the target's output projection or a copy of it.
        target: the target.
        scale: of the target's logits, where the draft's projection has none of its own.

    Returns:
        The factor that the projection still needs: 1 where the norm has taken `scale`.
    """
    weight, target_weight = norm.weight, final_norm_weight(target)
    if target_weight is None or not isinstance(weight, Tensor) or weight.shape != target_weight.shape:
        return scale
    size = float(2 ** (sizes(target)[0] / target_weight.square().mean().sqrt()).log2().round())
    weight.copy_(target_weight * scale * min(size, 1.0))
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
