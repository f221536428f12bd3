"""Targets that the decoder serves exactly pass; others are refused in a sentence."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.eval import passes
from draftsmith.eval.selfcheck import check_decoding
from draftsmith.heads.target import Target
from tests.models import KINDS, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_supported_targets_pass(kind: str, dtype: torch.dtype) -> None:
    check_decoding(Target(copy.deepcopy(tiny_model(kind)).to(dtype), path="tiny", fingerprint="0"))


def test_positions_by_slot_are_refused() -> None:
    """MPT's ALiBi counts slots: two children of one node would stand at different distances."""
    config = AutoConfig.for_model("mpt", d_model=32, n_heads=4, n_layers=4, vocab_size=64, max_seq_len=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match="'mpt' cannot be decoded"):
        check_decoding(Target(model, path="tiny", fingerprint="0"))


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = passes.attention_masks
    monkeypatch.setattr(passes, "attention_masks", lambda *args: torch.ones_like(real(*args)))
    with pytest.raises(UserError, match="differ from those of a plain forward"):
        check_decoding(Target(tiny_model("llama"), path="tiny", fingerprint="0"))


def test_a_failing_forward_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("sizes\ndo not fit")

    monkeypatch.setattr(passes, "attention_masks", fail)
    with pytest.raises(UserError, match="sizes do not fit"):
        check_decoding(Target(tiny_model("llama"), path="tiny", fingerprint="0"))
