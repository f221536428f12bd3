"""What drafters start with of a target: its final norm, measured from what it does, and streams of a known size."""

from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.heads.base import DraftHead
from draftsmith.heads.dflash.head import DFlashOptions
from draftsmith.heads.dflash.head import build as build_dflash
from draftsmith.heads.eagle3.head import Eagle3Options
from draftsmith.heads.eagle3.head import build as build_eagle3
from draftsmith.heads.hydra.head import HydraOptions
from draftsmith.heads.hydra.head import build as build_hydra
from draftsmith.heads.layers.from_target import final_norm_weight
from draftsmith.heads.registry import find_method
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target
from draftsmith.train.schedule import build_optimizers
from tests.batches import documents_of, pack
from tests.gpu.support import OPTIONS
from tests.models import make_target, tiny_model


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


@torch.no_grad()
def test_weights_far_above_the_states_are_scaled_down() -> None:
    """As Gemma's, where the streams are next to nothing; else the logits of a draft start many times as large as the target's."""
    target = target_of("llama")
    small = torch.arange(target.hidden_size) < 4
    target.embedding[:, small] *= 1e-3
    for layer in target.decoder.layers:
        layer.self_attn.o_proj.weight[small] *= 1e-3
        layer.mlp.down_proj.weight[small] *= 1e-3
    target.decoder.norm.weight[small] = 300.0
    head = build_eagle3(Eagle3Options(), target, None)
    scale = head.norm.weight / target.decoder.norm.weight
    torch.testing.assert_close(scale, scale[-1].expand_as(scale), rtol=1e-3, atol=0.0)
    assert float(scale[-1].log2()) == pytest.approx(round(float(scale[-1].log2())), abs=1e-2)
    ids = torch.randint(3, target.vocab_size, (4, 32), generator=torch.Generator().manual_seed(7))
    states = target.forward(ids, layer_ids=head.reads.layer_ids)
    found = head.logits(head.fuse(states.aux)).std() / target.head.logits(states.last).std()
    assert 0.5 < found < 2.0


def test_a_scale_of_the_targets_logits_is_part_of_it() -> None:
    """Granite divides its logits by 4; a projection with its rows does not, unless it is a block drafter's, which is its own."""
    target = target_of("granite")
    check_target(target)
    weight = target.decoder.norm.weight.detach()
    eagle3 = build_eagle3(Eagle3Options(), target, None)
    torch.testing.assert_close(eagle3.norm.weight.detach(), weight / 4, atol=1e-4, rtol=1e-4)
    dflash = build_dflash(DFlashOptions(mask_token_id=3), target, None)
    torch.testing.assert_close(dflash.norm.weight.detach(), weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["granite", "cohere"])
@pytest.mark.parametrize("method", ["medusa", "medusa2", "hydra", "eagle3", "peagle"])
def test_own_projections_start_with_that_scale(kind: str, method: str) -> None:
    """What the target's rows make of a state, those of a new head make of the same one: their norms apart, which Cohere's, that
    subtracts the mean, has not in common with a draft's."""
    target = target_of(kind)
    head = find_method(method).build(OPTIONS[method], target, None)
    state = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    if method.startswith("medusa"):
        found = head.lm_heads[1](state)
    elif method == "hydra":
        found = head.hydra_lm_head[1].of(state, target.head)
    else:
        found = head.lm_head(state)
        if kind == "granite":  # whose norm has the scale
            found = found * (head.norm.weight / target.decoder.norm.weight).detach().mean()
    torch.testing.assert_close(found, target.head.logits(state), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_new_heads_repeat_the_targets_own_prediction(method: str, original: bool) -> None:
    target, made = make_target(), find_method(method)
    head = made.build(made.options_class(3, 2, original_lm_head=original), target, None)
    batch = pack(target, documents_of(target), ())
    for step in head(batch, 3).steps:
        torch.testing.assert_close(step.logits, target.head.logits(batch.last.flatten(0, 1)[step.rows]))


def test_hydras_bias_starts_as_the_targets() -> None:
    model = tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.linspace(-1.0, 1.0, model.config.vocab_size))
    target = Target(model, path="tiny", fingerprint="tiny")
    head = find_method("hydra").build(OPTIONS["hydra"], target, None)
    state = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.hydra_lm_head[0].of(state, target.head), target.head.logits(state))


