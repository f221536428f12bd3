"""Attention with fewer key heads and a mask: the same numbers as transformers' own, which copies keys and values."""

from pathlib import Path

import pytest
import torch

from draftsmith.decoder.cache import KVCache, run_draft
from draftsmith.decoder.draft import Draft
from draftsmith.target.attention import GROUPED
from draftsmith.target.target import Target, load_target
from tests.models import save_tiny_target


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_a_draft_gets_the_states_of_transformers_attention(kind: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny_target(tmp_path / kind, kind)))
    assert target.model.config._attn_implementation == GROUPED
    ids_BN = torch.randint(3, target.vocab_size, (2, 7))

    def states(implementation: str) -> torch.Tensor:
        target.model.set_attn_implementation(implementation)
        cache = KVCache.for_target(target, 2, 16)
        first = run_draft(target, cache, Draft.chain(ids_BN[:, 0], ids_BN[:, 1:4])).last
        cache.append(4)
        return torch.cat([first, run_draft(target, cache, Draft.chain(ids_BN[:, 4], ids_BN[:, 5:])).last], 1)

    torch.testing.assert_close(states(GROUPED), states("sdpa"))


@torch.no_grad()
def test_without_a_mask_it_is_causal(tmp_path: Path) -> None:
    target: Target = load_target(str(save_tiny_target(tmp_path / "llama", "llama")))
    ids = torch.randint(3, target.vocab_size, (2, 9))
    found = target.model(input_ids=ids).logits
    target.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, target.model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_single_tokens_in_bf16_get_the_states_of_transformers_attention(kind: str, tmp_path: Path) -> None:
    """Rows of different lengths, so that there is a mask, and one alone, which has none."""
    target = load_target(str(save_tiny_target(tmp_path / kind, kind)), dtype="bfloat16")
    ids_BN = torch.randint(3, target.vocab_size, (2, 7))

    def states(implementation: str, rows: int) -> torch.Tensor:
        target.model.set_attn_implementation(implementation)
        cache = KVCache.for_target(target, rows, 16)
        run_draft(target, cache, Draft.chain(ids_BN[:rows, 0], ids_BN[:rows, 1:5]))
        cache.append(torch.tensor([5, 3])[:rows] if rows > 1 else 5)
        return run_draft(target, cache, Draft.chain(ids_BN[:rows, 5], ids_BN[:rows, 6:6])).last

    for rows in (1, 2):
        torch.testing.assert_close(states(GROUPED, rows), states("sdpa", rows), atol=0.02, rtol=0.02)
