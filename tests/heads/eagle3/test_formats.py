"""The speculators layout of EAGLE-3: its keys, its tensors, and what an engine computes from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.errors import UserError
from draftsmith.heads.eagle3.formats import load_eagle3_directory, load_speculators_directory
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.contracts import validate
from draftsmith.heads.formats.layout import layouts
from tests.batches import documents_of, pack
from tests.exports import LLAMA3, VOCAB, make_eagle3, make_target
from tests.models import save_tiny_target

LAYOUT = "eagle3_speculators"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# All combinations, but one norm before the fusion at most.
COMBINATIONS = [
    {flag: bool(bits >> i & 1) for i, flag in enumerate(FLAGS)} for bits in range(16) if bits & 0b0110 != 0b0110
]


def write(folder: Path, **options) -> tuple[Any, Any, dict[str, Any], dict[str, Tensor]]:
    """Export a head; return the target, the head, config.json and the tensors."""
    target = make_target(**options.pop("target", {}))
    head = make_eagle3(target, **options)
    export_head(head, target, folder, layout=LAYOUT, num_speculative_tokens=4)
    return target, head, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: "+".join(f for f in FLAGS if flags[f]) or "plain")
def test_the_reloaded_export_gives_the_training_logits(flags, tmp_path):
    target, head, config, _ = write(tmp_path / "out", **flags)
    assert {flag: config[flag] for flag in FLAGS} == flags
    reloaded = load_speculators_directory(tmp_path / "out", target)
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    for ours, theirs in zip(head(batch, 3).steps, reloaded(batch, 3).steps, strict=True):
        assert torch.equal(ours.logits, theirs.logits)


def read_by_an_engine(config: dict[str, Any], tensors: dict[str, Tensor], tokens: Tensor, aux: Tensor) -> Tensor:
    """The first step of vLLM's Eagle3LlamaForCausalLM, written from its source; tokens [n], aux [n, A*H] -> [n, W]."""
    layer = config["transformer_layer_config"]
    H, D, eps = layer["hidden_size"], layer["head_dim"], layer["rms_norm_eps"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"layers.0.{name}.weight"].T

    if config.get("norm_before_fc", False):
        aux = norm("input_norm", aux)
    if config.get("fc_norm", False):
        chunks = aux.chunk(layer.get("num_aux_hidden_states", 3), dim=-1)
        aux = torch.cat([norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)], dim=-1)
    hidden = aux @ tensors["fc.weight"].T
    assert hidden.shape[-1] == H
    normed = norm("layers.0.hidden_norm", hidden)
    residual = normed if config.get("norm_before_residual", True) else hidden  # vLLM's default is true
    x = torch.cat([norm("layers.0.input_layernorm", tensors["embed_tokens.weight"][tokens]), normed], dim=-1)
    q, k, v = (linear(f"self_attn.{n}_proj", x).unflatten(-1, (-1, D)).transpose(0, 1)[None] for n in "qkv")
    cos_sin = LlamaRotaryEmbedding(LlamaConfig(**layer))(x, torch.arange(len(tokens))[None])
    q, k = apply_rotary_pos_emb(q, k, *cos_sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
    residual = residual + linear("self_attn.o_proj", out)
    x = norm("layers.0.post_attention_layernorm", residual)
    x = linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x))
    return norm("norm", residual + x) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "layer_ids": (1, 6)},
        {"target": {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}, "num_key_value_heads": 1},
    ],
    ids=["plain", "norms", "two-layers", "rope"],
)
def test_an_engine_computes_our_logits_from_the_files(options, tmp_path):
    target, head, config, tensors = write(tmp_path / "out", **options)
    document = documents_of(target, ((20,),))
    batch = pack(target, document, head.reads.layer_ids)
    step = head(batch, 1).steps[0]
    logits = read_by_an_engine(config, tensors, document[0][0][1:], batch.aux[0, :-1])
    torch.testing.assert_close(logits[step.rows], step.logits, atol=1e-4, rtol=1e-4)


def test_the_keys_are_where_readers_look(tmp_path):
    target, _, config, tensors = write(tmp_path / "out", layer_ids=(1, 6))
    assert set(config) == {
        "architectures",
        "speculators_model_type",
        "speculators_version",
        "draft_vocab_size",
        "target_hidden_size",
        "eagle_aux_hidden_state_layer_ids",
        *FLAGS,
        "transformer_layer_config",
        "speculators_config",
    }
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]) == (9, [1, 6])
    assert config["norm_before_residual"] is False
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["num_aux_hidden_states"]) == ("llama", 1, 2)
    assert (layer["vocab_size"], layer["hidden_size"], layer["torch_dtype"]) == (160, 64, "float32")
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "models/tiny", "architectures": ["LlamaForCausalLM"]},
    }
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding)  # speculators leaves a missing one as it is
    assert not [name for name in tensors if name.startswith("midlayer.")]
    assert (torch.arange(9) + tensors["d2t"]).tolist() == VOCAB.tolist()


def test_a_target_on_disk_is_named_by_its_full_path(tmp_path, monkeypatch):
    save_tiny_target(tmp_path / "target", "llama")
    target = make_target()
    target.path = "target"
    monkeypatch.chdir(tmp_path)
    files = convert_head(make_eagle3(target), target, layout=LAYOUT, num_speculative_tokens=4)
    assert files.config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_rounds(dtype, tmp_path):
    target = make_target()
    head = make_eagle3(target)
    export_head(head, target, tmp_path / "out", layout=LAYOUT, dtype=dtype, num_speculative_tokens=2)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], head.fc.weight.to(getattr(torch, dtype)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformer_layer_config"]["torch_dtype"] == dtype


@pytest.mark.parametrize("count", [None, 0, -1])
def test_the_draft_length_must_be_told(count, tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=f"num_speculative_tokens is {count}: .*at least 1"):
        export_head(make_eagle3(target), target, tmp_path / "out", layout=LAYOUT, num_speculative_tokens=count)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "methods",
    [
        [],
        ["greedy"],
        [{"proposal_type": "greedy", "speculative_tokens": 0, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        [{"proposal_type": "greedy", "speculative_tokens": True, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 2, "accept_tolerance": 0.1}],
        [{"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}],
    ],
)
def test_another_proposal_is_refused(methods):
    target = make_target()
    files = convert_head(make_eagle3(target), target, layout=LAYOUT, num_speculative_tokens=4)
    files.config["speculators_config"]["proposal_methods"] = methods
    with pytest.raises(UserError, match="proposal_methods: expected one greedy method"):
        validate(files, layouts()[LAYOUT].contract)


def test_a_bad_directory_is_one_sentence(tmp_path):
    target = make_target()
    export_head(make_eagle3(target), target, tmp_path / "flat", layout="eagle3")
    with pytest.raises(UserError, match="no EAGLE-3 head of speculators"):
        load_speculators_directory(tmp_path / "flat", target)
    target, _, config, _ = write(tmp_path / "out")
    with pytest.raises(UserError, match="vocab_size None, but the target"):
        load_eagle3_directory(tmp_path / "out", target)
    del config["norm_before_residual"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks norm_before_residual, which vLLM takes for true"):
        load_speculators_directory(tmp_path / "out", target)
