"""Every rule of every layout's contract, broken one at a time; which layouts hold which heads; and their folders."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.contracts import ModelFiles, broken, lookup, validate
from draftsmith.heads.formats.layout import default_layout, find_layout, layouts, layouts_of
from draftsmith.heads.registry import methods
from tests.exports import (
    VOCAB,
    make_dflash,
    make_draft_model,
    make_dspark,
    make_eagle1,
    make_eagle3,
    make_hydra,
    make_medusa,
    make_peagle,
    make_target,
)

OTHER: dict[type, Any] = {str: "other", int: 7, bool: None, list: ["other"], dict: {"other": 1}, float: 0.5}


def files_for(layout: str) -> ModelFiles:
    """Files that keep the layout's contract, with as many of its tensors as one head can have."""
    target = make_target()
    if layouts()[layout].method == "medusa":
        return convert_head(make_medusa(target), target, layout=layout)
    if layouts()[layout].method == "hydra":
        return convert_head(make_hydra(target, num_layers=2, prefix_attention=True), target, layout=layout)
    if layouts()[layout].method == "draft_model":
        return convert_head(make_draft_model(target), target, layout=layout)
    if layouts()[layout].method in ("dflash", "dspark"):
        make = make_dflash if layouts()[layout].method == "dflash" else make_dspark
        vocab = None if layout == "dflash_llama_cpp" else VOCAB
        embeddings = not layout.endswith("llama_cpp")
        return convert_head(make(target, vocab), target, layout=layout, include_embeddings=embeddings)
    if layouts()[layout].method == "eagle1":
        head = make_eagle1(target, qkv_bias=True, fc_bias=layout == "eagle1_sglang")
        return convert_head(head, target, layout=layout, include_embeddings=True)
    if layouts()[layout].method == "peagle":
        head = make_peagle(target, norm_before_residual=True, sliding_window=9, fc_norm=layout == "peagle")
        return convert_head(head, target, layout=layout, include_embeddings=True, num_speculative_tokens=4)
    rules = [rule for served in layouts()[layout].engines.values() for rule in served.rules if rule.refused]
    refused = {rule.what for rule in rules}
    flags = {flag: True for flag in ("fc_norm", "norm_output") if f"head.{flag}" not in refused}
    head = make_eagle3(target, norm_before_residual=True, **flags)
    return convert_head(head, target, layout=layout, include_embeddings=True, num_speculative_tokens=4)


