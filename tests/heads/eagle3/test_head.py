"""EAGLE-3: parts of the layer, precision, derived layer configuration, mistakes."""

import pytest
import torch
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.eagle3.head import Eagle3Head, Eagle3Options, build
from draftsmith.heads.layers import decoder_layer as eagle_layer
from draftsmith.heads.layers.decoder_layer import Rotary, attend
from draftsmith.heads.layers.from_target import rope_parameters
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import LLAMA3
from tests.models import make_target

LAYERS = (1, 4, 6)


def make_head(target: Target, seed: int = 0, **options) -> Eagle3Head:
    """A head whose every tensor matters: norms away from one, a draft vocabulary with gaps."""
    vocab = torch.arange(0, target.vocab_size, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build(Eagle3Options(layer_ids=list(LAYERS), draft_vocab_size=len(vocab), **options), target, vocab)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return head


@pytest.mark.parametrize("flag", [False, True])
def test_norm_before_residual_chooses_the_residual(flag):
    layer = make_head(make_target(), norm_before_residual=flag).layers[0]
    embedded, hidden = torch.randn(2, 3, 5, 64)
    x, residual = layer.layer_input(embedded, hidden)
    torch.testing.assert_close(x, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1))
    torch.testing.assert_close(residual, layer.hidden_norm(hidden) if flag else hidden)


def test_autocast_keeps_fp32_masters_and_comes_close():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target), LAYERS)
    exact = head(batch, 3)
    with torch.autocast("cpu", torch.bfloat16):
        rough = head(batch, 3)
        loss = head_loss(rough, batch, target.head, head.draft_vocab, LossSpec())
    loss.loss_sum.backward()
    assert rough.steps[2].logits.dtype == torch.bfloat16
    assert loss.loss_sum.dtype == head.fc.weight.grad.dtype == torch.float32
    spread = exact.steps[2].logits.std()
    assert (rough.steps[2].logits - exact.steps[2].logits).abs().max() < 0.15 * spread + 0.1


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_step_without_rows_needs_no_frequencies(rope_type):
    """Some frequencies go by the longest position of a call, and a short answer leaves later steps none."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0} | (factors if rope_type == "longrope" else {})
    rotary = Rotary(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope))
    x = torch.zeros(1, 0, 64, dtype=torch.bfloat16)
    for found, usual in zip(
        rotary(x, torch.zeros(1, 0, dtype=torch.int64)), rotary(x, torch.zeros(1, 3, dtype=torch.int64)), strict=True
    ):
        assert (found.shape, found.dtype) == ((1, 0, 16), usual.dtype)
        assert usual.shape == (1, 3, 16)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_repeated_keys_are_shared_ones(groups, monkeypatch):
    """What a GPU computes under a mask, beside what a CPU does."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 16, generator=generator)
    k, v = torch.randn(2, 2, groups, 5, 16, generator=generator)
    mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
    mask[..., 0] = True
    shared = [attend(q, k, v, how) for how in (mask, None)]
    monkeypatch.setattr(eagle_layer, "_repeats", lambda q: True)
    for one, how in zip(shared, (mask, None), strict=True):
        torch.testing.assert_close(attend(q, k, v, how), one)


def test_casting_leaves_the_rotary_frequencies_exact():
    head = make_head(make_target())
    before = head.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(head.rotary_emb.inv_freq, before)
    assert head.to("meta").rotary_emb.inv_freq.device.type == "meta"


def test_build_takes_everything_from_the_target():
    target = make_target("gemma3")
    head = make_head(target, intermediate_size=40)
    assert head.reads.layer_ids == LAYERS
    assert torch.equal(head.lm_head.weight, target.head.weight[head.draft_vocab])
    assert head.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()
    assert (head.config.intermediate_size, head.config.num_key_value_heads) == (40, 2)
    assert head.config.rope_parameters["rope_theta"] == target.config.rope_parameters["full_attention"]["rope_theta"]
    assert head.config.rms_norm_eps == target.config.rms_norm_eps
    full = build(Eagle3Options(layer_ids=[1], train_lm_head=False), target, None)
    assert full.draft_vocab is None
    assert full.lm_head.out_features == target.vocab_size
    assert not full.lm_head.weight.requires_grad


def test_default_layers_are_the_engines():
    assert build(Eagle3Options(), make_target(), None).reads.layer_ids == (2, 4, 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (LLAMA3, LLAMA3),
        (None, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {}},
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]},
        ),
        (
            {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
)
def test_rope_parameters(given, expected):
    class Config:
        rope_parameters = given

    assert rope_parameters(Config()) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_ids": [1, 8]}, "8 is the number of layers"),
        ({"layer_ids": [1], "num_key_value_heads": 3}, "key/value heads"),
        ({"layer_ids": [1], "num_attention_heads": 5}, "5 heads"),
        ({"layer_ids": [1], "head_dim": 7}, "even"),
    ],
)
def test_mistakes_that_need_the_target(options, words):
    with pytest.raises(UserError, match=words):
        build(Eagle3Options(**options), make_target(), None)


def test_two_norms_before_the_projection_are_refused():
    with pytest.raises(UserError, match="choose one"):
        Eagle3Options(norm_before_fc=True, fc_norm=True)
