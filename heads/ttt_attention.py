"""Attention of EAGLE-3's training-time test, without an [L, (k+1)L] matrix.

Shapes: B batch rows, L tokens, R needed rows (flat b*L+t), H query heads, G key/value heads, P = H/G,
D head size, S diagonal keys per row (the row's own keys of steps 1..k).

A query at row t sees the step-0 keys of rows j <= t of its own document, and its own S diagonal keys. The
first part runs in a flash kernel, one causal call per document (on a CPU 1.5 to 7 times faster than one call
with a document mask, for documents of 64 to 512 tokens), which yields the log-sum-exp of the scores; the
second part is elementwise; they merge as in ring attention: weights exp(lse_part - lse_total). The backward
flash kernel is given the *merged* output and the *total* log-sum-exp, which makes its probabilities, and so
the gradients of the causal part, those of the whole softmax.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Segment:
    """The part of one document that is needed: tokens start..stop-1 of batch row `row`."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """Which rows ask (`rows`: [R] int64 flat indices, ascending) and the documents they ask about."""

    rows: Tensor
    segments: tuple[Segment, ...]


def plan_rows(document_BL: Tensor, needed_BL: Tensor) -> RowPlan:
    """Return the plan for the rows marked in `needed_BL` (bool); each must lie in a document (id >= 0)."""
    segments = []
    for row, (documents, needed) in enumerate(zip(document_BL.cpu(), needed_BL.cpu(), strict=True)):
        values, counts = torch.unique_consecutive(documents, return_counts=True)
        start = 0
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            asked = needed[start : start + count].nonzero()
            if len(asked):
                assert value >= 0, "a row in the padding cannot be supervised"
                segments.append(Segment(row, start, start + int(asked[-1]) + 1))
            start += count
    return RowPlan(needed_BL.flatten().nonzero().flatten(), tuple(segments))


def ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """Return [R, H, D]: every needed row's attention over its document so far and its own diagonal keys.

    q_RHD: queries of `plan.rows`. k_BLGD, v_BLGD: keys and values of step 0, all rows. k_SRGD, v_SRGD: those
    of steps 1..S of each needed row (S may be 0). All are rotated already; `scale` multiplies the scores.
    """
    if q_RHD.device.type != "cpu":
        return eager_ttt_attention(q_RHD, k_BLGD, v_BLGD, k_SRGD, v_SRGD, plan, scale)
    # fp32 whatever the autocast: on CPUs the kernel is faster in it than in bf16 up to about 500 tokens.
    inputs = [x.float() for x in (q_RHD, k_BLGD, v_BLGD, k_SRGD, v_SRGD)]
    return _MergedAttention.apply(*inputs, plan, scale).to(q_RHD.dtype)


def eager_ttt_attention(
    q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
) -> Tensor:
    """The same by concatenated scores and one softmax: the oracle, and the way on other devices."""
    B, L, G, _ = k_BLGD.shape
    _, H, D = q_RHD.shape
    q_RGPD = q_RHD.unflatten(1, (G, H // G))
    q_BLGPD = q_RGPD.new_zeros(B * L, G, H // G, D).index_copy(0, plan.rows, q_RGPD).unflatten(0, (B, L))
    causal_RGPL = torch.einsum("blgpd,bmgd->blgpm", q_BLGPD, k_BLGD).flatten(0, 1)[plan.rows].float() * scale
    seen_RL = _visible(plan, B, L, q_RHD.device)
    causal_RGPL = causal_RGPL.masked_fill(~seen_RL[:, None, None], -torch.inf)
    diagonal_RGPS = torch.einsum("rgpd,srgd->rgps", q_RGPD, k_SRGD).float() * scale
    weights = torch.cat([causal_RGPL, diagonal_RGPS], -1).softmax(-1).to(q_RHD.dtype)
    causal_RGPL, diagonal_RGPS = weights.split([L, len(k_SRGD)], -1)
    scattered = weights.new_zeros(B * L, G, H // G, L).index_copy(0, plan.rows, causal_RGPL).unflatten(0, (B, L))
    out_RGPD = torch.einsum("blgpm,bmgd->blgpd", scattered, v_BLGD).flatten(0, 1)[plan.rows]
    return (out_RGPD + torch.einsum("rgps,srgd->rgpd", diagonal_RGPS, v_SRGD)).flatten(1, 2)


def _visible(plan: RowPlan, B: int, L: int, device: torch.device) -> Tensor:
    """Return [R, L] bool: which step-0 keys of its batch row each needed row sees."""
    document_BL = torch.full((B, L), -1)
    for number, part in enumerate(plan.segments):
        document_BL[part.row, part.start : part.stop] = number
    document_BL = document_BL.to(device)
    row, place = plan.rows // L, plan.rows % L
    same_RL = document_BL[row] == document_BL[row, place][:, None]
    return same_RL & (torch.arange(L, device=device) <= place[:, None])


class _MergedAttention(torch.autograd.Function):
    """Flash attention per document, merged with the diagonal keys; all tensors fp32 on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, k: Tensor, v: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
    ) -> Tensor:
        B, L, _, _ = k.shape
        q_BLHD = _scatter(q_RHD, plan, B, L)
        out_BLHD, lse_BLH = torch.zeros_like(q_BLHD), q_BLHD.new_zeros(B, L, q_RHD.shape[1])
        for part in plan.segments:
            out, lse = _forward(*(_view(x, part) for x in (q_BLHD, k, v)), 0.0, True, scale=scale)
            _view(out_BLHD, part).copy_(out)
            lse_BLH[part.row, part.start : part.stop] = lse[0].T
        out_RHD, lse_RH = out_BLHD.flatten(0, 1)[plan.rows], lse_BLH.flatten(0, 1)[plan.rows]
        if len(k_SRGD):
            out_RHD, lse_RH = _merge(q_RHD, out_RHD, lse_RH, k_SRGD, v_SRGD, scale)
        ctx.save_for_backward(q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, lse_RH)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, lse_RH = ctx.saved_tensors
        plan, scale, (B, L, G, _) = ctx.plan, ctx.scale, k.shape
        q, out, grad = (_scatter(x, plan, B, L) for x in (q_RHD, out_RHD, grad_RHD))
        # Rows that nobody needs have zero queries and zero gradients, so any finite log-sum-exp serves.
        lse_BLH = _scatter(lse_RH, plan, B, L)
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in plan.segments:
            lse = lse_BLH[part.row : part.row + 1, part.start : part.stop].transpose(1, 2)
            views = [_view(x, part) for x in (grad, q, k, v, out)]
            for total, piece in zip((d_q, d_k, d_v), _backward(*views, lse, 0.0, True, scale=scale), strict=True):
                _view(total, part).copy_(piece)
        d_q_RHD = d_q.flatten(0, 1)[plan.rows]
        # The diagonal by hand: p = exp(s - lse), ds = p * (grad . v - grad . out), as for every other key.
        g_RGPD, q_RGPD = grad_RHD.unflatten(1, (G, -1)), q_RHD.unflatten(1, (G, -1))
        p_SRGP = (_scores(q_RHD, k_SRGD, scale) - lse_RH.unflatten(1, (G, -1))).exp()
        delta_RGP = (grad_RHD * out_RHD).sum(-1).unflatten(1, (G, -1))
        d_s_SRGP = p_SRGP * (torch.einsum("rgpd,srgd->srgp", g_RGPD, v_SRGD) - delta_RGP) * scale
        d_q_RHD = d_q_RHD + torch.einsum("srgp,srgd->rgpd", d_s_SRGP, k_SRGD).flatten(1, 2)
        d_k_SRGD = torch.einsum("srgp,rgpd->srgd", d_s_SRGP, q_RGPD)
        d_v_SRGD = torch.einsum("srgp,rgpd->srgd", p_SRGP, g_RGPD)
        return d_q_RHD, d_k, d_v, d_k_SRGD, d_v_SRGD, None, None


