"""The target's final norm, measured from what it does, and drafters that start with it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.heads.dflash import DFlashOptions
from draftsmith.heads.dflash import build as build_dflash
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3 import build as build_eagle3
from draftsmith.heads.final_norm import final_norm_weight
from draftsmith.heads.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import tiny_model


def target_of(kind: str, dtype: torch.dtype = torch.float32) -> Target:
    """A tiny target whose final norm has weights of its own."""
    model = tiny_model(kind)
    with torch.no_grad():
        weight = model.get_decoder().norm.weight
        weight.copy_(torch.linspace(-0.5, 3.0, len(weight)))
    return Target(model.to(dtype), path="tiny", fingerprint="tiny")


# Gemma stores its weights less one.
@pytest.mark.parametrize(
    ("kind", "added"), [("llama", 0.0), ("qwen3", 0.0), ("deepseek", 0.0), ("gemma3", 1.0), ("gemma3n", 0.0)]
)
def test_what_the_final_norm_multiplies_with(kind: str, added: float) -> None:
    """The measured weights are the stored ones, as the architecture reads them."""
    target = target_of(kind)
    found = final_norm_weight(target)
    assert found is not None
    torch.testing.assert_close(found, target.decoder.norm.weight.detach() + added, atol=1e-4, rtol=1e-4)


def test_a_rounded_target_is_measured_too() -> None:
    """In bf16 the rounding of single quotients averages out."""
    target = target_of("llama", torch.bfloat16)
    found = final_norm_weight(target)
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, target.decoder.norm.weight.float(), atol=5e-3, rtol=5e-3)


def test_a_norm_of_another_kind_is_none() -> None:
    """Cohere's subtracts the mean."""
    assert final_norm_weight(target_of("cohere")) is None


def test_a_final_state_that_no_norm_made_is_none() -> None:
    """Where the norm is the identity, or sits elsewhere, nothing is guessed."""
    target = target_of("llama")
    target.decoder.norm = nn.Identity()
    assert final_norm_weight(target) is None


def test_drafters_start_with_it() -> None:
    """Those whose final norm feeds the target's projection, and is as wide as the target's."""
    target = target_of("llama")
    weight = target.decoder.norm.weight.detach()
    eagle3 = build_eagle3(Eagle3Options(draft_vocab_size=32), target, torch.arange(32))
    torch.testing.assert_close(eagle3.norm.weight.detach(), weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        build_dflash(DFlashOptions(mask_token_id=3), target, None).norm.weight.detach(), weight, atol=1e-4, rtol=1e-4
    )
    narrow = Eagle3Options(hidden_size=32, train_embeddings=True)
    assert bool((build_eagle3(narrow, target, None).norm.weight == 1.0).all())
    other = build_eagle3(Eagle3Options(), target_of("cohere"), None)
    assert bool((other.norm.weight == 1.0).all())
