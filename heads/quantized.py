"""Draft heads with rounded weights, to measure what precision costs in acceptance: weight-only quantization of a head's linear layers.

The numbers are those of torchao's Int8WeightOnly, Int4WeightOnly (symmetric) and Float8WeightOnly rules, or bfloat16, given back in the
head's own dtype: acceptance is that of the quantized head on any device, and speed that of the dtype; of bfloat16 on a CPU it is more, see
`draftsmith.target.kernels`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.target.tuned import view_of

BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4, "float8": 8, "bfloat16": 16})
"""The kinds of weights and their bits: int8 and float8 (e4m3) with a scale per output channel, int4 with one per group of a row,
bfloat16 with none."""
_GROUPS = (128, 64, 32)
"""Sizes of the groups of int4; the largest that divides a layer's width is taken."""


@torch.no_grad()
def quantize_head(head: DraftHead, kind: str) -> DraftHead:
    """Return a head whose linear layers have rounded weights; `head` stays as it is, and all that is not rounded (embeddings, norms,
    what belongs to the target) is shared with it.

    int4 leaves layers as they are whose width none of 128, 64 and 32 divides. Raises UserError where that is every layer.
    """
    rounded = view_of_head(head)
    layers = _layers(rounded, kind)
    if not layers:
        widths = "" if kind != "int4" else f" has a width that one of {', '.join(map(str, _GROUPS))} divides"
        raise UserError(
            f"evaluate.drafts: weights is {kind}: no layer of the {head.method} head{widths}: leave it out or name other heads."
        )
    for module in layers:
        module.weight = nn.Parameter(round_weights(module.weight, kind), requires_grad=False)
    return rounded


def view_of_head(head: DraftHead) -> DraftHead:
    """Return a head that shares all tensors with `head`, those of its target too, and whose modules, mode and dtype are its own."""
    # Outside its modules; of Medusa-2 the tuned target, too.
    of_target = (*head._target_head, *getattr(head, "_tuned", ()), getattr(head, "merged", None))
    view: DraftHead = view_of(head, [one for one in of_target if one is not None])
    return view


def round_weights(weight: Tensor, kind: str) -> Tensor:
    """Return weights [n, k] rounded to a kind, in their own dtype.

    Integers of b bits lie on multiples of a scale s = max|w| / ((2^b - 1) / 2), from -2^(b-1) to 2^(b-1) - 1; float8 is the nearest
    e4m3 number of w / s, s = max|w| / 448 (torchao: choose_qparams_affine with a symmetric mapping; Float8Tensor.from_hp).
    """
    if kind == "bfloat16":
        return weight.bfloat16().to(weight.dtype)
    wide = weight.float() if weight.dtype == torch.float16 else weight  # whose smallest scales would be 0
    groups = wide.unflatten(1, (-1, _group(weight.shape[1]) if kind == "int4" else weight.shape[1]))
    largest = groups.abs().amax(2, keepdim=True)
    if kind == "float8":
        scale = (largest / 448).float().clamp(min=torch.finfo(torch.float32).tiny)  # a channel of zeros stays one
        rounded = (groups.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    else:
        half = 2 ** (BITS[kind] - 1)
        scale = (largest / (half - 0.5)).clamp(min=torch.finfo(torch.float32).eps)
        rounded = (groups * (1 / scale)).round().clamp(-half, half - 1) * scale
    return rounded.to(weight.dtype).flatten(1)


def weight_bytes(head: DraftHead, kind: str | None = None) -> int:
    """Return the bytes of a head's weights as they are, or with the linear layers as `kind` and their scales: what was trained, and an output
    projection that was kept as it was."""
    held = (p for name, p in head.named_parameters() if p.requires_grad or name.startswith("lm_head."))
    weights = {id(p): float(p.numel() * p.element_size()) for p in held}
    for module in _layers(head, kind) if kind else ():
        if id(weight := module.weight) in weights:
            group = module.in_features if kind != "int4" else _group(module.in_features)
            scales = 0 if kind == "bfloat16" else weight.numel() // group * weight.element_size()
            weights[id(weight)] = weight.numel() * BITS[str(kind)] / 8 + scales
    return round(sum(weights.values()))


def _layers(head: DraftHead, kind: str) -> list[nn.Linear]:
    layers = [module for module in head.modules() if isinstance(module, nn.Linear) and module.weight is not None]
    return [module for module in layers if kind != "int4" or _group(module.in_features)]


def _group(width: int) -> int:
    return next((size for size in _GROUPS if width % size == 0), 0)
