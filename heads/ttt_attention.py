"""Attention of EAGLE-3's training-time test, without an [L, (k+1)L] matrix.

Shapes: B batch rows, L tokens, R needed rows (flat b*L+t), H query heads, G key/value heads, P = H/G,
D head size, S diagonal keys per row (the row's own keys of steps 1..k), n documents of a group, m its longest.

A query at row t sees the step-0 keys of rows j <= t of its own document, and its own S diagonal keys. The
first part runs in a flash kernel that yields the log-sum-exp of the scores, causally within each document
(documents of about one length share a call: on a CPU 1.5 to 7 times faster than packed rows with a document
mask, for documents of 64 to 512 tokens); the second part is elementwise; they merge as in ring attention, with
weights exp(lse_part - lse_total). The backward flash kernel is given the *merged* output and the *total*
log-sum-exp, which makes its probabilities, and so the gradients of the causal part, those of the whole softmax.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BUCKET = 32  # documents whose lengths round up to the same multiple share a call


@dataclass(frozen=True)
class Group:
    """Documents of about one length, a line each, up to their last needed row.

    tokens_nm: flat index of each token, B*L past a document's end. queries_nm: its place among the needed rows,
    R where it is none of them.
    """

    tokens_nm: Tensor
    queries_nm: Tensor


@dataclass(frozen=True)
class RowPlan:
    """Which rows ask, and about what. rows: [R] int64 flat indices, ascending. documents: [B, L] numbers that differ
    between any two documents of the batch. groups: the documents with needed rows."""

    rows: Tensor
    documents: Tensor
    groups: tuple[Group, ...]


def plan_rows(document_BL: Tensor, needed_BL: Tensor) -> RowPlan:
    """Return the plan for the rows marked in `needed_BL` (bool); each must lie in a document (id >= 0)."""
    assert not (needed_BL & (document_BL < 0)).any(), "a row in the padding cannot be supervised"
    before_BL = torch.nn.functional.pad(document_BL[:, :-1], (1, 0), value=-2)
    starts_BL = document_BL != before_BL
    number_BL, rows = (
        starts_BL.flatten().cumsum(0).unflatten(0, starts_BL.shape) - 1,
        needed_BL.flatten().nonzero()[:, 0],
    )
    start = starts_BL.flatten().nonzero()[:, 0]
    stop = start.scatter_reduce(0, number_BL.flatten()[rows], rows + 1, "amax")
    spans = [(a, b - a) for a, b in zip(start.tolist(), stop.tolist(), strict=True) if b > a]
    place = torch.full((needed_BL.numel() + 1,), len(rows), device=rows.device)
    place[rows] = torch.arange(len(rows), device=rows.device)
    groups = []
    for _, members in groupby(sorted(spans, key=lambda span: span[1]), key=lambda span: -(-span[1] // BUCKET)):
        first, length = torch.tensor(list(members), device=rows.device).T[..., None]
        offset = torch.arange(int(length.max()), device=rows.device)
        tokens_nm = torch.where(offset < length, first + offset, needed_BL.numel())
        groups.append(Group(tokens_nm, place[tokens_nm]))
    return RowPlan(rows, number_BL, tuple(groups))


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
    causal_RGPL = causal_RGPL.masked_fill(~_visible(plan, L)[:, None, None], -torch.inf)
    diagonal_RGPS = torch.einsum("rgpd,srgd->rgps", q_RGPD, k_SRGD).float() * scale
    weights = torch.cat([causal_RGPL, diagonal_RGPS], -1).softmax(-1).to(q_RHD.dtype)
    causal_RGPL, diagonal_RGPS = weights.split([L, len(k_SRGD)], -1)
    scattered = weights.new_zeros(B * L, G, H // G, L).index_copy(0, plan.rows, causal_RGPL).unflatten(0, (B, L))
    out_RGPD = torch.einsum("blgpm,bmgd->blgpd", scattered, v_BLGD).flatten(0, 1)[plan.rows]
    return (out_RGPD + torch.einsum("rgps,srgd->rgpd", diagonal_RGPS, v_SRGD)).flatten(1, 2)


def _visible(plan: RowPlan, L: int) -> Tensor:
    """Return [R, L] bool: which step-0 keys of its batch row each needed row sees."""
    row, place = plan.rows // L, plan.rows % L
    same_RL = plan.documents[row] == plan.documents[row, place][:, None]
    return same_RL & (torch.arange(L, device=place.device) <= place[:, None])


class _MergedAttention(torch.autograd.Function):
    """Flash attention within documents, merged with the diagonal keys; all tensors fp32 on the CPU."""

    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, k: Tensor, v: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan, scale: float
    ) -> Tensor:
        q, out, lse = _spare(q_RHD), _spare(torch.empty_like(q_RHD)), _spare(q_RHD.new_empty(q_RHD.shape[:2]))
        for group in plan.groups:
            parts = (_lines(q, group.queries_nm), _tokens(k, group), _tokens(v, group))
            out_nHmD, lse_nHm = _forward(*parts, 0.0, True, scale=scale)
            out[group.queries_nm], lse[group.queries_nm] = out_nHmD.transpose(1, 2), lse_nHm.transpose(1, 2)
        out_RHD, lse_RH = out[:-1], lse[:-1]
        if len(k_SRGD):
            out_RHD, lse_RH = _merge(q_RHD, out_RHD, lse_RH, k_SRGD, v_SRGD, scale)
        ctx.save_for_backward(q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, lse_RH)
        ctx.plan, ctx.scale = plan, scale
        return out_RHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RHD: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k, v, k_SRGD, v_SRGD, out_RHD, lse_RH = ctx.saved_tensors
        q, out, grad, lse = (_spare(x) for x in (q_RHD, out_RHD, grad_RHD, lse_RH))
        d_q, d_k, d_v = (
            torch.zeros_like(q),
            _spare(torch.zeros_like(k.flatten(0, 1))),
            _spare(torch.zeros_like(v.flatten(0, 1))),
        )
        for group in ctx.plan.groups:
            grad_part, q_part, out_part = (_lines(x, group.queries_nm) for x in (grad, q, out))
            lse_part = lse[group.queries_nm].transpose(1, 2)
            parts = (grad_part, q_part, _tokens(k, group), _tokens(v, group), out_part, lse_part)
            pieces = _backward(*parts, 0.0, True, scale=ctx.scale)
            places = (group.queries_nm, group.tokens_nm, group.tokens_nm)
            for total, place, piece in zip((d_q, d_k, d_v), places, pieces, strict=True):
                total[place] = piece.transpose(1, 2)
        d_q_RHD, d_k_SRGD, d_v_SRGD = _diagonal_backward(grad_RHD, q_RHD, k_SRGD, v_SRGD, out_RHD, lse_RH, ctx.scale)
        return d_q[:-1] + d_q_RHD, d_k[:-1].view_as(k), d_v[:-1].view_as(v), d_k_SRGD, d_v_SRGD, None, None


def _spare(x: Tensor) -> Tensor:
    """Append a row of zeros: where lines past a document's end, and tokens that are no query, read and write.

    Their query, output and gradient being zero, they pass no gradient to any key, whatever their log-sum-exp.
    """
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _lines(x: Tensor, index_nm: Tensor) -> Tensor:
    """Gather rows [.., heads, D] as the kernel wants them: [n, heads, m, D]."""
    return x[index_nm].transpose(1, 2)


def _tokens(x_BLGD: Tensor, group: Group) -> Tensor:
    flat = x_BLGD.flatten(0, 1)
    # Past a document's end any key serves: only queries without a gradient stand later.
    return _lines(flat, group.tokens_nm.clamp_max(len(flat) - 1))


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


def _diagonal_backward(
    grad_RHD: Tensor, q_RHD: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, out_RHD: Tensor, lse_RH: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the diagonal's gradients of q, k, v: p = exp(s - lse), ds = p * (grad . v - grad . out), as for any key."""
    G = k_SRGD.shape[2]
    g_RGPD, q_RGPD = grad_RHD.unflatten(1, (G, -1)), q_RHD.unflatten(1, (G, -1))
    p_SRGP = (_scores(q_RHD, k_SRGD, scale) - lse_RH.unflatten(1, (G, -1))).exp()
    delta_RGP = (grad_RHD * out_RHD).sum(-1).unflatten(1, (G, -1))
    d_s_SRGP = p_SRGP * (torch.einsum("rgpd,srgd->srgp", g_RGPD, v_SRGD) - delta_RGP) * scale
    d_q_RHD = torch.einsum("srgp,srgd->rgpd", d_s_SRGP, k_SRGD).flatten(1, 2)
    d_k_SRGD = torch.einsum("srgp,rgpd->srgd", d_s_SRGP, q_RGPD)
    return d_q_RHD, d_k_SRGD, torch.einsum("srgp,rgpd->srgd", p_SRGP, g_RGPD)
