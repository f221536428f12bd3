"""Attention of EAGLE-3's training-time test, without an [L, (k+1)L] matrix.

Shapes: B batch rows, L tokens, R query rows (flat b*L+t), H query heads, G key/value heads, P = H/G,
D head size, S diagonal keys per row (the row's own keys of steps 1..k).

A query at row t sees the context keys of rows j <= t of its own document, and its own S diagonal keys. The
first part runs in a flash kernel that yields the log-sum-exp of the scores, causally within each document; the
second part is elementwise; they merge as in ring attention, with weights exp(lse_part - lse_total). The backward
flash kernel is given the *merged* output and the *total* log-sum-exp, which makes its probabilities, and so the
gradients of the causal part, those of the whole softmax.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftsmith.heads.layers.causal_kernels import Attended, causal_attention, causal_backward, gpu_kernel_takes
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.target.kernels import without_autocast


def ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """Return [R, H, D]: every query row's attention over its document so far and its own diagonal keys.

    q_RHD: queries of `plan.rows`. k_BLGD, v_BLGD: keys and values of step 0 (context keys), all rows. k_SRGD, v_SRGD:
    those of steps 1..S of each query row (S may be 0). All are rotated already; `scale` multiplies the scores.
    """
    dtype, inputs = q_RHD.dtype, (q_RHD, k_BLGD, v_BLGD, k_SRGD, v_SRGD)
    if not len(q_RHD):
        # All inputs still take part, so that every parameter behind them has its gradient of zero.
        return q_RHD + torch.stack([x.sum().to(dtype) for x in inputs[1:]]).sum() * 0
    if q_RHD.device.type == "cpu":
        # fp32 whatever the autocast: on CPUs the kernel is faster in it than in bf16 up to about 500 tokens.
        q, k, v, own_k, own_v = (x.float() for x in inputs)
        return merged_attention(q, k, v, own_k, own_v, plan, scale).to(dtype)
    # Where no document has two tokens the kernel would choose another layout, and there is nothing to save.
    if q_RHD.device.type == "meta" or (gpu_kernel_takes(q_RHD) and any(tokens > 1 for _, tokens in plan.spans)):
        q, k, v, own_k, own_v = (x.to(dtype) for x in inputs)
        return merged_attention(q, k, v, own_k, own_v, plan, scale)
    return eager_ttt_attention(*inputs, plan, scale)


def merged_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """Compute `ttt_attention` with a flash kernel, which decides the dtype of all inputs: fp32 on a CPU, half on a GPU."""
    return _MergedAttention.apply(q_RHD, k_BLGD, v_BLGD, k_SRGD, v_SRGD, plan, scale)


def eager_ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """Compute `ttt_attention` with concatenated scores and one softmax: the oracle, and the way for fp32 on a GPU."""
    B, L, G, _ = k_BLGD.shape
    _, H, D = q_RHD.shape
    q_RGPD = q_RHD.unflatten(1, (G, H // G))
    q_BLGPD = q_RGPD.new_zeros(B * L, G, H // G, D).index_copy(0, plan.rows, q_RGPD).unflatten(0, (B, L))
    causal_RGPL = torch.einsum("blgpd,bmgd->blgpm", q_BLGPD, k_BLGD).flatten(0, 1)[plan.rows].float() * scale
    causal_RGPL = causal_RGPL.masked_fill(~_visible(plan, L)[:, None, None], -torch.inf)
    diagonal_RGPS = torch.einsum("rgpd,srgd->rgps", q_RGPD, k_SRGD).float() * scale
    weights = torch.cat([causal_RGPL, diagonal_RGPS], -1).softmax(-1).to(q_RHD.dtype)
    causal_RGPL, diagonal_RGPS = weights.split([L, len(k_SRGD)], -1)
    scattered = weights.new_zeros(B * L, G, H // G, L).index_copy(0, plan.rows, causal_RGPL).unflatten(0, (B, L))
    out_RGPD = torch.einsum("blgpm,bmgd->blgpd", scattered, v_BLGD).flatten(0, 1)[plan.rows]
    return (out_RGPD + torch.einsum("rgps,srgd->rgpd", diagonal_RGPS, v_SRGD)).flatten(1, 2)


def _visible(plan: RowPlan, L: int) -> Tensor:
    """Return [R, L] bool: which context keys of its batch row each query row sees."""
    row, column = plan.rows // L, plan.rows % L
    same_RL = plan.documents[row] == plan.documents[row, column][:, None]
    apart_RL = column[:, None] - torch.arange(L, device=column.device)
    return same_RL & (apart_RL >= 0) & (apart_RL < (L if plan.window is None else plan.window))


class _MergedAttention(torch.autograd.Function):
    """A flash kernel within documents, in the dtype of its inputs, merged in fp32 with the diagonal keys."""

    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, k: Tensor, v: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
    ) -> Tensor:
        # Autocast would take the products of the merge to half precision, here but not in the backward pass.
        with without_autocast(q_RHD):
            whole = causal_attention(q_RHD, k, v, plan, scale)
            if len(k_SRGD):
                whole = _merge(q_RHD, whole, k_SRGD, v_SRGD, scale)
        out_RHD = whole.out_RHD.to(q_RHD.dtype)
        ctx.save_for_backward(q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, whole.lse_RH)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, lse_RH = ctx.saved_tensors
        with without_autocast(q_RHD):
            causal = causal_backward(grad_RHD, q_RHD, k, v, Attended(out_RHD, lse_RH), ctx.plan, ctx.scale)
            d_q, d_k_SRGD, d_v_SRGD = _diagonal_backward(grad_RHD, q_RHD, k_SRGD, v_SRGD, out_RHD, lse_RH, ctx.scale)
        d_q_RHD = (causal.q_RHD + d_q).to(q_RHD.dtype)
        d_own = (d_k_SRGD.to(k_SRGD.dtype), d_v_SRGD.to(v_SRGD.dtype))
        return d_q_RHD, causal.k_BLGD, causal.v_BLGD, *d_own, None, None


def _scores(q_RHD: Tensor, k_SRGD: Tensor, scale: float) -> Tensor:
    """Return the diagonal scores [S, R, G, P] in fp32."""
    q_RGPD = q_RHD.float().unflatten(1, (k_SRGD.shape[2], -1))
    return torch.einsum("rgpd,srgd->srgp", q_RGPD, k_SRGD.float()) * scale


def _merge(q_RHD: Tensor, causal: Attended, k_SRGD: Tensor, v_SRGD: Tensor, scale: float) -> Attended:
    """Return output and log-sum-exp of the causal and the diagonal keys together, both in fp32."""
    scores_SRGP = _scores(q_RHD, k_SRGD, scale)
    groups = scores_SRGP.shape[2:]
    causal_RGP = causal.lse_RH.unflatten(1, groups)
    total_RGP = torch.logaddexp(causal_RGP, scores_SRGP.logsumexp(0))
    kept_RGPD = causal.out_RHD.float().unflatten(1, groups) * (causal_RGP - total_RGP).exp()[..., None]
    kept_RGPD = kept_RGPD + torch.einsum("srgp,srgd->rgpd", (scores_SRGP - total_RGP).exp(), v_SRGD.float())
    return Attended(kept_RGPD.flatten(1, 2), total_RGP.flatten(1, 2))


def _diagonal_backward(
    grad_RHD: Tensor, q_RHD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, out_RHD: Tensor, lse_RH: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the diagonal's fp32 gradients of q, k, v: p = exp(s - lse), ds = p * (grad . v - grad . out), as for any
    key."""
    G, grad_RHD = k_SRGD.shape[2], grad_RHD.float()
    g_RGPD, q_RGPD = grad_RHD.unflatten(1, (G, -1)), q_RHD.float().unflatten(1, (G, -1))
    p_SRGP = (_scores(q_RHD, k_SRGD, scale) - lse_RH.unflatten(1, (G, -1))).exp()
    delta_RGP = (grad_RHD * out_RHD).sum(-1).unflatten(1, (G, -1))
    d_s_SRGP = p_SRGP * (torch.einsum("rgpd,srgd->srgp", g_RGPD, v_SRGD.float()) - delta_RGP) * scale
    d_q_RHD = torch.einsum("srgp,srgd->rgpd", d_s_SRGP, k_SRGD.float()).flatten(1, 2)
    d_k_SRGD = torch.einsum("srgp,rgpd->srgd", d_s_SRGP, q_RGPD)
    return d_q_RHD, d_k_SRGD, torch.einsum("srgp,rgpd->srgd", p_SRGP, g_RGPD)
