"""Random numbers, distributions and draws are those of the CPU; the flash kernel gives the value and gradients of the oracle."""

import pytest
import torch

from draftsmith.decoder.sampling import Sampling, draw, probs, row_key, uniforms
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.ttt_attention import eager_ttt_attention, ttt_attention, why_eager
from tests.gpu.support import DEVICE, on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_uniforms_are_bit_equal(stream):
    keys = torch.tensor([row_key(s, f"p{s}") for s in range(64)])
    counter = torch.arange(64) * 977
    there = uniforms(keys.to(DEVICE), counter.to(DEVICE), stream, 100)
    assert there.device.type == DEVICE.type
    assert torch.equal(there.cpu(), uniforms(keys, counter, stream, 100))


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=20), Sampling(1.3, top_p=0.8)], ids=str)
def test_distributions_and_draws_are_those_of_the_cpu(sampling):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(400, 1000, generator=generator)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    here, there = probs(logits, sampling), probs(logits.to(DEVICE), sampling)
    torch.testing.assert_close(there.cpu(), here, atol=1e-6, rtol=1e-5)
    same = draw(there, uniform.to(DEVICE)).cpu() == draw(here, uniform)
    assert same.float().mean() > 0.99, "only a draw at an edge between two tokens may tip"


def documents(lengths: list[list[int]], width: int) -> torch.Tensor:
    """[B, L] document numbers, -1 on padding."""
    rows = []
    for row in lengths:
        numbers = [number for number, length in enumerate(row) for _ in range(length)]
        rows.append(numbers + [-1] * (width - len(numbers)))
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "groups", "D"), [(4, 4, 32), (4, 2, 64), (6, 1, 128), (2, 2, 16), (2, 1, 256)])
@pytest.mark.parametrize("diagonal", [0, 1, 6])
@pytest.mark.parametrize("window", [None, 40])
def test_ttt_attention_equals_the_oracle_in_value_and_every_gradient(window, heads, groups, D, diagonal, dtype):
    document = documents([[90, 5, 161], [300], [1, 1, 250]], 304).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    needed = (torch.rand(document.shape, generator=generator) < 0.6).to(DEVICE) & (document >= 0)
    plan = plan_rows(document, needed).pack().within(window)
    (B, L), R = document.shape, int(needed.sum())
    shapes = [(R, heads, D), (B, L, groups, D), (B, L, groups, D), *[(diagonal, R, groups, D)] * 2]
    inputs = [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    scale = 1.5 * D**-0.5
    if dtype == torch.bfloat16 and D <= 128 and torch.cuda.get_device_capability()[0] >= 8:
        assert why_eager(D, dtype, DEVICE) is None, "or this test does not test the flash kernel"
    fast, slow = (
        ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], plan, scale),
        eager_ttt_attention(*exact[:3], exact[3:4], exact[4:], plan, scale),
    )
    assert fast.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1.5e-2
    assert (fast.float() - slow).norm() <= tolerance * slow.norm()
    grad = torch.randn(slow.shape, generator=generator).to(DEVICE, dtype)
    fast.backward(grad)
    slow.backward(grad.float())
    for ours, theirs in zip(inputs, exact, strict=True):
        assert (ours.grad.float() - theirs.grad).norm() <= 2 * tolerance * theirs.grad.norm() + 1e-6
