"""EAGLE-3: training pass == cached decoding, packed == alone, derived layer configuration, mistakes."""

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.eagle3.head import Eagle3Head, Eagle3Options, build
from draftsmith.heads.layers import decoder_layer as eagle_layer
from draftsmith.heads.layers.config import rope_parameters
from draftsmith.heads.layers.decoder_layer import Rotary, attend
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import LLAMA3
from tests.models import tiny_model

LAYERS = (1, 4, 6)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAG_SETS = [dict(zip(FLAGS, on, strict=True)) for on in product([False, True], repeat=4) if not (on[1] and on[2])]
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}


class ListCache:
    """The simplest thing that fits `Eagle3Head.layer`'s `update`: two tensors that grow and can be cut back."""

    def __init__(self) -> None:
        self.k = self.v = None

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

    def cut(self, length: int) -> None:
        self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]


def make_target(kind: str = "llama", **overrides) -> Target:
    return Target(tiny_model(kind, **overrides), path="memory", fingerprint="none")


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


@torch.no_grad()
def decode_document(head: Eagle3Head, ids: Tensor, aux: Tensor, num_steps: int) -> Tensor:
    """Return [T, K, W] logits of every root, with a cache, feeding the document's own tokens: no draft is sampled."""
    T, cache, result = len(ids), ListCache(), []
    fused = head.fuse(aux[None])
    for t in range(T - 1):
        out = head.layer(ids[None, t + 1 : t + 2], fused[:, t : t + 1], torch.tensor([[t]]), cache, None)
        steps = [head.logits(out)[0, 0]]
        for k in range(1, min(num_steps, T - t - 1)):
            token = ids[None, t + 1 + k : t + 2 + k]
            out = head.layer(token, head.feedback(out), torch.tensor([[t + k]]), cache, None)
            steps.append(head.logits(out)[0, 0])
        cache.cut(t + 1)
        result.append(torch.nn.functional.pad(torch.stack(steps), (0, 0, 0, num_steps - len(steps)), value=torch.nan))
    return torch.stack(result)


def check_training_equals_decoding(head: Eagle3Head, batch: TrainBatch, num_steps: int = 4) -> None:
    L = batch.ids.shape[1]
    decoded = {}
    for b, row in enumerate(batch.document):
        for number in row[row >= 0].unique().tolist():
            inside = row == number
            start = int(inside.nonzero()[0])
            decoded[b, number] = start, decode_document(head, batch.ids[b][inside], batch.aux[b][inside], num_steps)
    compared = 0
    output = head(batch, num_steps)
    for step in output.steps:
        assert step.rows.tolist() == supervised_rows(batch, step.offset).flatten().nonzero().flatten().tolist()
        for flat, logits in zip(step.rows.tolist(), step.logits, strict=True):
            b, t = divmod(flat, L)
            start, table = decoded[b, int(batch.document[b, t])]
            torch.testing.assert_close(logits, table[t - start, step.offset], atol=2e-5, rtol=2e-5)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("flags", FLAG_SETS, ids=lambda f: "+".join(k for k, v in f.items() if v) or "plain")
def test_training_logits_equal_cached_decoding(flags):
    target = make_target()
    check_training_equals_decoding(make_head(target, **flags), pack(target, documents_of(target), LAYERS))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gemma3", {}),
        ("qwen3", {"head_dim": 32}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
    ],
    ids=["gemma3", "qwen3", "llama3-rope", "yarn-rope"],
)
def test_training_logits_equal_cached_decoding_for_other_targets(kind, overrides):
    target = make_target(kind, **overrides)
    check_training_equals_decoding(make_head(target), pack(target, documents_of(target), LAYERS))


