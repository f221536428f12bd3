"""What is wrong with a head's files is said in one sentence before anything is computed with it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import model_directory, save_head
from draftsmith.heads.export.export import export_head
from draftsmith.heads.files import explain_config
from draftsmith.heads.formats.recognise import is_head_config, load_head
from draftsmith.target.identity import TargetIdentity, compare
from tests.exports import (
    VOCAB,
    folded_state,
    make_dflash,
    make_eagle1,
    make_eagle3,
    make_medusa,
    make_target,
    sign_again,
)

WEIGHTS = "model.safetensors"
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def keys(**changed: Any) -> Change:
    return lambda config, tensors: config.update(changed)


def gone(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name].to(dtype)})


def renamed(old: str, new: str) -> Change:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def also(name: str, config: dict[str, Any] | None = None) -> Change:
    return lambda keys, tensors: (keys.update(config or {}), tensors.update({name: torch.ones(16)}))


ATTENTION = "midlayer.self_attn."
LAYERS = "eagle_aux_hidden_state_layer_ids"
# What is damaged: the layout, the change, what is said of it. Damaged checkpoints are in tests/bad_inputs/heads.py.
CASES: dict[str, tuple[str, Change, str]] = {
    "integers in vLLM's Medusa": ("medusa_vllm", cast("blocks.0.layers.0.weight", torch.int32), "as torch.int32"),
    "floats for d2t": ("eagle3", cast("d2t", torch.float32), "d2t does not hold"),
    "layers by name": ("eagle3", keys(**{LAYERS: ["a", "b", "c"]}), "'a' is no number of a layer"),
    "half layers": ("eagle3", keys(**{LAYERS: [1.5, 2, 4]}), "1.5 is no number of a layer"),
    "true for a layer": ("eagle3", keys(**{LAYERS: [True, 2, 4]}), "True is no number of a layer"),
    "one number for layers": ("eagle3", keys(**{LAYERS: 5}), "no list of aux layers"),
    "eagle_config is a number": ("eagle3", keys(eagle_config=3), "eagle_config 3"),
    "one number for nested layers": (
        "eagle3",
        keys(**{LAYERS: None}, eagle_config={LAYERS: 5}),
        "names the layers 5 in eagle_config alone",
    ),
    "the text false": ("eagle3", keys(norm_output="false"), "norm_output 'false': write true or false"),
    "a nested switch": ("eagle3", keys(eagle_config={"norm_before_fc": "no"}), "norm_before_fc 'no'"),
    "MLA": (
        "eagle3",
        renamed(f"{ATTENTION}k_proj.weight", f"{ATTENTION}kv_a_proj_with_mqa.weight"),
        "(MLA), which is not",
    ),
    "MLA by its keys": ("eagle1", keys(kv_lora_rank=16), "(MLA, kv_lora_rank 16), which is not computed here"),
    "norms of queries": ("eagle3", also(f"{ATTENTION}q_norm.weight"), "normalises its queries and keys, which is not"),
    "norms of keys": ("eagle1", also("layers.0.self_attn.k_norm.weight"), "normalises its queries and keys"),
    "a mixture of experts": ("eagle3", also("midlayer.mlp.experts.0.up_proj.weight"), "is a mixture of experts"),
    "sinks": ("eagle3", also(f"{ATTENTION}sinks"), "has sinks or gates in its attention"),
    "biases": ("eagle3", also(f"{ATTENTION}q_proj.bias"), "has biases in its projections"),
    "norms around fc": ("eagle1", also("enorm.weight"), "has norms that EAGLE's layer has not"),
    "vLLM's part of the vocabulary": (
        "eagle1",
        lambda config, tensors: tensors.update(token_map=torch.arange(9)),
        "drafts from a part of the vocabulary (token_map)",
    ),
    "float8": ("eagle3", also(f"{ATTENTION}q_proj.weight_scale"), "is quantized, which is not computed here"),
    "a part of each head": (
        "eagle3",
        keys(partial_rotary_factor=0.5),
        "(partial_rotary_factor 0.5), which is not computed",
    ),
    "a part of each head in rope_parameters": (
        "eagle1",
        lambda config, tensors: config["rope_parameters"].update(partial_rotary_factor=0.25),
        "a part of each head by position (partial_rotary_factor 0.25)",
    ),
    "a part of each head of a block": (
        "dflash",
        keys(partial_rotary_factor=0.5),
        "(partial_rotary_factor 0.5), which is not",
    ),
    "missing": ("eagle3", gone("midlayer.mlp.up_proj.weight"), "lacks the tensor layers.0.mlp.up_proj.weight"),
    "no d2t": ("eagle3", gone("d2t"), "lacks the tensor d2t"),
    "absolute ids for d2t": (
        "eagle3",
        lambda config, tensors: tensors.update(d2t=VOCAB.clone()),
        "offsets of ascending target ids",
    ),
    "another target's vocabulary": ("eagle3", keys(vocab_size=99), "vocab_size 99, but the target models/tiny has 160"),
    "a layer too many": ("eagle3", keys(**{LAYERS: [1, 3, 8]}), "8 is the number of layers"),
    "a switch without its tensors": ("eagle3", keys(fc_norm=True), "lacks the tensor fc_norm.0.weight"),
    "a switch under two names": (
        "eagle3",
        keys(norm_output=False, eagle_config={"return_hidden_post_norm": True}),
        "says norm_output and return_hidden_post_norm of the same thing, one true and one false",
    ),
    "a switch of TensorRT-LLM twice": (
        "eagle3",
        keys(norm_output=None, return_hidden_post_norm=False, eagle_config={"return_hidden_post_norm": True}),
        "says return_hidden_post_norm of the same thing, one true and one false",
    ),
    "a nested switch of TensorRT-LLM": (
        "eagle3",
        keys(eagle_config={"return_hidden_post_norm": "yes"}),
        "return_hidden_post_norm 'yes'",
    ),
    "a switch twice": ("eagle3", keys(norm_before_fc=True), "says norm_before_fc twice, true and false"),
    "sizes as texts": ("eagle3", keys(vocab_size="160"), "says vocab_size '160'"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case: str, tmp_path: Path) -> None:
    layout, change, said = CASES[case]
    target = make_target()
    head = {"medusa_vllm": make_medusa, "eagle1": make_eagle1, "dflash": make_dflash}.get(layout, make_eagle3)(target)
    export_head(head, target, tmp_path / "head", layout=layout, dtype="float32")
    load_head(tmp_path / "head", target)
    config, tensors = (
        json.loads((tmp_path / "head" / "config.json").read_text()),
        load_file(tmp_path / "head" / WEIGHTS),
    )
    change(config, tensors)
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "head" / WEIGHTS)
    sign_again(tmp_path / "head")
    with pytest.raises(UserError) as raised:
        load_head(tmp_path / "head", target)
    assert said in str(raised.value)
    assert str(raised.value).endswith(".")
    assert "not computed here" not in said or "fetch" not in str(raised.value)


def test_a_sentence_is_not_wrapped_in_another(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised, explain_config(tmp_path, "head", "restore it"):
        raise UserError("A sentence.")
    assert str(raised.value) == "A sentence."


def test_an_export_over_a_link_goes_where_it_points_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = make_target()
    export_head(make_medusa(target), target, tmp_path / "disk" / "head", layout="medusa_vllm")
    before = load_file(tmp_path / "disk" / "head" / WEIGHTS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "head").symlink_to(tmp_path / "disk" / "head")
    export_head(make_medusa(target, num_heads=2), target, tmp_path / "run" / "head", layout="medusa_vllm")
    assert (tmp_path / "run" / "head").is_symlink()
    assert os.listdir(tmp_path / "run") == os.listdir(tmp_path / "disk") == ["head"]
    assert len(load_file(tmp_path / "disk" / "head" / WEIGHTS)) < len(before)


def test_a_link_to_nowhere_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "later")
    with model_directory(tmp_path / "link") as folder:
        (folder / "config.json").write_text("{}")
    assert os.listdir(tmp_path / "later") == ["config.json"]


def test_a_fingerprint_alone_does_not_tell_weights_from_configuration() -> None:
    recorded, now = TargetIdentity(fingerprint="a"), TargetIdentity(fingerprint="b", weights="c", config="d")
    assert [one.found.split(":")[0] for one in compare(recorded, now)] == ["other weights or another configuration"]


def test_nobody_is_told_to_measure_on_a_target_of_other_sizes() -> None:
    recorded = TargetIdentity(vocab_size=8, weights="a", embeddings="b", tokenizer="vocab.json:c")
    now = TargetIdentity(vocab_size=9, weights="d", embeddings="e", tokenizer="vocab.json:f")
    differences = compare(recorded, now)
    assert [one.kind for one in differences] == ["sizes", "embeddings", "weights", "tokenizer"]
    assert {one.remedy for one in differences[:3]} == {"give the target it was made for"}


def test_a_head_with_a_draft_vocabulary_of_a_target_with_a_large_one_loads(tmp_path: Path) -> None:
    """It shares the target's embedding, so none of its own tensors is as large as the vocabulary that it names."""
    target = make_target(vocab_size=5000)
    head = make_eagle3(target)
    save_head(head, tmp_path / "head", target)
    loaded = load_head(tmp_path / "head", target)
    assert torch.equal(loaded.get_parameter("fc.weight"), head.get_parameter("fc.weight"))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["layer_config"]["vocab_size"] = 5001
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="vocab_size is 5001"):
        load_head(tmp_path / "head", target)


@pytest.mark.parametrize("biased", [False, True])
def test_vllms_wrapped_eagle_is_read(biased: bool, tmp_path: Path) -> None:
    """`EAGLEConfig` keeps the layer's keys under `model`, and its files begin every name with `model.` once more."""
    target = make_target()
    head = make_eagle1(target, qkv_bias=biased)
    export_head(head, target, tmp_path / "head", layout="eagle1", dtype="float32")
    (tmp_path / "head" / "draftsmith.json").unlink()
    file = tmp_path / "head" / "config.json"
    inner, tensors = json.loads(file.read_text()), load_file(tmp_path / "head" / WEIGHTS)
    outer = {"model_type": "eagle", "architectures": ["EAGLEModel"], "truncated_vocab_size": inner["vocab_size"]}
    file.write_text(json.dumps({**outer, "eagle_fc_bias": False, "model": inner}))
    names = {name: name if name.startswith("fc.") else f"model.model.{name}" for name in tensors}
    save_file({names[name]: value for name, value in tensors.items()}, tmp_path / "head" / WEIGHTS)
    again = load_head(tmp_path / "head", target)
    assert again.method == "eagle1"
    ours, theirs = folded_state(head, again), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert is_head_config(file)
