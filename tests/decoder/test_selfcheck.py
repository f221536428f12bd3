"""Targets that the decoder serves exactly pass; others are refused in a sentence."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.decoder import cache, slots
from draftsmith.decoder.selfcheck import check_decoding
from draftsmith.errors import UserError
from draftsmith.target.target import Target
from tests.models import KINDS, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_supported_targets_pass(kind: str, dtype: torch.dtype) -> None:
    check_decoding(Target(copy.deepcopy(tiny_model(kind)).to(dtype), path="tiny", fingerprint="0"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_by_slot_are_refused(dtype: torch.dtype) -> None:
    """MPT's ALiBi counts slots: two children of one node would stand at different distances."""
    config = AutoConfig.for_model("mpt", d_model=32, n_heads=4, n_layers=4, vocab_size=64, max_seq_len=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with pytest.raises(UserError, match="'mpt' cannot be decoded"):
        check_decoding(Target(model, path="tiny", fingerprint="0"))


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = slots.attention_masks
    monkeypatch.setattr(slots, "attention_masks", lambda *args: torch.ones_like(real(*args)))
    with pytest.raises(UserError, match="differ from those of a plain forward"):
        check_decoding(Target(tiny_model("llama"), path="tiny", fingerprint="0"))


def test_a_failing_forward_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("sizes\ndo not fit")

    monkeypatch.setattr(slots, "attention_masks", fail)
    with pytest.raises(UserError, match="sizes do not fit"):
        check_decoding(Target(tiny_model("llama"), path="tiny", fingerprint="0"))


def test_windows_that_are_part_of_the_model_are_reached() -> None:
    """GPT-Neo cuts its local attention by slot, which shows once a text is longer than the window."""
    config = AutoConfig.for_model(
        "gpt_neo", hidden_size=32, num_heads=4, num_layers=4, attention_types=[[["global", "local"], 2]], vocab_size=64,
        max_position_embeddings=128, window_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(UserError, match="'gpt_neo' cannot be decoded"):
        check_decoding(Target(AutoModelForCausalLM.from_config(config).eval(), path="tiny", fingerprint="0"))


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
@pytest.mark.parametrize("wider", [1, -1])
def test_a_wrong_window_is_noticed_however_long(kind: str, wider: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(kind, sliding_window=64), path="tiny", fingerprint="0")
    check_decoding(target)
    real = cache.build_mask

    def build_mask(lengths: Tensor, above: Tensor, visible: int, depth: Tensor, window: int | None) -> Tensor:
        return real(lengths, above, visible, depth, None if window is None else window + wider)

    monkeypatch.setattr(cache, "build_mask", build_mask)
    with pytest.raises(UserError, match="differ from those of a plain forward"):
        check_decoding(target)
    assert target.config.sliding_window == 64
