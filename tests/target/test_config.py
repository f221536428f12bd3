"""Architectures are told by their configuration: no weights are there in any of these folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftsmith.errors import UserError
from draftsmith.estimate.estimator import read_target
from draftsmith.recipe.parse import parse_recipe
from draftsmith.target.config import check_causal
from draftsmith.target.target import load_target
from tests.models import save_tiny_target

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("linear_attention", {}),
    "falcon_h1": ("hybrid", {}),
    "minimax": ("linear_attention", {}),
    "zamba": ("hybrid, linear_attention", {}),
    "lfm2": ("conv", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "deepseek_v4": ("compressed_sparse_attention, heavily_compressed_attention", {}),
    "rwkv": ("", {}),
}
"""Types -> the layers that keep a state, and keys of a configuration that has them."""


def saved(folder: Path, model_type: str, **keys: Any) -> str:
    AutoConfig.for_model(model_type, **keys).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_layers_with_a_state_are_refused_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    kinds, keys = HYBRIDS[model_type]
    path = saved(tmp_path, model_type, **keys)
    layers = f"layers of type {kinds} keep" if kinds else "layers keep"
    sentence = f"its {layers} a running state that cannot be rolled back"
    with pytest.raises(UserError, match=sentence):
        load_target(path)
    recipe = parse_recipe(["--name", "x", "--method", "medusa", "--target.path", path])
    with pytest.raises(UserError, match=sentence):
        read_target(recipe)


def test_every_class_that_transformers_calls_stateful_is_refused() -> None:
    stateful = [
        config_class
        for config_class, found in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if getattr(found, "_is_stateful", False)
    ]
    for config_class in stateful:
        with pytest.raises(UserError, match="running state that cannot be rolled back"):
            check_causal("a", config_class(), False)
    assert len(stateful) > 20


def test_a_hybrid_without_any_such_layer_is_taken() -> None:
    config = AutoConfig.for_model("granitemoehybrid", num_hidden_layers=2, layer_types=["attention", "attention"])
    check_causal("granite", config, False)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("llama4_text", "chunked_attention"), ("llama4", "chunked_attention"), ("deepseek_v32", "indexed_attention")],
)
def test_a_past_that_is_no_window_is_named(model_type: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"layers of type {kind}, whose past a draft tree cannot be given yet"):
        load_target(saved(tmp_path, model_type))


@pytest.mark.parametrize(("model_type", "keys"), [("bloom", {}), ("mpt", {}), ("falcon", {"alibi": True})])
def test_distances_in_the_cache_are_named(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path, model_type, **keys)
    for opened in (load_target, lambda path: read_target(parse_recipe(["--method", "medusa", "--target.path", path]))):
        with pytest.raises(UserError, match=f"type '{model_type}' cannot be used: its attention .*ALiBi"):
            opened(path)


def test_a_format_that_is_not_read_is_said_before_weights_are_there(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama", quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(UserError, match="'modelopt', which transformers does not read"):
        read_target(parse_recipe(["--method", "medusa", "--target.path", path]))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_attention_that_must_be_eager_is_taken(kind: str, tmp_path: Path) -> None:
    target = load_target(save_tiny_target(tmp_path, kind), attn_implementation="sdpa")
    assert target.config._attn_implementation == "eager"
    ids = torch.arange(5, 25)[None]
    truth = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(target.head.logits(target.forward(ids).last), truth)


def test_the_decoder_of_llama_4_is_found(tmp_path: Path) -> None:
    keys = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llama4_text",
        **keys,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_local_experts=2,
        layer_types=["full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_target(str(tmp_path)).num_layers == 2
