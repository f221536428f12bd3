"""Causal attention within documents, with its log-sum-exp: the part of EAGLE-3's training attention that kernels do.

Shapes: B batch rows, L tokens, R query rows (flat b*L+t), H query heads, G key/value heads, D head size, n documents
of a group, m its longest, T tokens of all documents.

On a CPU torch's flash kernel takes lines of one length, so documents of about one length share a call (1.5 to 7 times
faster than packed rows with a document mask, for documents of 64 to 512 tokens), in fp32. On a GPU one call takes all
documents end to end, in bf16 or fp16. Both backward kernels work from an output and a log-sum-exp that they are given:
those of a softmax over more keys make their probabilities, and so the gradients, those of that softmax.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.layers.row_plan import Group, RowPlan

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_gpu_forward = torch.ops.aten._flash_attention_forward
_gpu_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Attended:
    """out_RHD: the attention's output. lse_RH: fp32, the log-sum-exp of the scores."""

    out_RHD: Tensor
    lse_RH: Tensor


@dataclass(frozen=True)
class Gradients:
    """Of the queries [R, H, D], and of the keys and values [B, L, G, D]."""

    q_RHD: Tensor
    k_BLGD: Tensor
    v_BLGD: Tensor


def gpu_kernel_takes(q_RHD: Tensor) -> bool:
    """Return whether a GPU's flash kernel takes these queries, forward and backward: half precision, on Ampere or later.

    Heads of more than 192 are left to the chips of data centres, as in torch's own choice of kernels.
    """
    D = q_RHD.shape[-1]
    if q_RHD.dtype not in (torch.bfloat16, torch.float16) or D % 8 or D > 256:
        return False
    if q_RHD.device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    major, minor = torch.cuda.get_device_capability(q_RHD.device)
    return major >= 8 and (D <= 192 or (major in (8, 9, 10) and minor == 0))


def causal_attention(q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, plan: RowPlan, scale: float) -> Attended:
    """Return the attention of every query row over its document so far, or over the last `plan.window` tokens of it."""
    if _on_cpu(q_RHD):
        return _by_groups(q_RHD, k_BLGD, v_BLGD, plan, scale)
    packed = plan.packed
    q_THD, k_TGD, v_TGD = _spread(q_RHD, plan), *(x.flatten(0, 1)[packed.tokens_T] for x in (k_BLGD, v_BLGD))
    lengths = (packed.starts, packed.starts, packed.longest, packed.longest)
    out_THD, lse_HT, *_ = _gpu_forward(q_THD, k_TGD, v_TGD, *lengths, 0.0, True, False, scale=scale, **_window(plan))
    return Attended(out_THD[packed.place_R], lse_HT.T[packed.place_R])


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
    k_TGD, v_TGD = (x.flatten(0, 1)[packed.tokens_T] for x in (k_BLGD, v_BLGD))
    grad_THD, q_THD, out_THD, lse_TH = (_spread(x, plan) for x in (grad_RHD, q_RHD, total.out_RHD, total.lse_RH))
    lengths = (packed.starts, packed.starts, packed.longest, packed.longest)
    # The state of the random numbers of dropout, which there is none of.
    unused = (torch.zeros(2, dtype=torch.uint64, device=q_RHD.device), q_RHD.new_empty(0))
    parts = (grad_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH.T.contiguous())
    d_q, d_k, d_v = _gpu_backward(*parts, *lengths, 0.0, True, *unused, scale=scale, **_window(plan))
    d_k_BLGD, d_v_BLGD = (
        torch.zeros_like(x.flatten(0, 1)).index_copy_(0, packed.tokens_T, d).view_as(x)
        for x, d in ((k_BLGD, d_k), (v_BLGD, d_v))
    )
    return Gradients(d_q[packed.place_R], d_k_BLGD, d_v_BLGD)


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
    return x_R.new_zeros(len(packed.tokens_T), *x_R.shape[1:]).index_copy_(0, packed.place_R, x_R)


def _by_groups(q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, plan: RowPlan, scale: float) -> Attended:
    q, out, lse = _spare(q_RHD), _spare(torch.empty_like(q_RHD)), _spare(q_RHD.new_empty(q_RHD.shape[:2]))
    for group in plan.groups:
        parts = (_lines(q, group.queries_nm), _tokens(k_BLGD, group), _tokens(v_BLGD, group))
        out_nHmD, lse_nHm = _cpu_forward(*parts, dropout_p=0.0, scale=scale, **_band(plan, group, q))
        out[group.queries_nm], lse[group.queries_nm] = out_nHmD.transpose(1, 2), lse_nHm.transpose(1, 2)
    return Attended(out[:-1], lse[:-1])


def _backward_by_groups(
    grad_RHD: Tensor, q_RHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, total: Attended, plan: RowPlan, scale: float
) -> Gradients:
    q, out, grad, lse = (_spare(x) for x in (q_RHD, total.out_RHD, grad_RHD, total.lse_RH))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, _spare(k_BLGD.flatten(0, 1)), _spare(v_BLGD.flatten(0, 1))))
    for group in plan.groups:
        grad_part, q_part, out_part = (_lines(x, group.queries_nm) for x in (grad, q, out))
        lse_part = lse[group.queries_nm].transpose(1, 2)
        parts = (grad_part, q_part, _tokens(k_BLGD, group), _tokens(v_BLGD, group), out_part, lse_part)
        pieces = _cpu_backward(*parts, dropout_p=0.0, scale=scale, **_band(plan, group, q))
        places = (group.queries_nm, group.tokens_nm, group.tokens_nm)
        for gradient, index, piece in zip((d_q, d_k, d_v), places, pieces, strict=True):
            gradient[index] = piece.transpose(1, 2)
    return Gradients(d_q[:-1], d_k[:-1].view_as(k_BLGD), d_v[:-1].view_as(v_BLGD))


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
