"""Draft heads with rounded weights, to measure what precision costs: torchao's weight-only quantization of a head's linear layers.

On a GPU the layers keep torchao's tensors, whose kernels then run; elsewhere they get the rounded numbers back in their own dtype, so
that acceptance is that of the quantized head, and speed that of the dtype.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.target.tuned import view_of

BITS: Mapping[str, int] = MappingProxyType({"int8": 8, "int4": 4, "float8": 8})
"""The kinds of weights and their bits: int8 and float8 with a scale per output channel, int4 with one per group of a row."""
_GROUPS = (128, 64, 32)
"""Sizes of the groups of int4; the largest that divides a layer's width is taken."""


def quantize_head(head: DraftHead, kind: str) -> DraftHead:
    """Return a head whose linear layers have the weights that torchao rounds them to; `head` stays as it is, and all that is not
    rounded (embeddings, norms, what belongs to the target) is shared with it.

    int4 leaves layers as they are whose width none of 128, 64 and 32 divides, float8 those with a channel of zeros. Raises UserError where that is every layer, and where
    torchao is not installed.
    """
    try:
        from torchao.quantization import quantize_
    except ImportError as error:
        raise UserError(
            f"evaluate.drafts: weights is {kind}, which needs torchao: pip install 'draftsmith[quant]'."
        ) from error
    found: DraftHead = view_of(head)
    layers = _layers(found, kind)
    if not layers:
        widths = "" if kind != "int4" else f" has a width that one of {', '.join(map(str, _GROUPS))} divides"
        raise UserError(
            f"evaluate.drafts: weights is {kind}: no layer of the {head.method} head{widths}: leave it out or name other heads."
        )
    for module in layers:
        quantize_(module, _config(kind, module.in_features))
        if module.weight.device.type != "cuda":
            rounded = module.weight.dequantize().to(module.weight.dtype)
            module.weight = nn.Parameter(rounded, requires_grad=False)
    return found


def weight_bytes(head: DraftHead, kind: str | None = None) -> int:
    """Return the bytes of a head's trained weights as they are, or with the linear layers as `kind` and their scales."""
    weights = {id(p): float(p.numel() * p.element_size()) for p in head.parameters() if p.requires_grad}
    for module in _layers(head, kind) if kind else ():
        if id(weight := module.weight) in weights:
            group = module.in_features if kind != "int4" else _group(module.in_features)
            scales = weight.numel() // group * weight.element_size()
            weights[id(weight)] = weight.numel() * BITS[str(kind)] / 8 + scales
    return round(sum(weights.values()))


def _layers(head: DraftHead, kind: str) -> list[nn.Linear]:
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if kind == "float8":  # torchao divides a channel by its largest number
        return [module for module in layers if bool(module.weight.any(1).all())]
    return [module for module in layers if kind != "int4" or _group(module.in_features)]


def _group(width: int) -> int:
    return next((size for size in _GROUPS if width % size == 0), 0)


def _config(kind: str, width: int) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, PerGroup

    if kind == "float8":
        return Float8WeightOnlyConfig()
    if kind == "int8":
        return IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_group(width)))  # type: ignore[attr-defined]
