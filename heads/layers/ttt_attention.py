"""Attention of EAGLE-3's training-time test, without an [L, (k+1)L] matrix, and the kernels that it runs in.

Shapes: B batch rows, L tokens, R query rows (flat b*L+t), H query heads, G key/value heads, P = H/G,
D head size, S diagonal keys per row (the row's own keys of steps 1..k), n documents of a group, m its longest, T tokens of
all documents.

A query at row t sees the context keys of rows j <= t of its own document, and its own S diagonal keys. The
first part runs in a flash kernel that yields the log-sum-exp of the scores, causally within each document; the
second part is elementwise; they merge as in ring attention, with weights exp(lse_part - lse_total). The backward
flash kernel is given the *merged* output and the *total* log-sum-exp, which makes its probabilities, and so the
gradients of the causal part, those of the whole softmax.

On a CPU torch's flash kernel takes lines of one length, so documents of about one length share a call (1.5 to 7 times
faster than packed rows with a document mask, for documents of 64 to 512 tokens), in fp32. On a GPU one call takes all
documents end to end, in bf16 or fp16.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.heads.layers.compiled import compiled
from draftsmith.heads.layers.row_plan import Group, RowPlan
from draftsmith.target.kernels import without_autocast

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_gpu_forward: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
_gpu_backward: Any = getattr(torch.ops.aten, "_flash_attention_backward", None)
_IN_ORDER = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_ARGUMENTS = {
    "_flash_attention_forward": f"query key value {_IN_ORDER} return_debug_mask",
    "_flash_attention_backward": f"grad_out query key value out logsumexp {_IN_ORDER} rng_state unused",
}
"""What a GPU's operations, which are private to torch, are handed by place here; and by name:"""
_OPTIONS = {"scale", "window_size_left", "window_size_right"}


Own = Sequence[Tensor]
"""Diagonal keys or values [S, R, G, D], in any number of parts."""


Attended = tuple[Tensor, Tensor]
"""The attention's output [R, H, D], and the log-sum-exp of the scores [R, H], fp32."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Of the queries [R, H, D], and of the keys and values [B, L, G, D]."""


def ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Own, own_v: Own, plan: RowPlan, scale: float
) -> Tensor:
    """Return [R, H, D]: every query row's attention over its document so far and its own diagonal keys.

    q_RHD: queries of `plan.rows`. k_BLGD, v_BLGD: keys and values of step 0 (context keys), all rows. own_k, own_v:
    those of steps 1..S of each query row, [S, R, G, D] in any number of parts (S may be 0). All are rotated already; `scale` multiplies the
    scores.
    """
    dtype, inputs = q_RHD.dtype, (q_RHD, k_BLGD, v_BLGD, *own_k, *own_v)
    if not len(q_RHD):
        # All inputs still take part, so that every parameter behind them has its gradient of zero.
        return q_RHD + torch.stack([x.sum().to(dtype) for x in inputs[1:]]).sum() * 0
    shapes_alone, on_cpu = q_RHD.device.type == "meta", q_RHD.device.type == "cpu"
    # Where no document has two tokens the kernel would choose another layout, and there is nothing to save.
    if not (on_cpu or shapes_alone) and (
        why_eager(q_RHD.shape[-1], dtype, q_RHD.device) is not None or all(n == 1 for _, n in plan.spans)
    ):
        return eager_ttt_attention(q_RHD, k_BLGD, v_BLGD, own_k, own_v, plan, scale)
    # fp32 on a CPU, whatever the autocast: the kernel is faster in it than in bf16 up to about 500 tokens.
    kernels = torch.float32 if on_cpu else dtype
    q, k, v, *own = (x.to(kernels) for x in inputs)
    return merged_attention(q, k, v, own[: len(own_k)], own[len(own_k) :], plan, scale).to(dtype)


def merged_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Own, own_v: Own, plan: RowPlan, scale: float
) -> Tensor:
    """Compute `ttt_attention` with a flash kernel, which decides the dtype of all inputs: fp32 on a CPU, half on a GPU."""
    return _MergedAttention.apply(plan, scale, q_RHD, k_BLGD, v_BLGD, *own_k, *own_v)


