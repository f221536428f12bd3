"""The merged flash attention against concatenated scores and one softmax."""

import pytest
import torch
from torch import Tensor

from draftsmith.heads.layers import row_plan
from draftsmith.heads.layers import ttt_attention as attention
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.ttt_attention import eager_ttt_attention, merged_attention, ttt_attention, why_eager
from tests.pretended_gpu.cuda import pretended_gpu

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 5 + [2] * 6 + [-1] * 4, [0] * 24, [3] * 1 + [7] * 20 + [-1] * 3])


def needed_rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(DOCUMENTS.shape, generator=generator) < 0.6) & (DOCUMENTS >= 0)


def make_inputs(needed: Tensor, *, heads: int, groups: int, diagonal: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    (B, L), R, D = DOCUMENTS.shape, int(needed.sum()), 8
    shapes = [(R, heads, D), (B, L, groups, D), (B, L, groups, D), *[(diagonal, R, groups, D)] * 2]
    return [(2 * torch.randn(s, generator=generator)).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("diagonal", [0, 1, 4])
@pytest.mark.parametrize(("bucket", "window"), [(1, None), (32, None), (32, 1), (1, 4), (32, 4)])
def test_equals_the_oracle_in_value_and_every_gradient(
    bucket, window, heads, groups, diagonal, dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(row_plan, "BUCKET", bucket)
    needed = needed_rows()
    plan = plan_rows(DOCUMENTS, needed).within(window)
    inputs = make_inputs(needed, heads=heads, groups=groups, diagonal=diagonal, dtype=dtype)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    fast, slow = (
        ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, 0.4),
        eager_ttt_attention(*exact[:3], exact[3:4], exact[4:], plan, 0.4),
    )
    assert fast.dtype == dtype
    torch.testing.assert_close(fast.float(), slow, atol=tolerance, rtol=tolerance)
    grad = torch.randn(slow.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    fast.backward(grad)
    slow.backward(grad.float())
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=4 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("window", [None, 4])
def test_the_oracle_is_plain_attention_of_each_document_alone(window):
    needed = DOCUMENTS >= 0
    q, k, v, k_own, v_own = make_inputs(needed, heads=2, groups=2, diagonal=2, dtype=torch.float32)
    out = eager_ttt_attention(q, k, v, [k_own], [v_own], plan_rows(DOCUMENTS, needed).within(window), 0.5)
    index = needed.flatten().nonzero().flatten().tolist()
    L = DOCUMENTS.shape[1]
    for r, flat in enumerate(index):
        b, t = divmod(flat, L)
        keys = [j for j in range(t + 1) if DOCUMENTS[b, j] == DOCUMENTS[b, t]][-(window or L) :]
        all_k = torch.cat([k[b, keys], k_own[:, r]])
        all_v = torch.cat([v[b, keys], v_own[:, r]])
        weights = torch.einsum("hd,nhd->hn", q[r] * 0.5, all_k).softmax(-1)
        torch.testing.assert_close(out[r], torch.einsum("hn,nhd->hd", weights, all_v))


class GpuKernel:
    """What a GPU's flash kernels compute, in plain operations, with their signatures and layouts."""

    def scores(self, q, k, starts, scale, window_size_left=-1, window_size_right=-1):
        """[H, T, T], -inf outside a document, after the query, and further before it than the window."""
        assert window_size_right == (-1 if window_size_left == -1 else 0)
        number = torch.arange(len(q))
        document = torch.searchsorted(starts[1:].contiguous(), number, right=True)
        seen = (document[:, None] == document) & (number[:, None] >= number)
        if window_size_left >= 0:
            seen &= number[:, None] - number <= window_size_left
        scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
        return scores.masked_fill(~seen, -torch.inf)

    def forward(self, q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, *, scale, **window):
        assert q.dtype == k.dtype == v.dtype != torch.float32
        assert (starts.dtype, dropout, causal, debug) == (torch.int32, 0.0, True, False)
        assert longest == longest_k == int(starts.diff().max())
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
        scores = self.scores(q, k, starts, scale, **window)
        lse_HT = scores.logsumexp(-1)
        out = torch.einsum("hts,shd->thd", (scores - lse_HT[..., None]).exp(), v)
        return out.to(q.dtype), lse_HT, torch.zeros(2, dtype=torch.uint64), q.new_empty(0), q.new_empty(0)

    def backward(
        self, grad, q, k, v, out, lse_HT, starts, starts_k, longest, longest_k, dropout, causal, *state, scale, **window
    ):
        assert grad.dtype == q.dtype == k.dtype == v.dtype == out.dtype != torch.float32
        assert lse_HT.dtype == torch.float32
        assert lse_HT.is_contiguous()
        assert len(state) == 2
        P = q.shape[1] // k.shape[1]
        k_all, v_all = (x.repeat_interleave(P, 1).float() for x in (k, v))
        scores = self.scores(q, k_all, starts, scale, **window)
        p = (scores - lse_HT[..., None]).exp()
        delta = (grad.float() * out.float()).sum(-1).T
        d_s = p * (torch.einsum("thd,shd->hts", grad.float(), v_all) - delta[..., None]) * scale
        d_q = torch.einsum("hts,shd->thd", d_s, k_all)
        d_k, d_v = torch.einsum("hts,thd->shd", d_s, q.float()), torch.einsum("hts,thd->shd", p, grad.float())
        d_k, d_v = (x.unflatten(1, (k.shape[1], P)).sum(2) for x in (d_k, d_v))
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("diagonal", [0, 1, 4])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_gpus_packed_way_equals_the_oracle(window, heads, groups, diagonal, monkeypatch):
    """On a CPU with the kernels written out: tests/gpu runs the same with the kernels themselves."""
    kernel = GpuKernel()
    monkeypatch.setattr(attention, "_gpu_forward", kernel.forward)
    monkeypatch.setattr(attention, "_gpu_backward", kernel.backward)
    monkeypatch.setattr(attention, "_on_cpu", lambda x: False)
    needed = needed_rows()
    plan = plan_rows(DOCUMENTS, needed).pack().within(window)
    inputs = make_inputs(needed, heads=heads, groups=groups, diagonal=diagonal, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    fast, slow = (
        merged_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, 0.4),
        eager_ttt_attention(*exact[:3], exact[3:4], exact[4:], plan, 0.4),
    )
    assert fast.dtype == torch.bfloat16
    torch.testing.assert_close(fast.float(), slow, atol=3e-2, rtol=3e-2)
    grad = torch.randn(slow.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    fast.backward(grad)
    slow.backward(grad.float())
    for ours, theirs in zip(inputs, exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad.float() - theirs.grad).norm() <= 0.02 * theirs.grad.norm()


def test_autocast_leaves_the_merge_in_fp32():
    needed = needed_rows()
    plan = plan_rows(DOCUMENTS, needed)
    inputs = make_inputs(needed, heads=4, groups=2, diagonal=3, dtype=torch.float32)
    plain = ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, 0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, 0.4)
    assert torch.equal(inside, plain)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "capability", "reason", "remedy"),
    [
        (128, torch.bfloat16, (8, 6), None, None),
        (256, torch.float16, (9, 0), None, None),
        (128, torch.float32, (9, 0), "it takes no float32", "set train.precision to bf16"),
        (20, torch.bfloat16, (9, 0), "head.head_dim is 20", "choose a multiple of 8, 256 at most"),
        (256, torch.bfloat16, (8, 9), "head.head_dim is 256", "choose a multiple of 8, 192 at most"),
        (128, torch.float16, (7, 5), "a pretended GPU is older than Ampere", "take a newer GPU"),
    ],
)
def test_what_the_gpus_kernel_does_not_take_is_said(head_dim, dtype, capability, reason, remedy, monkeypatch):
    with pretended_gpu():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        found = why_eager(head_dim, dtype, torch.device("cuda"))
    assert found == (None if reason is None else (reason, remedy))


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_a_torch_with_other_flash_operations_is_said(name, monkeypatch):
    assert attention._operations_are_known(), "those of the torch of constraints.txt"
    monkeypatch.setitem(attention._ARGUMENTS, name, f"{attention._ARGUMENTS[name]} block_table")
    attention._operations_are_known.cache_clear()
    with pretended_gpu():
        why, _ = why_eager(64, torch.bfloat16, torch.device("cuda"))
    attention._operations_are_known.cache_clear()
    assert why == f"that of torch {torch.__version__} takes other arguments"
