"""Laws and draws."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.errors import UserError
from draftsmith.eval.noise import row_key, uniforms
from draftsmith.eval.sampling import Sampling, draw, law


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.0, top_k=4), Sampling(1.2, top_p=0.8), Sampling(0.8, 6, 0.6)]
)
def test_law_is_that_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    torch.testing.assert_close(law(logits, sampling), scores.softmax(-1))


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    counts = torch.bincount(draw(weights.expand(10_000, -1), uniform), minlength=5)
    assert counts.tolist() == [0, 7500, 0, 2500, 0]
    assert draw(weights[None], torch.tensor([0.0])).tolist() == [1]


def test_noise_is_uniform_and_depends_on_every_part() -> None:
    keys = torch.arange(100_000)
    zero = torch.zeros_like(keys)
    sample = uniforms(keys, zero, 0, 4)
    assert sample.min() >= 0
    assert sample.max() < 1
    torch.testing.assert_close(sample.mean(0), torch.full((4,), 0.5, dtype=torch.float64), atol=0.005, rtol=0)
    histogram = torch.histc(sample.float(), bins=64, min=0, max=1) / sample.numel() * 64
    assert (histogram - 1).abs().max() < 0.05
    for other in (uniforms(keys + 1, zero, 0, 4), uniforms(keys, zero + 1, 0, 4), uniforms(keys, zero, 1, 4)):
        correlation = torch.corrcoef(torch.stack([sample[:, 0], other[:, 0]]))[0, 1]
        assert abs(correlation) < 0.02
    assert torch.corrcoef(sample.T).fill_diagonal_(0).abs().max() < 0.02
    assert row_key(0, "a") != row_key(1, "a") != row_key(1, "b")


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)
