"""The pass that is written out computes what transformers' layers do, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.slots import run_draft
from draftsmith.target.plain_pass import PlainPass
from draftsmith.target.target import Target, TargetOutput
from tests.models import make_target

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, sliding": ("mistral", {}),
    "qwen2, sliding in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    ),
    "qwen3": ("qwen3", {}),
}


def two_passes(target: Target) -> list[TargetOutput]:
    """Read two prompts, then a draft of two rows: one token, and a tree."""
    outputs = []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 150, (2, 12), generator=generator)
    for parents in ([-1], [-1, 0, 0, 1, 3]):
        cache = KVCache.for_target(target, 2, 20)
        run_draft(target, cache, Draft.chain(ids[:, 0], ids[:, 1:]), longest=0)
        cache.append(torch.tensor([12, 9]))
        nodes = torch.tensor([parents, parents])
        tokens = torch.randint(3, 150, nodes.shape, generator=generator)
        draft = Draft(tokens, nodes, torch.full((2,), len(parents)))
        outputs.append(run_draft(target, cache, draft, (0, 3, 7), longest=12))
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_transformers(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = KINDS[kind]
    target = make_target(name, dtype, **options)
    assert target.plain_pass is not None
    calls = []
    run = PlainPass.__call__
    monkeypatch.setattr(PlainPass, "__call__", lambda *args: calls.append(1) or run(*args))
    found = two_passes(target)
    assert len(calls) == 2, "prompts are read by transformers"
    target.plain_pass = None
    for ours, theirs in zip(found, two_passes(target), strict=True):
        assert torch.equal(ours.last, theirs.last)
        assert torch.equal(ours.aux, theirs.aux)


def hook(target: Target) -> None:
    target.model.model.layers[3].mlp.register_forward_hook(lambda *_: None)


def other_linear(target: Target) -> None:
    class Quantized(nn.Linear):
        pass

    target.model.model.layers[3].mlp.up_proj.__class__ = Quantized


def replaced_forward(target: Target) -> None:
    mlp = target.model.model.layers[3].mlp
    mlp.forward = mlp.forward


def no_linear(target: Target) -> None:
    """As packages of quantized weights put in, without a weight of its own."""
    attention = target.model.model.layers[3].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj)


def other_weight(target: Target) -> None:
    """As torchao puts in, whose weights stand in plain linear layers."""

    class Packed(torch.Tensor):
        pass

    layer = target.model.model.layers[3].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)


@pytest.mark.parametrize("change", [hook, other_linear, other_weight, no_linear, replaced_forward])
def test_a_model_that_others_changed_is_left_to_transformers(change: Callable[[Target], None]) -> None:
    target = make_target()
    change(target)
    assert target.plain_pass is None


@pytest.mark.parametrize("kind", ["gemma3", "mixtral", "granite", "gpt_oss"])
def test_another_architecture_is_left_to_transformers(kind: str) -> None:
    assert make_target(kind).plain_pass is None
