"""The speculators layout of EAGLE-3: its keys, its tensors, and what an engine computes from them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.errors import UserError
from draftsmith.heads.eagle.formats import EAGLE3
from draftsmith.heads.eagle3 import formats as eagle3_formats
from draftsmith.heads.eagle3.formats import LAYOUTS, load_eagle3_directory
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.schema import renamed
from tests.batches import documents_of, pack
from tests.exports import LLAMA3, make_eagle3, make_target
from tests.models import save_tiny_target

LAYOUT = "eagle3_speculators"


def write(folder: Path, **options) -> tuple[Any, Any, dict[str, Any], dict[str, Tensor]]:
    """Export a head; return the target, the head, config.json and the tensors."""
    target = make_target(**options.pop("target", {}))
    head = make_eagle3(target, **options)
    export_head(head, target, folder, layout=LAYOUT, num_speculative_tokens=4)
    return target, head, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


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


def test_a_target_on_disk_is_named_by_its_full_path(tmp_path, monkeypatch):
    save_tiny_target(tmp_path / "target", "llama")
    target = make_target()
    target.path = "target"
    monkeypatch.chdir(tmp_path)
    files = convert_head(make_eagle3(target), target, layout=LAYOUT, num_speculative_tokens=4)
    assert files.config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")


@pytest.mark.parametrize("prefix", ["model.", "draft."])
@pytest.mark.parametrize("changed", [False, True])
def test_a_layout_may_have_other_names_alone(prefix, changed, tmp_path, monkeypatch):
    target = make_target()
    head = make_eagle3(target)
    if changed:
        head.embed_tokens.weight = nn.Parameter(head.embed_tokens.weight + 1, requires_grad=False)
    schema = replace(EAGLE3, name="renamed", tensors=renamed(EAGLE3.tensors, {"": prefix}))
    first = next(layout for layout in LAYOUTS if layout.name == "eagle3")
    reader = partial(load_eagle3_directory, names=schema)
    monkeypatch.setattr(eagle3_formats, "LAYOUTS", (*LAYOUTS, replace(first, schema=schema, load=reader)))
    for layout in ("eagle3", "renamed"):
        export_head(head, target, tmp_path / layout, layout=layout)
    plain, other = (load_file(tmp_path / layout / "model.safetensors") for layout in ("eagle3", "renamed"))
    assert set(other) == {prefix + name for name in plain}
    assert ("embed_tokens.weight" in plain) == changed
    found = reader(tmp_path / "renamed", target).state_dict()
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in found.items())


@pytest.mark.parametrize("count", [None, 0, -1])
def test_the_draft_length_must_be_told(count, tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=f"num_speculative_tokens is {count}: .*at least 1"):
        export_head(make_eagle3(target), target, tmp_path / "out", layout=LAYOUT, num_speculative_tokens=count)
    assert not list(tmp_path.iterdir())


def test_a_bad_directory_is_one_sentence(tmp_path):
    target, _, config, _ = write(tmp_path / "out")
    for change, words in (
        ({"speculators_model_type": "peagle"}, "no EAGLE-3 head of speculators"),
        ({"transformer_layer_config": 1}, "no EAGLE-3 head of speculators"),
        ({"norm_before_residual": ...}, "lacks norm_before_residual, which vLLM takes for true"),
    ):
        changed = {key: value for key, value in {**config, **change}.items() if value is not ...}
        (tmp_path / "out" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=words):
            load_eagle3_directory(tmp_path / "out", target)


@pytest.mark.parametrize(
    ("keys", "normed"),
    [
        ({"eagle_config": {"return_hidden_post_norm": True}}, True),
        ({"return_hidden_post_norm": True}, True),
        ({"norm_output": True, "eagle_config": {"return_hidden_post_norm": True}}, True),
        ({"eagle_config": {"return_hidden_post_norm": False}}, False),
        ({"norm_output": True}, True),
        ({}, False),
    ],
)
def test_what_is_fed_back_is_normed_under_tensorrt_llms_name_too(
    keys: dict[str, Any], normed: bool, tmp_path: Path
) -> None:
    target = make_target()
    export_head(make_eagle3(target), target, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "norm_output"}
    file.write_text(json.dumps(config | keys))
    assert load_eagle3_directory(tmp_path / "out", target).options.norm_output is normed
