"""Operations that are one kernel on a GPU and something else on a CPU: flash attention, torch's attention, RMSNorm, what is compiled.

Flash attention is a plain computation that asserts what the real kernel asks of its inputs. Each counts as one, and so
does its backward pass; products within what is compiled stay kernels of their own.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended_gpu.counts import here
from tests.pretended_gpu.tensor import SWITCHED_ON

HALF = (torch.bfloat16, torch.float16)
_library = torch.library.Library("pretended", "DEF")
_library.define("forward(str name, Tensor?[] tensors, Scalar?[] options) -> Tensor")
_library.define("backward(str name, Tensor grad, Tensor?[] tensors, Scalar?[] options) -> Tensor[]")


_RANDOM_STATE = (torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(()))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, *rest: Any, seqused_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_flash_attention_forward over packed documents: q [T, H, D], k and v [T, G, D] -> out, lse [H, T] fp32. With seqused_k [n]
    the keys are those of n caches, of which so many are used; then k and v have more tokens than q."""
    if SWITCHED_ON[-1].capture:  # lengths are not there yet, and nothing is computed
        return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0]), *_RANDOM_STATE
    if seqused_k is None:
        _check_flash((q, k, v), starts, starts_k, *rest)
        keys = list(_spans(starts))
    else:
        keys = _used_keys((q, k, v), starts, starts_k, seqused_k, *rest)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for (a, b), (c, d) in zip(_spans(starts), keys, strict=True):
        scores, _, values = _scores(q[a:b], k[c:d], v[c:d], **options)
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse, *_RANDOM_STATE


def _used_keys(
    tensors: tuple[Tensor, ...], starts: Tensor, starts_k: Tensor, used: Tensor, longest: int, longest_k: int, dropout: float,
    causal: bool, debug: bool,
) -> list[tuple[int, int]]:  # fmt: skip
    """Return where each cache's used keys lie, once the call is what the kernel asks for."""
    q, k, v = tensors
    _check_shapes(tensors)
    assert k.shape == v.shape
    for x in (starts, starts_k, used):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    assert len(starts) == len(starts_k) == len(used) + 1
    assert starts[0] == starts_k[0] == 0
    assert starts[-1] == len(q)
    assert starts_k[-1] == len(k)
    assert longest == int(starts.diff().max())
    assert bool((used <= starts_k.diff()).all()), "more keys are used than there are slots"
    assert longest_k == int(starts_k.diff().max())
    assert causal
    assert not dropout
    assert not debug
    return [(c, c + count) for (c, _), count in zip(_spans(starts_k), used.tolist(), strict=True)]


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward, of the softmax whose output and log-sum-exp it is given."""
    # cum_seq_k, max_q, max_k, dropout and causal, then the state of random numbers.
    _check_flash((q, k, v, grad, out), starts, *rest[:5])
    assert lse.dtype == torch.float32, lse.dtype
    assert lse.shape == (q.shape[1], q.shape[0]), "lse is [heads, tokens]"
    assert lse.is_contiguous(), "the kernel reads lse without strides"
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    for a, b in _spans(starts):
        scores, keys, values = _scores(q[a:b], k[a:b], v[a:b], **options)
        g = grad[a:b].float()
        weights = (scores - lse[:, a:b, None]).exp()
        delta = (g * out[a:b].float()).sum(-1).T[..., None]
        d_scores = weights * (torch.einsum("qhd,khd->hqk", g, values) - delta) * options["scale"]
        d_q[a:b] = torch.einsum("hqk,khd->qhd", d_scores, keys).to(q.dtype)
        shared = (-1, q.shape[1] // k.shape[1])
        d_k[a:b] = torch.einsum("hqk,qhd->khd", d_scores, q[a:b].float()).unflatten(1, shared).sum(2).to(k.dtype)
        d_v[a:b] = torch.einsum("hqk,qhd->khd", weights, g).unflatten(1, shared).sum(2).to(v.dtype)
    return d_q, d_k, d_v


def _check_flash(
    tensors: tuple[Tensor, ...], starts: Tensor, starts_k: Tensor, longest: int, longest_k: int, dropout: float,
    causal: bool, debug: bool = False,
) -> None:  # fmt: skip
    q, *_ = tensors
    _check_shapes(tensors)
    for x in (starts, starts_k):
        assert x.dtype == torch.int32, "starts of documents are int32"
        assert x.is_contiguous()
        assert x[0] == 0
        assert x[-1] == len(q), "the last start is the number of tokens"
    lengths = starts.diff()
    assert longest == longest_k == int(lengths.max())
    assert causal
    assert not dropout
    assert not debug


def _check_shapes(tensors: tuple[Tensor, ...]) -> None:
    q, k, *_ = tensors
    assert q.dtype in HALF, q.dtype
    assert {x.dtype for x in tensors} == {q.dtype}, "all in one dtype"
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in tensors), "[tokens, heads, D], the last dimension dense"
    assert q.shape[-1] % 8 == 0, q.shape
    assert q.shape[-1] <= 256, q.shape
    assert q.shape[1] % k.shape[1] == 0, "query heads are a multiple of the key heads"


def _spans(starts: Tensor) -> Iterator[tuple[int, int]]:
    places = starts.tolist()
    return pairwise(places)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the causal scores [H, n, m] of a document whose last n of m tokens ask, and keys and values [m, H, D], all in fp32."""
    assert window_size_right in (None, 0)
    keys, values = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    before = len(k) - len(q)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(before)
    if window_size_left is not None and window_size_left >= 0:
        seen &= torch.ones_like(seen).triu(before - window_size_left)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    return scores.masked_fill(~seen, -torch.inf), keys, values