def put(config: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


def drop(config: dict[str, Any], name: str) -> None:
    *sections, last = name.split(".")
    for section in sections:
        config = config[section]
    config.pop(last, None)


def refused(layout: str, files: ModelFiles, *words: str) -> None:
    """`files` break the contract, and the sentence names `words`."""
    with pytest.raises(UserError) as caught:
        validate(files, layouts()[layout].contract)
    for word in (f"layout {layout}", *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("layout", layouts())
def test_every_key_is_checked(layout):
    files, contract = files_for(layout), layouts()[layout].contract
    validate(files, contract)
    for rule in contract.keys:
        value, changed = lookup(files.config, rule.name), copy.deepcopy(files)
        if not rule.optional:
            drop(changed.config, rule.name)
            refused(layout, changed, rule.name, "got nothing")
        put(changed.config, rule.name, [value] if rule.kind is not list else "text")
        refused(layout, changed, rule.name, f"a {rule.kind.__name__}", rule.why)
        if rule.only is not None:
            put(changed.config, rule.name, not rule.only if rule.kind is bool else OTHER[rule.kind])
            refused(layout, changed, rule.name, repr(rule.only), rule.why)
    for name, why in contract.forbidden.items():
        changed = copy.deepcopy(files)
        put(changed.config, name, 1)
        refused(layout, changed, name, "no such key", why)
    changed = copy.deepcopy(files)
    changed.config["num_attention_heads_of_mine"] = 1
    if contract.closed:
        refused(layout, changed, "num_attention_heads_of_mine", contract.closed)
    else:
        validate(changed, contract)


@pytest.mark.parametrize("layout", layouts())
def test_every_tensor_is_checked(layout):
    files = files_for(layout)
    for name, value in files.tensors.items():
        less = {other: kept for other, kept in files.tensors.items() if other != name}
        if name == "embed_tokens.weight" and not layout.endswith("_speculators"):
            validate(replace(files, tensors=less), layouts()[layout].contract)
        else:
            refused(
                layout, replace(files, tensors=less), f"tensor {name}: expected shape {list(value.shape)}, got nothing"
            )
        short = {**files.tensors, name: value[:-1]}
        refused(layout, replace(files, tensors=short), f"tensor {name}", f"got {[len(value) - 1, *value.shape[1:]]}")
        double = {**files.tensors, name: value.to(torch.float64)}
        refused(layout, replace(files, tensors=double), f"tensor {name}", "got torch.float64")
    more = {**files.tensors, "model.layers.0.norm.weight": torch.ones(64)}
    refused(layout, replace(files, tensors=more), "model.layers.0.norm.weight: expected no such tensor")


@pytest.mark.parametrize("layout", [name for name in layouts() if layouts()[name].method == "eagle3"])
def test_the_vocabulary_map_and_the_aux_layers_are_checked(layout):
    files = files_for(layout)
    offsets, section = files.tensors["d2t"], "transformer_layer_config." if layout == "eagle3_speculators" else ""
    ids = offsets + torch.arange(len(offsets))
    for name, wrong in {"d2t": ids, "t2d": ~files.tensors["t2d"]}.items():
        refused(layout, replace(files, tensors={**files.tensors, name: wrong}), f"tensor {name}")
    changed = copy.deepcopy(files)
    put(changed.config, f"{section}torch_dtype", "bfloat16")
    refused(layout, changed, "torch_dtype", "'float32', the dtype of the tensors")
    changed = copy.deepcopy(files)
    put(changed.config, f"{section}num_aux_hidden_states", 2)
    refused(layout, changed, "num_aux_hidden_states: expected 3")
    target = make_target()
    two = convert_head(make_eagle3(target, layer_ids=(1, 3)), target, layout="eagle3")
    assert two.config["num_aux_hidden_states"] == 2
    del two.config["num_aux_hidden_states"]
    refused("eagle3", two, "num_aux_hidden_states: expected 2", "got nothing")


def test_a_rule_is_one_sentence():
    error = broken(layouts()["medusa"].contract, "tensor x", "one", "none")
    assert str(error) == (
        "The export does not fit the layout medusa: tensor x: expected one, got none; this is a fault of draftsmith, so "
        "report it, and export another layout meanwhile."
    )


def test_layouts_belong_to_one_method():
    named = [layout.name for method in methods().values() for layout in method.layouts]
    assert len(named) == len(set(named))
    assert layouts_of("medusa2") == layouts_of("medusa")
    exported = [name for name in methods() if layouts_of(name)]
    assert {name: default_layout(name) for name in exported if default_layout(name) != name} == {"medusa2": "medusa"}
    assert all(name == layout.contract.name for name, layout in layouts().items())
    assert layouts_of("mtp") == {}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("eagle3", f"'eagle3', which holds eagle3 heads, not medusa: choose one of {', '.join(layouts_of('medusa'))}."),
        ("onnx", f"'onnx', which is unknown: choose one of {', '.join(layouts_of('medusa'))}."),
    ],
)
def test_another_layout_is_one_sentence(layout, words, tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=words):
        export_head(make_medusa(target), target, tmp_path / "out", layout=layout)
    with pytest.raises(UserError, match="which holds medusa heads, not eagle3: choose one of eagle3, "):
        find_layout("medusa_vllm", "eagle3")
    assert not list(tmp_path.iterdir())


def test_the_layout_of_the_method_is_the_default(tmp_path):
    target = make_target()
    export_head(make_medusa(target), target, tmp_path / "out")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "draftsmith.json",
        "medusa_lm_head.safetensors",
    ]


@pytest.mark.parametrize("layout", ["eagle3", "medusa"])
def test_an_export_replaces_one_of_its_kind_and_nothing_else(layout, tmp_path):
    target = make_target()
    head = make_eagle3(target) if layout == "eagle3" else make_medusa(target)
    place = export_head(head, target, tmp_path / "out", layout=layout)
    (place / "config.json").write_text("{}")
    export_head(head, target, place, layout=layout)
    assert json.loads((place / "config.json").read_text()) != {}
    foreign = "medusa_lm_head.safetensors" if layout == "eagle3" else "model.safetensors"
    (place / foreign).write_text("mine")
    with pytest.raises(UserError, match=f"not a model folder .it holds .'{foreign}'"):
        export_head(head, target, place, layout=layout)
    assert (place / foreign).read_text() == "mine"