@torch.no_grad()
def test_one_call_with_a_mask_equals_single_calls():
    """What a decoder does after a round: several accepted tokens at once, with a mask over a longer cache."""
    target = make_target()
    head = make_head(target)
    batch = pack(target, [[documents_of(target)[1][0]]], LAYERS)
    T = 12
    ids, fused, positions = batch.ids[:, 1 : T + 1], head.fuse(batch.aux[:, :T]), torch.arange(T)[None]
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    together = head.layer(ids, fused, positions, ListCache(), mask)
    cache = ListCache()
    single = [
        head.layer(ids[:, t : t + 1], fused[:, t : t + 1], positions[:, t : t + 1], cache, None) for t in range(T)
    ]
    torch.testing.assert_close(together, torch.cat(single, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalize", ["rows", "sequence"])
def test_packed_equals_alone(normalize):
    target = make_target()
    spec = LossSpec(normalize=normalize)

    def losses_and_gradients(batches: list[TrainBatch]) -> tuple[Tensor, Tensor]:
        head = make_head(target)
        losses = [head_loss(head(b, 4), b, target.head, head.draft_vocab, spec) for b in batches]
        sum(x.loss_sum for x in losses).backward()
        return sum(x.step_loss for x in losses), torch.cat(
            [p.grad.flatten() for p in head.parameters() if p.requires_grad]
        )

    rows = documents_of(target)
    packed = losses_and_gradients([pack(target, rows, LAYERS, width=37)])
    alone = losses_and_gradients([pack(target, [[document]], LAYERS) for row in rows for document in row])
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_the_layer_is_a_llama_layer_with_a_wider_input():
    """Norms, residuals, RoPE and MLP of step 0 against transformers' own layer, where the two coincide."""
    target = make_target()
    head = make_head(target)
    H, ours = target.hidden_size, head.layers[0]
    head.config._attn_implementation = "eager"
    theirs = LlamaDecoderLayer(head.config, 0)
    with torch.no_grad():  # blind our projections to the embedding, so that both see the hidden state alone
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(ours.self_attn, name).weight[:, :H] = 0
            getattr(theirs.self_attn, name).weight.copy_(getattr(ours.self_attn, name).weight[:, H:])
        theirs.self_attn.o_proj.weight.copy_(ours.self_attn.o_proj.weight)
        theirs.mlp.load_state_dict(ours.mlp.state_dict())
        theirs.input_layernorm.weight.copy_(ours.hidden_norm.weight)
        theirs.post_attention_layernorm.weight.copy_(ours.post_attention_layernorm.weight)
        x, T = torch.randn(2, 7, H), 7
        positions = torch.arange(T).expand(2, -1)
        mask = torch.ones(T, T, dtype=torch.bool).tril().expand(2, 1, T, T)
        expected = theirs(
            x,
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf),
            position_embeddings=head.rotary_emb(x, positions),
        )
        found = head.layer(torch.zeros(2, T, dtype=torch.int64), x, positions, ListCache(), mask)
    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected, atol=1e-5, rtol=1e-5)


def test_gradients_flow_through_the_feedback():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target), LAYERS)
    with torch.no_grad():
        head.layers[0].self_attn.o_proj.weight.zero_()  # without attention, step 2 sees fc through its own past only
    head(batch, 3).steps[2].logits.square().sum().backward()
    assert head.fc.weight.grad.abs().sum() > 0


def test_only_the_embedding_is_frozen():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target), LAYERS)
    head(batch, 3).steps[2].logits.square().sum().backward()
    assert {name for name, p in head.named_parameters() if not p.requires_grad} == {"embed_tokens.weight"}
    assert all(p.grad is not None for p in head.parameters() if p.requires_grad)


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


def test_a_batch_without_supervised_rows_gives_empty_steps():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target), LAYERS)
    batch.mask.fill_(False)
    output = head(batch, 2)
    loss = head_loss(output, batch, target.head, head.draft_vocab, LossSpec())
    assert [tuple(s.logits.shape) for s in output.steps] == [(0, len(head.draft_vocab))] * 2
    assert loss.loss_sum.item() == 0
    assert loss.rows.item() == 0
    loss.loss_sum.backward()


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "choose one"),
        ({"ttt_steps": 0}, "ttt_steps"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
    ],
)
def test_mistakes_in_the_options(options, words):
    with pytest.raises(UserError, match=words):
        Eagle3Options(**options)
