"""Products of a few rows with frozen weights on a CPU, by a copy of the weights that oneDNN has laid out for it.

A round multiplies some tokens' states with every matrix of the target and of the draft. For 2 to 32 rows oneDNN takes 0.5 to 1.0 of
the time where it need not read the matrix as PyTorch stores it; for one row, for many, and for small matrices it takes longer
(measured per shape: docs/results/decoder/products.json). Results differ from `F.linear` by rounding.
"""

from functools import cache
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

ROWS = range(2, 33)
"""Numbers of rows that are multiplied with packed weights."""
SMALLEST = 300_000
"""The smallest matrix that is packed, in elements."""
_MEMORY_SHARE = 0.25
"""Share of the free memory that the packed copies of a model may take."""

_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weights to (data_ptr, version, packed copy); a copy lives as long as its weights."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x [..., k] and weight [n, k], from packed weights where that is faster.

    Without gradients only; a weight that was changed in place is packed again. Weights that are not kept by a module should not
    come here, as each is packed once.
    """
    if x.numel() // x.shape[-1] not in ROWS or not _packs(x, weight):
        return F.linear(x, weight, bias)
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    kept = _packed.get(weight)
    if kept is None or kept[0] != state:
        with torch.inference_mode(False):
            kept = _packed[weight] = (state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS[0]))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, kept[1], bias, "none", [], "")
    return product


def _packs(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is one that packed weights are for."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and weight.numel() >= SMALLEST
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and _has_kernel()
    )


@cache
def _has_kernel() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Linear):
    """A linear layer whose product is `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n] of x [..., k]."""
        return linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Let every plain linear layer of a frozen model on a CPU multiply with packed weights, if copies of them fit well in memory."""
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and m.weight.numel() >= SMALLEST]
    copies = sum(m.weight.numel() * m.weight.element_size() for m in layers if m.weight.device.type == "cpu")
    if copies <= _MEMORY_SHARE * psutil.virtual_memory().available:
        for module in layers:
            module.__class__ = PackedLinear
