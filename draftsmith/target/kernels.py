"""What a frozen model computes faster than transformers does, with the same numbers or up to rounding.

- Products on a CPU, by a copy of the weights that oneDNN has laid out for it: 0.5 to 0.7 of the time on AMD's processors, where MKL runs
  kernels for older ones. On Intel's MKL's own are as fast for many rows, and faster for less than four. What counts are weights that
  come from memory, as they do in a pass of a model: from a cache a single row is faster as it is, and so are small matrices.
- Products of up to 24 rows with weights that float16 holds, as it does most of what was bfloat16: read in half of the bytes by FBGEMM, and
  multiplied and summed in float32.
- Attention on a CPU. PyTorch's kernel there takes a mask and fewer key heads than query heads at once; transformers copies keys and
  values for every query head where a mask is given, which took longer than the attention itself. One query a row takes the kernel
  several times as long in bf16 as a few: those of all heads with the same keys are then given as rows of one head.
- RMS norms in one operation: launching the six of transformers' takes most of a small norm's time.

Products are measured in docs/results/decoder/passes.json.
"""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.machine import cpu_name

ROWS = range(4, 33) if "Intel" in cpu_name() else range(1, sys.maxsize)
"""Numbers of rows that are multiplied with packed weights."""
HALF_ROWS = range(1, 25)
"""Numbers of rows that are multiplied with float16 weights."""
_LAID_OUT_FOR = 4
"""The rows that oneDNN lays weights out for; a layout for one row takes longer for any number, one included."""
SMALLEST = 100_000
"""The smallest matrix that is packed, in elements."""
_MEMORY_SHARE = 0.25
"""Share of the free memory that the packed copies of a model may take."""


class _Packed:
    """Copies of weights [n, k], made when they are first needed. state: what changes with the weights. halves: FBGEMM's and what its
    products are multiplied by, None where float16 does not hold the weights. full: oneDNN's."""

    def __init__(self, weight: Tensor, state: tuple[int, int]) -> None:
        self.state, self.halves, self.full = state, _halves(weight.detach()), None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., k] times the weights [..., n]."""
        if self.halves is not None and x.numel() // x.shape[-1] in HALF_ROWS:
            packed, scale = self.halves
            scaled: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed).mul_(scale)
            return scaled if bias is None else scaled.add_(bias)
        if self.full is None:
            with torch.inference_mode(False):
                self.full = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAID_OUT_FOR)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.full, bias, "none", [], "")
        return product


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weights to their copies, which live as long as they."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x [..., k] and weight [n, k], from packed weights where that is faster.

    Without gradients only; a weight that was changed in place is packed again. Weights that are not kept by a module should not
    come here, as each is packed once.
    """
    rows = x.numel() // x.shape[-1]
    if (rows not in ROWS and rows not in HALF_ROWS) or not _packs(x, weight):
        return F.linear(x, weight, bias)
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    kept = _packed.get(weight)
    if kept is None or kept.state != state:
        kept = _packed[weight] = _Packed(weight, state)
    if rows not in ROWS and kept.halves is None:
        return F.linear(x, weight, bias)
    return kept.product(x, weight, bias)


def _halves(weight: Tensor) -> tuple[Any, float] | None:
    """Return weights [n, k] as FBGEMM's float16 and what products are multiplied by, None where float16 does not hold them all. They are
    multiplied by a power of two first, so that its range is used."""
    if not _has_fbgemm():
        return None
    _, exponent = torch.frexp(weight.abs().amax())
    scale = 2.0 ** (15 - int(exponent))
    for piece in weight.split(1024):
        scaled = piece * scale
        if not torch.equal(scaled.half().float(), scaled) or not torch.equal(scaled / scale, piece):
            return None
    return torch.ops.quantized.linear_prepack_fp16(weight * scale, None), 1 / scale


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


def upload(numbers: Any, device: torch.device) -> Tensor:
    """Return numbers, or lists of them, as a tensor on a device; the host does not wait, as for `torch.tensor(..., device=device)`."""
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which operations on the device of `x` run in the dtype of what they are given."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@cache
def _has_kernel() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def _has_fbgemm() -> bool:
    # FBGEMM itself falls back to a slow kernel where the processor has no AVX2.
    return torch.backends.quantized.engine in ("x86", "fbgemm") and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class PackedLinear(nn.Linear):
    """A linear layer whose product is `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n] of x [..., k]."""
        return linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Let every plain linear layer of a frozen model on a CPU multiply with packed weights, if copies of them fit well in memory: one of
    each size, and one of half of it."""
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and m.weight.numel() >= SMALLEST]
    size = sum(m.weight.numel() * m.weight.element_size() for m in layers if m.weight.device.type == "cpu")
    if 1.5 * size <= _MEMORY_SHARE * psutil.virtual_memory().available:
        for module in layers:
            module.__class__ = PackedLinear


GROUPED = "draftsmith_grouped"
"""The name that transformers knows it by."""


def _grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention [B, n, N, D] of queries [B, N, n, D] over keys and values [B, G, S, D], G a divisor of N."""
    plain = all(options.get(name) is None for name in ("position_bias", "softcap"))
    alone = query.shape[2] == 1 and query.dtype != torch.float32
    if not plain or query.device.type != "cpu" or (attention_mask is None and not alone):
        plainly: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return plainly
    if alone and (attention_mask is None or attention_mask.shape[1] == 1):
        folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
        attended = F.scaled_dot_product_attention(folded, key, value, attention_mask, dropout, scale=scaling)
        return attended.reshape(len(query), 1, *query.shape[1::2]), None
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class RMSNorm(LlamaRMSNorm):
    """Llama's RMSNorm, which runs as one operation: without gradients, and on a GPU with them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        weight, eps = self.weight, self.variance_epsilon
        if torch.is_grad_enabled() and x.device.type == "cuda":
            dtype = torch.promote_types(x.dtype, weight.dtype)  # the kernel takes one
            return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
        if torch.is_grad_enabled() or x.dtype != weight.dtype:
            return super().forward(x)
        return F.rms_norm(x, weight.shape, weight, eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Let every norm of a frozen model be `RMSNorm` that gives the same numbers so, bit for bit, on a sample; in bf16 none does."""
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not (isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(eps, float)):
            continue
        if len(inspect.signature(module.forward).parameters) == 1:  # gated norms take a second input
            sample = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
            if torch.equal(module(sample), F.rms_norm(sample, weight.shape, weight, eps)):
                module.__class__ = RMSNorm
