"""The EAGLE-1 layouts: equal logits after a reload, and what vLLM and SGLang compute from the files, biases included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.recipe.schema import ExportSpec, Recipe
from draftsmith.stages.exporting import export_options
from draftsmith.target.target import Target, load_target
from tests.batches import pack
from tests.exports import LLAMA3, make_eagle1, make_target
from tests.models import save_tiny_target

CASES = [
    ("eagle1", {}, {}),
    ("eagle1", {}, {"qkv_bias": True}),
    ("eagle1", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}, {"num_key_value_heads": 1, "head_dim": 8}),
    ("eagle1_sglang", {}, {}),
    ("eagle1_sglang", {}, {"fc_bias": True}),
    ("eagle1_sglang", {"rope_parameters": LLAMA3}, {"fc_bias": True, "qkv_bias": True}),
]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


class Reader:
    """One pass over a document as an engine makes it: row t reads token t + 1 and the target's state of token t."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> None:
        self.config, self.tensors, self.target = config, dict(tensors), target
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        self.used.add(name)
        return self.tensors[name]

    def linear(self, name: str, x: Tensor, bias: bool) -> Tensor:
        return F.linear(x, self.take(f"{name}.weight"), self.take(f"{name}.bias") if bias else None)

    def logits(self, ids: Tensor, last: Tensor, *, fc: bool, qkv: bool, out: bool, embedding: Tensor) -> Tensor:
        c, attention = self.config, "layers.0.self_attn."
        x = self.linear("fc", torch.cat([embedding[ids[1:]], last[:-1]], -1), fc)
        n, D = len(x), c["head_dim"]
        q, k, v = (
            self.linear(f"{attention}{name}", x, qkv).view(1, n, -1, D).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(c))
        q, k = apply_rotary_pos_emb(q, k, *rotary(x, torch.arange(n)[None]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.linear(f"{attention}o_proj", mixed.transpose(1, 2).reshape(n, -1), out)
        normed = F.rms_norm(x, x.shape[-1:], self.take("layers.0.post_attention_layernorm.weight"), c["rms_norm_eps"])
        mlp = "layers.0.mlp."
        gate, up = self.linear(f"{mlp}gate_proj", normed, False), self.linear(f"{mlp}up_proj", normed, False)
        return F.linear(x + self.linear(f"{mlp}down_proj", F.silu(gate) * up, False), self.target.head.weight)


def vllm(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, ids: Tensor, last: Tensor) -> Tensor:
    """vLLM 0.32: models/llama_eagle.py and LlamaDecoderLayer of models/llama.py; biases without a place are dropped."""
    assert [f"Eagle{name}" for name in config["architectures"]] == ["EagleLlamaForCausalLM"]
    assert not any("lm_head" in name for name in tensors)
    attention = config.get("attention_bias", False) or config.get("bias", False)
    qkv = config.get("qkv_bias", attention)
    reader = Reader(config, tensors, target)
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    logits = reader.logits(ids, last, fc=False, qkv=qkv, out=attention, embedding=embedding)
    assert set(tensors) - {"embed_tokens.weight"} == reader.used, "vLLM would drop the rest"
    return logits * config.get("logit_scale", 1.0)


def sglang(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, ids: Tensor, last: Tensor) -> Tensor:
    """SGLang 0.5.23: models/llama_eagle.py, whose fc always has a bias, and LlamaAttention of models/llama.py."""
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["tie_word_embeddings"] is False
    attention = config.get("attention_bias", False) or config.get("bias", False)
    reader = Reader(config, tensors, target)
    logits = reader.logits(ids, last, fc=True, qkv=attention, out=attention, embedding=target.embedding)
    assert set(tensors) == reader.used
    return logits


READERS = {"eagle1": vllm, "eagle1_sglang": sglang}


@pytest.mark.parametrize(("layout", "overrides", "options"), CASES)
def test_engines_compute_our_logits_from_the_files(layout, overrides, options, tmp_path):
    target = make_target(**overrides)
    head = make_eagle1(target, **options)
    export_head(head, target, tmp_path / "out", layout=layout)
    batch = pack(target, [[torch.arange(3, 20)]], ())
    batch.mask.fill_(True)
    with torch.no_grad():
        step = head(batch, 1).steps[0]
        theirs = READERS[layout](*read(tmp_path / "out"), target, torch.arange(3, 20), batch.last[0, :17])
    assert len(step.rows) > 10
    torch.testing.assert_close(theirs[step.rows], step.logits, atol=1e-4, rtol=1e-4)


def test_embeddings_of_its_own_are_vllms_alone(tmp_path):
    target = make_target()
    head = make_eagle1(target)
    assert "embed_tokens.weight" not in convert_head(head, target, layout="eagle1").tensors
    head.embed_tokens.weight = nn.Parameter(head.embed_tokens.weight + 1, requires_grad=False)
    export_head(head, target, tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")[1]["embed_tokens.weight"], head.embed_tokens.weight)
    with pytest.raises(UserError, match="SGLang takes the target's in silence; export the layout eagle1 for vLLM"):
        export_head(head, target, tmp_path / "other", layout="eagle1_sglang")
    assert not (tmp_path / "other").exists()


def test_a_bias_of_zeros_is_none(tmp_path):
    target = make_target()
    head = make_eagle1(target, fc_bias=True)
    nn.init.zeros_(head.fc.bias)
    export_head(head, target, tmp_path / "out", layout="eagle1_sglang")
    assert not load_head(tmp_path / "out", target).options.fc_bias


def test_a_scale_and_a_softcap(tmp_path):
    """vLLM scales as the target does; a softcap changes no rank."""
    target = make_target()
    target.head.scale = 0.25
    files = convert_head(make_eagle1(target), target, layout="eagle1")
    assert files.config["logit_scale"] == 0.25
    target.head.softcap = 5.0
    assert convert_head(make_eagle1(target), target, layout="eagle1").config == files.config


def published(folder: Path, target_folder: Path, **options) -> Path:
    """A published head's folder, beside the target that it was made for."""
    target = load_target(save_tiny_target(target_folder, "llama"))
    export_head(make_eagle1(target, **options), target, folder, layout="eagle1_sglang")
    (folder / "draftsmith.json").unlink()
    return folder


def export(tmp_path: Path, *words: str) -> int:
    """The command line, with a recipe of another method that names a layout of its own."""
    recipe = tmp_path / "recipe.yaml"
    head = "{layer_ids: [1, 3, 5]}"
    recipe.write_text(
        f"name: other\ntarget: {{path: {tmp_path}/target}}\nmethod: eagle3\nhead: {head}\nexport: {{layout: eagle3}}\n"
    )
    common = ["--recipe", str(recipe), "--head", str(tmp_path / "head"), "--output_dir", str(tmp_path / "run")]
    return main(["export", *common, *words])


def test_a_published_head_is_exported_by_a_recipe_of_another_method(tmp_path, capsys):
    published(tmp_path / "head", tmp_path / "target", qkv_bias=True)
    assert export(tmp_path) == 0
    assert read(tmp_path / "run" / "export" / "eagle1")[0]["qkv_bias"] is True
    assert export(tmp_path, "--export.layout", "eagle1_sglang") == 0
    assert read(tmp_path / "run" / "export" / "eagle1_sglang")[0]["attention_bias"] is True
    assert export(tmp_path, "--export.layout", "medusa") == 2
    assert "which holds medusa heads, not eagle1: choose one of eagle1, eagle1_sglang." in capsys.readouterr().err
    assert export(tmp_path, "--export.tensor_parallel", "3") == 2
    assert "export.tensor_parallel is 3, but vLLM cannot split this head" in capsys.readouterr().err


def test_options_of_a_recipe():
    recipe = Recipe(method="medusa", export=ExportSpec(layout="medusa_tgi", tensor_parallel=2))
    assert [export_options(recipe, method)["layout"] for method in ("eagle1", "eagle3", "medusa")] == [
        "eagle1",
        "eagle3",
        "medusa_tgi",
    ]
    assert export_options(recipe, "medusa")["tensor_parallel"] == 2
    assert export_options(Recipe(method="eagle3", export=ExportSpec(layout="medusa")), "eagle1")["layout"] == "medusa"
    assert export_options(Recipe(export=ExportSpec(layout="gguf")), "eagle1")["layout"] == "gguf"
    with pytest.raises(UserError, match=r"export\.tensor_parallel is 0"):
        ExportSpec(tensor_parallel=0)