def eager_ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, own_k: Own, own_v: Own, plan: RowPlan, scale: float
) -> Tensor:
    """Compute `ttt_attention` with concatenated scores and one softmax: the oracle, and the way for fp32 on a GPU."""
    B, L, G, _ = k_BLGD.shape
    _, H, D = q_RHD.shape
    q_RGPD = q_RHD.unflatten(1, (G, H // G))
    q_BLGPD = q_RGPD.new_zeros(B * L, G, H // G, D).index_copy(0, plan.rows, q_RGPD).unflatten(0, (B, L))
    causal_RGPL = torch.einsum("blgpd,bmgd->blgpm", q_BLGPD, k_BLGD).flatten(0, 1)[plan.rows].float() * scale
    causal_RGPL = causal_RGPL.masked_fill(~_visible(plan, L)[:, None, None], -torch.inf)
    k_SRGD, v_SRGD = _together(own_k, k_BLGD), _together(own_v, v_BLGD)
    diagonal_RGPS = torch.einsum("rgpd,srgd->rgps", q_RGPD, k_SRGD).float() * scale
    weights = torch.cat([causal_RGPL, diagonal_RGPS], -1).softmax(-1).to(q_RHD.dtype)
    causal_RGPL, diagonal_RGPS = weights.split([L, len(k_SRGD)], -1)
    scattered = weights.new_zeros(B * L, G, H // G, L).index_copy(0, plan.rows, causal_RGPL).unflatten(0, (B, L))
    out_RGPD = torch.einsum("blgpm,bmgd->blgpd", scattered, v_BLGD).flatten(0, 1)[plan.rows]
    return (out_RGPD + torch.einsum("rgps,srgd->rgpd", diagonal_RGPS, v_SRGD)).flatten(1, 2)


def _together(own: Own, like_BLGD: Tensor) -> Tensor:
    """Return the diagonal keys or values as one tensor [S, R, G, D]."""
    if not own:
        return like_BLGD.new_empty(0, 1, *like_BLGD.shape[2:])
    return own[0] if len(own) == 1 else torch.cat(tuple(own))


def _visible(plan: RowPlan, L: int) -> Tensor:
    """Return [R, L] bool: which context keys of its batch row each query row sees."""
    row, column = plan.rows // L, plan.rows % L
    same_RL = plan.documents[row] == plan.documents[row, column][:, None]
    apart_RL = column[:, None] - torch.arange(L, device=column.device)
    return same_RL & (apart_RL >= 0) & (apart_RL < (L if plan.window is None else plan.window))


class _MergedAttention(torch.autograd.Function):
    """A flash kernel within documents, in the dtype of its inputs, merged in fp32 with the diagonal keys."""

    @staticmethod
    def forward(ctx: Any, plan: RowPlan, scale: float, q_RHD: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        # Autocast would take the products of the merge to half precision, here but not in the backward pass.
        with without_autocast(q_RHD):
            out_RHD, lse_RH = causal_attention(q_RHD, k, v, plan, scale)
            if own:
                out_RHD, lse_RH = _merge(q_RHD, out_RHD, lse_RH, *_halves(own), scale)
        ctx.save_for_backward(q_RHD, k, v, out_RHD, lse_RH, *own)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k, v, out_RHD, lse_RH, *own = ctx.saved_tensors
        with without_autocast(q_RHD):
            d_q_RHD, *d_kv = causal_backward(grad_RHD, q_RHD, k, v, (out_RHD, lse_RH), ctx.plan, ctx.scale)
            d_own: tuple[Tensor, ...] = ()
            if own:
                k_SRGD, v_SRGD = _halves(own)
                softmax = (grad_RHD, q_RHD, k_SRGD, v_SRGD, out_RHD, lse_RH)
                d_q_RHD, d_k, d_v = _diagonal_backward(d_q_RHD, *softmax, ctx.scale)
                sizes = [len(x) for x in own[: len(own) // 2]]
                d_own = (*d_k.split(sizes), *d_v.split(sizes))
        return None, None, d_q_RHD, *d_kv, *d_own


def _halves(own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return diagonal keys and values [S, R, G, D] of their parts, keys first."""
    half = len(own) // 2
    return _together(own[:half], own[0]), _together(own[half:], own[0])


def _scores(q_RHD: Tensor, k_SRGD: Tensor, scale: float) -> Tensor:
    """Return the diagonal scores [S, R, G, P] in fp32."""
    q_RGPD = q_RHD.float().unflatten(1, (k_SRGD.shape[2], -1))
    return torch.einsum("rgpd,srgd->srgp", q_RGPD, k_SRGD.float()) * scale


@compiled
def _merge(
    q_RHD: Tensor, causal_RHD: Tensor, lse_RH: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output, in the dtype of the queries, and fp32 log-sum-exp of the causal keys, whose own are given, and the diagonal
    ones together."""
    scores_SRGP = _scores(q_RHD, k_SRGD, scale)
    groups = scores_SRGP.shape[2:]
    causal_RGP = lse_RH.unflatten(1, groups)
    total_RGP = torch.logaddexp(causal_RGP, scores_SRGP.logsumexp(0))
    kept_RGPD = causal_RHD.float().unflatten(1, groups) * (causal_RGP - total_RGP).exp()[..., None]
    kept_RGPD = kept_RGPD + torch.einsum("srgp,srgd->rgpd", (scores_SRGP - total_RGP).exp(), v_SRGD.float())
    return kept_RGPD.flatten(1, 2).to(q_RHD.dtype), total_RGP.flatten(1, 2)


@compiled
def _diagonal_backward(
    causal_RHD: Tensor, grad_RHD: Tensor, q_RHD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, out_RHD: Tensor, lse_RH: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the queries, to which those through the causal keys are added, and of the diagonal keys and values:
    p = exp(s - lse), ds = p * (grad . v - grad . out), as for any key."""
    G, grad_RHD = k_SRGD.shape[2], grad_RHD.float()
    g_RGPD, q_RGPD = grad_RHD.unflatten(1, (G, -1)), q_RHD.float().unflatten(1, (G, -1))
    p_SRGP = (_scores(q_RHD, k_SRGD, scale) - lse_RH.unflatten(1, (G, -1))).exp()
    delta_RGP = (grad_RHD * out_RHD).sum(-1).unflatten(1, (G, -1))
    d_s_SRGP = p_SRGP * (torch.einsum("rgpd,srgd->srgp", g_RGPD, v_SRGD.float()) - delta_RGP) * scale
    d_q_RHD = torch.einsum("srgp,srgd->rgpd", d_s_SRGP, k_SRGD.float()).flatten(1, 2)
    d_k_SRGD = torch.einsum("srgp,rgpd->srgd", d_s_SRGP, q_RGPD)
    d_v_SRGD = torch.einsum("srgp,rgpd->srgd", p_SRGP, g_RGPD)
    return (causal_RHD + d_q_RHD).to(q_RHD.dtype), d_k_SRGD.to(k_SRGD.dtype), d_v_SRGD.to(v_SRGD.dtype)


def why_eager(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return why a GPU's flash kernel does not take queries of this size and dtype, forward and backward, and what to change; None
    where it takes them: in half precision, on Ampere or later.

    Heads of more than 192 are left to the chips of data centres, as in torch's own choice of kernels.
    """
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} has none for {device.type}", "install a build of torch with flash attention"
    if not _operations_are_known():
        return f"that of torch {torch.__version__} takes other arguments", "install the torch of constraints.txt"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere", "take a newer GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes no {str(dtype).removeprefix('torch.')}", "set train.precision to bf16"
    most = 256 if major in (8, 9, 10) and minor == 0 else 192
    if head_dim % 8 or head_dim > most:
        return f"head.head_dim is {head_dim}", f"choose a multiple of 8, {most} at most"
    return None


@cache
def _operations_are_known() -> bool:
    """Whether this torch's private operations take the arguments that they are handed here."""
    for name, known in _ARGUMENTS.items():
        operation = getattr(torch.ops.aten, name, None)
        taken = () if operation is None else operation.default._schema.arguments
        if [one.name for one in taken if not one.kwarg_only] != known.split():
            return False
        if not {one.name for one in taken if one.kwarg_only} >= _OPTIONS:
            return False
    return True


def causal_attention(q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, plan: RowPlan, scale: float) -> Attended:
    """Return the attention of every query row over its document so far, or over the last `plan.window` tokens of it."""
    if _on_cpu(q_RHD):
        q, out, lse = _spare(q_RHD), _spare(torch.empty_like(q_RHD)), _spare(q_RHD.new_empty(q_RHD.shape[:2]))
        for group in plan.groups:
            parts = (_lines(q, group.queries_nm), _tokens(k_BLGD, group), _tokens(v_BLGD, group))
            out_nHmD, lse_nHm = _cpu_forward(*parts, dropout_p=0.0, scale=scale, **_band(plan, group, q))
            out[group.queries_nm], lse[group.queries_nm] = out_nHmD.transpose(1, 2), lse_nHm.transpose(1, 2)
        return out[:-1], lse[:-1]
    packed = plan.packed
    assert packed is not None
    q_THD, k_TGD, v_TGD = _spread(q_RHD, plan), *(x.flatten(0, 1)[packed.tokens_T] for x in (k_BLGD, v_BLGD))
    lengths = (packed.starts, packed.starts, packed.longest, packed.longest)
    out_THD, lse_HT, *_ = _gpu_forward(q_THD, k_TGD, v_TGD, *lengths, 0.0, True, False, scale=scale, **_window(plan))
    return out_THD[packed.place_R], lse_HT.T[packed.place_R]


def causal_backward(
    grad_RHD: Tensor, q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, total: Attended, plan: RowPlan, scale: float
) -> Gradients:
    """Return the gradients through the causal keys of a softmax whose output and log-sum-exp are `total`.

    Tokens that are no query row have a query, an output and a gradient of zero, so they pass no gradient to any key,
    whatever their log-sum-exp.
    """
    if _on_cpu(q_RHD):
        return _backward_by_groups(grad_RHD, q_RHD, k_BLGD, v_BLGD, total, plan, scale)
    packed = plan.packed
    assert packed is not None
    k_TGD, v_TGD = (x.flatten(0, 1)[packed.tokens_T] for x in (k_BLGD, v_BLGD))
    grad_THD, q_THD, out_THD, lse_TH = (_spread(x, plan) for x in (grad_RHD, q_RHD, *total))
    lengths = (packed.starts, packed.starts, packed.longest, packed.longest)
    # The state of the random numbers of dropout, which there is none of.
    unused = (torch.zeros(2, dtype=torch.uint64, device=q_RHD.device), q_RHD.new_empty(0))
    parts = (grad_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH.T.contiguous())
    d_q, d_k, d_v = _gpu_backward(*parts, *lengths, 0.0, True, *unused, scale=scale, **_window(plan))
    d_k_BLGD, d_v_BLGD = (
        torch.zeros_like(x.flatten(0, 1)).index_copy_(0, packed.tokens_T, d).view_as(x)
        for x, d in ((k_BLGD, d_k), (v_BLGD, d_v))
    )
    return d_q[packed.place_R], d_k_BLGD, d_v_BLGD


def _on_cpu(x: Tensor) -> bool:
    return x.device.type in ("cpu", "meta")  # shapes alone go the same way


def _window(plan: RowPlan) -> dict[str, int]:
    """Return the window as options of a GPU's kernel: the tokens on either side that a row sees."""
    return {} if plan.window is None else {"window_size_left": plan.window - 1, "window_size_right": 0}


def _band(plan: RowPlan, group: Group, like: Tensor) -> dict[str, Any]:
    """Return what a row of `group` sees as options of a CPU's kernel: causal, or a mask where a window cuts into the lines."""
    m = group.tokens_nm.shape[1]
    if plan.window is None or plan.window >= m:
        return {"is_causal": True}
    index_m = torch.arange(m, device=like.device)
    apart = index_m[:, None] - index_m
    hidden = (apart < 0) | (apart >= plan.window)
    return {"is_causal": False, "attn_mask": like.new_zeros(m, m).masked_fill_(hidden, -torch.inf)}


def _spread(x_R: Tensor, plan: RowPlan) -> Tensor:
    """Return [T, ...] from the query rows' [R, ...], zeros at other tokens."""
    packed = plan.packed
    assert packed is not None
    return x_R.new_zeros(len(packed.tokens_T), *x_R.shape[1:]).index_copy_(0, packed.place_R, x_R)


def _backward_by_groups(
    grad_RHD: Tensor, q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, total: Attended, plan: RowPlan, scale: float
) -> Gradients:
    grad, q, out, lse = (_spare(x) for x in (grad_RHD, q_RHD, *total))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, _spare(k_BLGD.flatten(0, 1)), _spare(v_BLGD.flatten(0, 1))))
    for group in plan.groups:
        grad_part, q_part, out_part = (_lines(x, group.queries_nm) for x in (grad, q, out))
        lse_part = lse[group.queries_nm].transpose(1, 2)
        parts = (grad_part, q_part, _tokens(k_BLGD, group), _tokens(v_BLGD, group), out_part, lse_part)
        pieces = _cpu_backward(*parts, dropout_p=0.0, scale=scale, **_band(plan, group, q))
        places = (group.queries_nm, group.tokens_nm, group.tokens_nm)
        for gradient, index, piece in zip((d_q, d_k, d_v), places, pieces, strict=True):
            gradient[index] = piece.transpose(1, 2)
    return d_q[:-1], d_k[:-1].view_as(k_BLGD), d_v[:-1].view_as(v_BLGD)


def _spare(x: Tensor) -> Tensor:
    """Append a row of zeros, which places past a document's end and tokens that are no query read and write."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _lines(x: Tensor, index_nm: Tensor) -> Tensor:
    """Gather rows [.., heads, D] as the kernel wants them: [n, heads, m, D]."""
    return x[index_nm].transpose(1, 2)


def _tokens(x_BLGD: Tensor, group: Group) -> Tensor:
    flat = x_BLGD.flatten(0, 1)
    # Past a document's end any key serves: only queries without a gradient stand later.
    return _lines(flat, group.tokens_nm.clamp_max(len(flat) - 1))