@torch.no_grad()
def test_hydras_prefix_layer_starts_by_giving_the_states_back() -> None:
    """But for what a norm does to the size of a single one."""
    target = loud_target()
    head = build_hydra(HydraOptions(num_heads=1, prefix_attention=True), target, None)
    last = target.forward(torch.randint(3, target.vocab_size, (2, 12))).last
    rotation = head.prefix_embedding_layer.rotary_emb(last, torch.arange(12).expand(2, -1))
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    given = head.prefix_embedding_layer.step(last, rotation, lambda number, keys, values: (keys, values), mask)
    assert torch.cosine_similarity(given, last, dim=-1).min() > 0.999
    size, same = (x.square().mean(-1).sqrt() for x in (given, last))
    torch.testing.assert_close(size.median(), same.median(), rtol=0.2, atol=0.0)


def fused_rms(head: DraftHead, target: Target) -> float:
    """The median RMS of fused streams over tokens that no start has seen."""
    ids = torch.randint(3, target.vocab_size, (4, 32), generator=torch.Generator().manual_seed(7))
    fused = head.fuse(target.forward(ids, layer_ids=head.reads.layer_ids).aux)
    return float(fused.detach().square().mean(-1).sqrt().median())


def loud_target() -> Target:
    """A target whose streams have an RMS of about 50."""
    target = target_of("llama")
    with torch.no_grad():
        target.embedding.normal_(std=50.0)
    return target


@pytest.mark.parametrize("options", [{}, {"hidden_size": 32, "train_embeddings": True}], ids=["same", "narrow"])
def test_fused_streams_start_at_one_and_learn_in_proportion(options: dict[str, Any]) -> None:
    """Otherwise the layer would say nothing beside them; a small matrix at the full rate would be overwritten at once."""
    target = loud_target()
    head = build_eagle3(Eagle3Options(layer_ids=[1, 3, 5], **options), target, None)
    assert fused_rms(head, target) == pytest.approx(1.0, rel=0.2)
    factor = head.lr_factor("fc.weight")
    assert factor < 0.1
    assert head.lr_factor("lm_head.weight") == 1.0
    spec = TrainSpec(epochs=1, optimizer="muon", lr=1e-3, muon_lr=1e-2)
    rates = {
        id(parameter): group["lr"]
        for optimizer in build_optimizers(head, spec)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates[id(head.fc.weight)] == pytest.approx(1e-2 * factor)
    assert rates[id(head.layers[0].self_attn.q_proj.weight)] == pytest.approx(1e-2)
    with torch.no_grad():
        head.fc.weight.mul_(1000.0)
    assert head.lr_factor("fc.weight") == 1.0


def test_quiet_streams_stay_as_they_are() -> None:
    """Scaled up, the layer would say less beside them."""
    target = target_of("llama")
    with torch.no_grad():
        target.embedding.mul_(1e-3)
        for layer in target.decoder.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
    head = build_eagle3(Eagle3Options(layer_ids=[1, 3, 5]), target, None)
    assert fused_rms(head, target) < 0.5
    assert head.lr_factor("fc.weight") == pytest.approx(1.0, abs=0.02)


def test_a_residual_that_is_normalised_needs_no_scale() -> None:
    """Then the layer sees streams of one RMS whatever theirs is."""
    target = loud_target()
    head = build_eagle3(Eagle3Options(layer_ids=[1, 3, 5], norm_before_residual=True), target, None)
    assert fused_rms(head, target) > 5.0
    assert head.lr_factor("fc.weight") == 1.0