def _attention(tensors: list[Tensor | None], options: list[Any]) -> Tensor:
    query, key, value, mask = tensors
    assert query is not None and key is not None and value is not None  # noqa: PT018
    assert query.dtype == key.dtype == value.dtype
    assert mask is None or mask.dtype in (torch.bool, query.dtype), "a mask of bool or of the queries' dtype"
    causal, scale, grouped = options
    return _torch_attention(
        query, key, value, mask, 0.0, bool(causal), scale=None if scale is None else float(scale), enable_gqa=bool(grouped)
    )  # fmt: skip


def _rms_norm(tensors: list[Tensor | None], options: list[Any]) -> Tensor:
    x, weight = tensors
    assert x is not None
    # A GPU's kernel rounds once, at the end.
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (options[0] or torch.finfo(x.dtype).eps))
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


_torch_attention, _torch_rms_norm = F.scaled_dot_product_attention, F.rms_norm
_FUSED: dict[str, Callable[[list[Tensor | None], list[Any]], Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}


def _forward(name: str, tensors: list[Tensor | None], options: list[Any]) -> Tensor:
    return _FUSED[name](tensors, options).clone()


def _backward(name: str, grad: Tensor, tensors: list[Tensor | None], options: list[Any]) -> list[Tensor]:
    with torch.enable_grad(), enable_reentrant_dispatch(), torch._C._DisableTorchDispatch():
        inputs = [None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        return list(torch.autograd.grad(_FUSED[name](inputs, options), wanted, grad, materialize_grads=True))


_library.impl("forward", _forward, "CPU")
_library.impl("backward", _backward, "CPU")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, options: list[Any], *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.options = name, options
        return torch.ops.pretended.forward(name, list(tensors), options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = iter(torch.ops.pretended.backward(ctx.name, grad, list(ctx.saved_tensors), ctx.options))
        return (
            None,
            None,
            *(next(found) if x is not None and x.is_floating_point() else None for x in ctx.saved_tensors),
        )


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """F.scaled_dot_product_attention: one kernel on the pretended device."""
    if not query.is_cuda:
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert not dropout_p, "dropout within attention is not pretended"
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    return _Fused.apply("scaled_dot_product_attention", [is_causal, scale, enable_gqa], query, key, value, attn_mask)


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """F.rms_norm: one kernel on the pretended device."""
    if not x.is_cuda:
        return _torch_rms_norm(x, shape, weight, eps)
    assert len(shape) == 1
    return _Fused.apply("rms_norm", [eps], x, weight)


# --- torch.compile ---

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_library.define("compiled(int number, Tensor?[] tensors) -> Tensor[]")
_running: dict[int, Callable[[list[Tensor | None]], list[Tensor]]] = {}


class _Products(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in PRODUCTS:
            SWITCHED_ON[-1].counts.kernel(name, here())
        return func(*args, **(kwargs or {}))


def _compiled(number: int, tensors: list[Tensor | None]) -> list[Tensor]:
    with enable_reentrant_dispatch(), _Products():
        return [x.clone() for x in _running[number](tensors)]


_library.impl("compiled", _compiled, "CPU")


def _as_one(function: Callable[[list[Tensor | None]], list[Tensor]], tensors: list[Tensor | None]) -> list[Tensor]:
    """Run `function` of CPU tensors as one operation of the device."""
    number = len(_running)
    _running[number] = function
    try:
        return list(torch.ops.pretended.compiled(number, tensors))
    finally:
        del _running[number]


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in args))
        ctx.run = lambda found: function(*(x if one is None else one for x, one in zip(others, found, strict=True)))
        others = [None if isinstance(x, Tensor) else x for x in args]
        return tuple(_as_one(ctx.run, [x if isinstance(x, Tensor) else None for x in args]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given = list(ctx.saved_tensors)

        def gradients(tensors: list[Tensor | None]) -> list[Tensor]:
            with torch.enable_grad():
                inputs = [None if x is None else x.detach().requires_grad_() for x in tensors[: len(given)]]
                wanted = [x for x in inputs if x is not None]
                return list(torch.autograd.grad(ctx.run(inputs), wanted, tensors[len(given) :], materialize_grads=True))

        found = iter(_as_one(gradients, [*given, *grads]))
        return None, *(None if x is None else next(found) for x in given)


def compile_(function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
    """torch.compile: one kernel and one backward on the pretended device, besides products."""
    assert fullgraph, "what breaks into several graphs is not one kernel"

    def run(*args: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.is_cuda for x in args):
            return function(*args)
        kinds: list[type] = []

        def listed(*given: Any) -> list[Tensor]:
            out = function(*given)
            kinds.append(type(out))
            return list(out) if kinds[0] is tuple else [out]

        found = _Compiled.apply(listed, *args)
        return found if kinds[0] is tuple else found[0]

    return run
