"""A target whose norms are single operations computes what it computed before, bit for bit."""

import copy

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from draftsmith.target.norms import RMSNorm, fuse_norms
from tests.models import tiny_model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3"])
def test_a_target_with_fused_norms_is_the_same(kind: str) -> None:
    plain = tiny_model(kind).requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    assert any(isinstance(m, RMSNorm) for m in fused.modules()) is not kind.startswith("gemma"), (
        "Gemma's multiply by 1 + w"
    )
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(fused(ids).logits, plain(ids).logits)
    assert torch.equal(fused(ids).logits, plain(ids).logits), "under gradients"


def test_a_norm_with_a_gate_stays() -> None:
    gated = Qwen3_5RMSNormGated(16)
    fuse_norms(gated)
    x, gate = torch.randn(2, 3, 16).unbind(0)
    assert gated(x, gate).shape == x.shape


def test_a_norm_of_other_numbers_stays() -> None:
    """In bf16 the single operation rounds once where Llama's rounds twice."""
    model = tiny_model("llama").to(torch.bfloat16)
    before = [type(m) for m in model.modules()]
    fuse_norms(model)
    assert [type(m) for m in model.modules()] == before
    assert RMSNorm not in before