def _view(x_BLHD: Tensor, part: Segment) -> Tensor:
    """Return one document as the kernel wants it: [1, H, n, D]."""
    return x_BLHD[part.row : part.row + 1, part.start : part.stop].transpose(1, 2)


def _scatter(x_R: Tensor, plan: RowPlan, B: int, L: int) -> Tensor:
    """Return [B, L, ...] with the needed rows in place and zeros elsewhere."""
    return x_R.new_zeros(B * L, *x_R.shape[1:]).index_copy_(0, plan.rows, x_R).unflatten(0, (B, L))


def _scores(q_RHD: Tensor, k_SRGD: Tensor, scale: float) -> Tensor:
    """Return the diagonal scores [S, R, G, P]."""
    return torch.einsum("rgpd,srgd->srgp", q_RHD.unflatten(1, (k_SRGD.shape[2], -1)), k_SRGD) * scale


def _merge(
    q_RHD: Tensor, out_RHD: Tensor, lse_RH: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the causal and the diagonal keys together."""
    scores_SRGP = _scores(q_RHD, k_SRGD, scale)
    causal_RGP = lse_RH.unflatten(1, scores_SRGP.shape[2:])
    total_RGP = torch.logaddexp(causal_RGP, scores_SRGP.logsumexp(0))
    kept_RGPD = out_RHD.unflatten(1, scores_SRGP.shape[2:]) * (causal_RGP - total_RGP).exp()[..., None]
    kept_RGPD = kept_RGPD + torch.einsum("srgp,srgd->rgpd", (scores_SRGP - total_RGP).exp(), v_SRGD)
    return kept_RGPD.flatten(1, 2), total_RGP.flatten(1, 2)
