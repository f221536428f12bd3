"""Tensors that the steps of a training pass share, such as weights, with one sum of their gradients; and the elementwise parts of a
layer, which keep little for the backward pass.

Autograd adds up the gradients of a weight in the dtype of the products, which under autocast loses the small ones of many steps,
and holds each as a tensor of its own. Here every operation adds its share to a sum in fp32.

Shapes: n outputs and m inputs of a weight, R rows, N query heads, G key/value heads, D head size, I width of the feed-forward layer;
"..." is [B, L] or [R].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import rotate_half

from draftsmith.heads.layers.compiled import compiled, is_compiling
from draftsmith.target.kernels import without_autocast

_ALL = slice(None)


class Shared:
    """Some tensors of one pass. Operations that are given `tensors` and know of this object add to `sums`, which the tensors' own
    gradients are made of."""

    def __init__(self, *tensors: Tensor) -> None:
        self.sums: list[Tensor | None] = [None] * len(tensors)
        self.tensors: tuple[Tensor, ...] = _Shared.apply(self, *tensors)

    def take(self) -> list[Tensor | None]:
        """Return the sums and begin again."""
        sums, self.sums = self.sums, [None] * len(self.sums)
        return sums


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: Shared, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.dtypes = owner, [x.dtype for x in tensors]
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_none: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert all(x is None for x in _none), "operations add to the sums"
        return None, *(
            None if x is None else x.to(dtype) for x, dtype in zip(ctx.owner.take(), ctx.dtypes, strict=True)
        )


@dataclass(frozen=True)
class Rows:
    """Rows of a shared table: its first tensor [T, n], and the number of each row, [R]."""

    table: Shared
    index: Tensor


class SharedLinear:
    """Linear layers that read the same input, as one product in one pass.

    Under autocast their weights are cast here once, into one matrix. Biases are added as autograd does it.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        weights = [layer.weight for layer in layers]
        kind = "cpu" if weights[0].is_meta else weights[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights[0].dtype
        self.sizes = [len(weight) for weight in weights]
        self._sums: list[Tensor | None] = []
        self.parts: tuple[Tensor, ...] = _Weights.apply(self, dtype, *weights)
        self._sums = [None] * len(self.parts)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "biases of all layers, or of none"
        self._bias = torch.cat(biases).to(dtype) if biases else None

    @property
    def outputs(self) -> int:
        """n of all layers together."""
        return sum(self.sizes)

    def __call__(self, x: Tensor, outputs: slice = _ALL, columns: slice = _ALL, start: Rows | None = None) -> Tensor:
        """Return the product [..., n] of x [..., m].

        outputs: which of them, from a whole layer on to a whole layer. columns: those of the weights that x is for. start: what the
        product is added to; the bias is in it.
        """
        x = x.to(self.parts[0].dtype)
        given = () if start is None else start.table.tensors
        out: Tensor = _Product.apply(self, outputs, columns, start, x, *given, *self.parts)
        return out if self._bias is None or start is not None else out + self._bias[outputs]

    def spans(self, outputs: slice) -> list[tuple[int, slice, slice]]:
        """Return the number of each part that has some of the outputs, the place of these in the product, and in the part."""
        begin, end, _ = outputs.indices(self.outputs)
        found, first = [], 0
        for number, part in enumerate(self.parts):
            low, high = max(begin, first), min(end, first + len(part))
            if low < high:
                found.append((number, slice(low - begin, high - begin), slice(low - first, high - first)))
            first += len(part)
        return found

    def add(self, number: int, own: slice, columns: slice, grad: Tensor, x: Tensor) -> None:
        """Add grad' x, [n, m], to the sum of a part's gradients, in fp32."""
        part, left = self.parts[number], grad.T
        begun = self._sums[number]
        whole = len(left) == len(part) and x.shape[1] == part.shape[1]
        if begun is None and whole and part.dtype == torch.float32:
            self._sums[number] = left @ x
            return
        if begun is None:
            begun = self._sums[number] = torch.zeros_like(part, dtype=torch.float32)
        into = begun[own, columns]
        if part.dtype == torch.float32:
            torch.addmm(into, left, x, out=into)
        else:
            into.add_(left @ x)

    def take(self) -> list[Tensor | None]:
        """Return the gradient of each layer's weight and begin again."""
        sums, self._sums = self._sums, [None] * len(self._sums)
        if len(sums) == len(self.sizes):
            return sums
        (joined,) = sums
        return [None] * len(self.sizes) if joined is None else list(joined.split(self.sizes))


class _Weights(torch.autograd.Function):
    """Weights in the dtype of products: as they are, or as one matrix where they are cast."""

    @staticmethod
    def forward(ctx: Any, owner: SharedLinear, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.dtypes = owner, [weight.dtype for weight in weights]
        if dtype == weights[0].dtype:
            return tuple(x.view_as(x) for x in weights)
        joined = weights[0].new_empty(owner.outputs, weights[0].shape[1], dtype=dtype)
        for place, weight in zip(joined.split(owner.sizes), weights, strict=True):
            place.copy_(weight)
        return (joined,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_none: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = zip(ctx.owner.take(), ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(x.to(dtype) if wanted and x is not None else None for x, dtype, wanted in found)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: SharedLinear, outputs: slice, columns: slice, start: Rows | None, x: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.owner, ctx.outputs, ctx.columns, ctx.start = owner, outputs, columns, start
        parts, spans = others[-len(owner.parts) :], owner.spans(outputs)
        flat = x.flatten(0, -2)
        with without_autocast(x):
            if start is not None:
                out = others[0][:, outputs][start.index]
            elif len(spans) > 1:
                out = flat.new_empty(len(flat), spans[-1][1].stop)
            for number, place, own in spans:
                weight = parts[number][own, columns]
                if start is not None:
                    torch.addmm(out[:, place], flat, weight.T, out=out[:, place])
                elif len(spans) > 1:
                    torch.mm(flat, weight.T, out=out[:, place])
                else:
                    out = F.linear(flat, weight)
        ctx.save_for_backward(x, *parts)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        owner, columns, start = ctx.owner, ctx.columns, ctx.start
        x, *parts = ctx.saved_tensors
        flat, grad_Rn, d_x = x.flatten(0, -2), grad.flatten(0, -2), None
        with without_autocast(x):
            for number, place, own in owner.spans(ctx.outputs):
                part_Rn, weight = grad_Rn[:, place], parts[number][own, columns]
                if ctx.needs_input_grad[4]:
                    d_x = part_Rn @ weight if d_x is None else torch.addmm(d_x, part_Rn, weight, out=d_x)
                if ctx.needs_input_grad[number - len(parts)]:
                    owner.add(number, own, columns, part_Rn, flat)
            if start is not None and ctx.needs_input_grad[5]:
                found = start.table.sums[0]
                if found is None:
                    found = start.table.sums[0] = torch.zeros_like(start.table.tensors[0], dtype=torch.float32)
                found[:, ctx.outputs].index_add_(0, start.index, grad_Rn.float())
        given = () if start is None else (None,)
        return None, None, None, None, None if d_x is None else d_x.view_as(x), *given, *(None for _ in parts)


def turn(heads: Tensor, cos: Tensor, sin: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads [R, N + 2G, D] into queries, keys and values of so many heads, the first two rotated by cos and sin [R, D]."""
    cos, sin = cos.to(heads.dtype).unsqueeze(-2), sin.to(heads.dtype).unsqueeze(-2)
    turned: tuple[Tensor, Tensor, Tensor] = _Turned.apply(heads, cos, sin, tuple(sizes))
    return turned


@compiled
def _turn(queries_keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([queries_keys * cos + rotate_half(queries_keys) * sin, values], -2)


@compiled
def _turn_back(queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([*(x * cos - rotate_half(x * sin) for x in (queries, keys)), values], -2)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.given = sizes, heads.shape
        turning, values = heads.split([sizes[0] + sizes[1], sizes[2]], -2)
        if is_compiling():
            return _turn(turning, values, cos, sin).split(sizes, -2)
        out = _rotate(turning, cos, sin, torch.empty_like(turning, memory_format=torch.contiguous_format), 1)
        queries, keys = out.split(sizes[:2], -2)
        # What is left of `heads` is not needed.
        return queries, keys, values.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        if is_compiling():
            *rows, _, D = ctx.given
            parts = (cos.new_zeros(*rows, n, D) if x is None else x for x, n in zip(grads, ctx.sizes, strict=True))
            queries, keys, values = parts
            return _turn_back(queries, keys, values, cos, sin), None, None, None
        out = cos.new_empty(ctx.given)
        for number, (into, grad) in enumerate(zip(out.split(ctx.sizes, -2), grads, strict=True)):
            if grad is None:
                into.zero_()
            elif number == 2:
                into.copy_(grad)
            elif ctx.sizes[number]:
                _rotate(grad, cos, sin, into, -1)
        return out, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, way: int) -> Tensor:
    """Write x rotated one way or back (-1) into `out`."""
    (low, high), (sin_low, sin_high) = x.chunk(2, -1), sin.chunk(2, -1)
    torch.mul(x, cos, out=out)
    into_low, into_high = out.chunk(2, -1)
    if way < 0:  # the transposed matrix
        sin_low, sin_high = sin_high, sin_low
    into_low.addcmul_(high, sin_low, value=-way)
    into_high.addcmul_(low, sin_high, value=way)
    return out


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up, [..., I], of gate and up side by side, [..., 2I]."""
    if not isinstance(activation, SiLUActivation):
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up
    if is_compiling():
        return _swiglu(gate_up)
    product: Tensor = _SwiGLU.apply(gate_up)
    return product


@compiled
def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        torch.mul(F.silu(gate), grad, out=d_up)
        return out
