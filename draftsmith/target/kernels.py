"""What a frozen model computes faster than transformers does, with the same numbers or up to rounding.

- Products on a CPU, by a copy of the weights that oneDNN has laid out for it: 0.5 to 0.7 of the time on AMD's processors, where MKL runs
  kernels for older ones. On Intel's MKL's own are as fast for many rows, and faster for less than four, which is taken of other
  processors too. What counts are weights that come from memory, as they do in a pass of a model: from a cache a single row is faster as
  it is, and so are small matrices.
- Products of up to 24 rows with weights that float16 holds, as it does nearly all matrices of small models that were bfloat16: read in half
  of the bytes by FBGEMM, and multiplied and summed in float32. One weight too small beside the largest, and the matrix is read as it is.
- Attention on a CPU. PyTorch's kernel there takes a mask and fewer key heads than query heads at once; transformers copies keys and
  values for every query head where a mask is given, which took longer than the attention itself. One query a row takes the kernel
  several times as long in bf16 as a few: those of all heads with the same keys are then given as rows of one head.
- RMS norms in one operation: launching the six of transformers' takes most of a small norm's time.

Products are measured in docs/results/decoder/passes.json.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.machine import available_memory, cpu_name

ROWS = range(1, sys.maxsize) if "AMD" in cpu_name() else range(4, 33)
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
    """Copies of weights [n, k], each made when it is first needed. state: what changes with the weights."""

    def __init__(self, state: tuple[int, int]) -> None:
        self.state = state
        self.made: dict[Callable[[Tensor], Any], Any] = {}

    def copy(self, make: Callable[[Tensor], Any], weight: Tensor) -> Any:
        """Return what `make` makes of the weights, None where it cannot, or where they take too much of the free memory."""
        if make not in self.made:
            with torch.inference_mode(False):
                self.made[make] = make(weight.detach()) if _fits(weight.numel() * weight.element_size()) else None
        return self.made[make]


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weights to their copies, which live as long as they."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x [..., k] and weight [n, k], from packed weights where that is faster.

    Without gradients only; a weight that was changed in place is packed again. Weights that are not kept by a module should not
    come here, as each is packed once.
    """
    rows = x.numel() // x.shape[-1]
    few = rows in HALF_ROWS and x.dim() > 1  # as FBGEMM wants it
    if not (few or rows in ROWS) or not _packs(x, weight):
        return F.linear(x, weight, bias)
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    kept = _packed.get(weight)
    if kept is None or kept.state != state:
        kept = _packed[weight] = _Packed(state)
    product: Tensor
    if few and (halves := kept.copy(_halves, weight)) is not None:
        packed, scale = halves
        product = torch.ops.quantized.linear_dynamic_fp16(x, packed).mul_(scale)
        return product if bias is None else product.add_(bias)
    if rows in ROWS and (full := kept.copy(_laid_out, weight)) is not None:
        product = torch.ops.mkldnn._linear_pointwise(x, full, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _laid_out(weight: Tensor) -> Any:
    """Return weights [n, k] as oneDNN's."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _LAID_OUT_FOR)


def _halves(weight: Tensor) -> tuple[Any, float] | None:
    """Return weights [n, k] as FBGEMM's float16 and what products are multiplied by, None where float16 does not hold them all. They are
    multiplied by a power of two first, so that its range is used."""
    if not _has_fbgemm():
        return None
    low, high = torch.aminmax(weight)
    _, exponent = torch.frexp(torch.maximum(high, -low))
    scale = 2.0 ** (16 - int(exponent))
    for piece in weight.split(1024):
        scaled = piece * scale
        if not torch.equal(scaled.half().float(), scaled) or not torch.equal(scaled / scale, piece):
            return None
    return torch.ops.quantized.linear_prepack_fp16(weight * scale, None), 1 / scale


def _fits(size: float) -> bool:
    return size <= _MEMORY_SHARE * available_memory(torch.device("cpu"))


def _packs(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is one that packed weights are for."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and weight.numel() >= SMALLEST
        and type(weight) in (Tensor, nn.Parameter)
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
    each size, and one of half of it. Layers that share the weights of a packed one have its copies."""
    linears: list[Any] = [m for m in model.modules() if type(m) in (nn.Linear, PackedLinear)]
    layers = [m for m in linears if m.weight.numel() >= SMALLEST]
    new = [m.weight for m in layers if m.weight not in _packed and m.weight.dtype == torch.float32]
    size = sum(weight.numel() * weight.element_size() for weight in new if weight.device.type == "cpu")
    fits = _fits((1.5 if _has_fbgemm() else 1) * size)
    for module in layers:
        module.__class__ = PackedLinear if fits or module.weight in _packed else nn.Linear


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
