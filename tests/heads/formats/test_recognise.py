"""Heads of every format come back as they were; what cannot be loaded is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftsmith
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.export.export import export_head
from draftsmith.heads.files import all_weights_files
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.recognise import formats, head_digest, is_head_config, load_head, recognise
from draftsmith.target.target import Target, load_target
from tests.batches import documents_of, pack
from tests.exports import (
    LLAMA3,
    PLAIN,
    VOCAB,
    folded_state,
    make_draft_model,
    make_eagle1,
    make_eagle3,
    make_hydra,
    make_medusa,
    make_peagle,
    make_target,
)
from tests.models import tiny_model

pytestmark = pytest.mark.full


def scaled(target: Target) -> Target:
    target.config.rope_parameters = LLAMA3
    return target


CASES: list[tuple[str, Callable[[Target], DraftHead]]] = [
    *((name, PLAIN[layout.method]) for name, layout in layouts().items()),
    ("eagle3", lambda t: make_eagle3(scaled(t), norm_before_fc=True, num_key_value_heads=1, head_dim=8)),
    ("medusa_tgi", lambda t: make_medusa(t, num_layers=2)),
    ("medusa_vllm", lambda t: make_medusa(t, num_layers=2)),
    ("medusa_vllm", lambda t: make_medusa(t, original_lm_head=True)),
    ("hydra", lambda t: make_hydra(t, num_layers=2)),
    ("hydra", lambda t: make_hydra(t, lm_head_bias=False)),
    ("draft_model", lambda t: make_draft_model(t, tie_word_embeddings=True)),
    ("peagle", lambda t: make_peagle(t, sliding_window=9, norm_before_fc=True)),
    ("eagle1", lambda t: make_eagle1(scaled(t), num_key_value_heads=1, head_dim=8)),
    ("eagle1_sglang", lambda t: make_eagle1(t, qkv_bias=True)),
]
"""A plain head in every layout, and heads that the specs of tests/eval/conformance have not."""


def logits(head: DraftHead, target: Target) -> list[Tensor]:
    return [step.logits for step in head(pack(target, documents_of(target), head.reads.layer_ids), 3).steps]


def check_the_same(head: DraftHead, again: DraftHead, target: Target) -> None:
    """Equal parameters and equal logits, bit for bit; what one format adds to a head is zero."""
    ours, theirs = folded_state(head, again), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(theirs[name].any() for name in theirs.keys() - ours.keys())
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert (again.method, again.reads.layer_ids) == (head.method, head.reads.layer_ids)
    frozen = [{n for n, p in one.named_parameters() if not p.requires_grad} for one in (head, again)]
    assert frozen[0] == frozen[1]
    for a, b in zip(logits(head, target), logits(again, target), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("layout", "make"), CASES)
def test_an_export_is_the_head_and_so_is_its_checkpoint(layout, make, tmp_path):
    target = make_target()
    head = make(target)
    export_head(head, target, tmp_path / "out", layout=layout, dtype="float32", num_speculative_tokens=3)
    again = load_head(tmp_path / "out", target)
    check_the_same(head, again, target)
    save_head(again, tmp_path / "ours", target)
    check_the_same(again, load_head(tmp_path / "ours", target), target)
    # A draft model is a whole model, and as such may be a target too; so may a target with its MTP layer.
    assert is_head_config(tmp_path / "out" / "config.json") == (head.method not in ("draft_model", "mtp"))
    # Without our record it is known as one that others have made.
    (tmp_path / "out" / "draftsmith.json").unlink()
    read = layouts()[layout].load
    assert recognise(tmp_path / "out").load is read or read not in [one.load for one in formats()]
    assert is_head_config(tmp_path / "ours" / "config.json")


def write(folder: Path, config: dict[str, Any] | None, tensors: dict[str, Any], file: str) -> Path:
    """A folder as others publish it; config None for none."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    elif file:
        torch.save(tensors, folder / file)
    return folder


def eagle3_files(head: Eagle3Head, prefix: str = "midlayer.") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE's own EAGLE-3: a Llama configuration without layers, flags, head_dim or rope_theta, and no embedding."""
    c = head.config
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(VOCAB),
        **{key: getattr(c, key) for key in (*sizes, "rms_norm_eps", "max_position_embeddings")},
    }
    skipped = ("draft_vocab", "embed_tokens.weight")
    tensors = {n.replace("layers.0.", prefix): x for n, x in head.state_dict().items() if n not in skipped}
    t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
    t2d[VOCAB] = True
    return config, {**tensors, "d2t": VOCAB - torch.arange(len(VOCAB)), "t2d": t2d}


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("prefix", ["midlayer.", "model.layers.0."])
def test_eagle3_as_eagle_publishes_it(file, prefix, tmp_path):
    target = make_target()
    head = make_eagle3(target, layer_ids=(2, 4, 5))
    config, tensors = eagle3_files(head, prefix)
    again = load_head(write(tmp_path / "head", config, tensors, file), target)
    check_the_same(head, again, target)
    assert again.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()


def test_eagle3_is_known_by_its_tensors_where_the_configuration_says_nothing(tmp_path):
    target = make_target()
    head = make_eagle3(target, None, layer_ids=(2, 4, 5))
    config, tensors = eagle3_files(head)
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    folder = write(tmp_path / "head", config, tensors, "model.safetensors")
    check_the_same(head, load_head(folder, target), target)
    assert is_head_config(folder / "config.json")


def test_rotation_is_not_the_targets(tmp_path):
    target = make_target(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    config, tensors = eagle3_files(make_eagle3(target, layer_ids=(2, 4, 5)))
    folder = write(tmp_path / "head", config, tensors, "model.safetensors")
    assert load_head(folder, target).config.rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, r"the layers \[1, 3, 5\] in eagle_config alone"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"target_hidden_size": 64, "hidden_size": 32}, "the target's does not fit a draft of width 32"),
        ({"num_attention_heads": 5}, "describes no Llama layer"),
    ],
)  # fmt: skip
def test_layers_that_engines_read_differently_are_refused(keys, said, tmp_path):
    target = make_target()
    config, tensors = eagle3_files(make_eagle3(target, layer_ids=(2, 4, 5)))
    folder = write(tmp_path / "head", config | keys, tensors, "model.safetensors")
    if isinstance(said, tuple):
        assert load_head(folder, target).reads.layer_ids == said
    else:
        with pytest.raises(UserError, match=said):
            load_head(folder, target)


@pytest.mark.parametrize("marked", [True, False])
def test_absolute_ids_in_place_of_offsets(marked, tmp_path):
    """Ascending and in range both ways: only t2d can tell."""
    target, vocab = make_target(), torch.arange(len(VOCAB)) * 2
    config, tensors = eagle3_files(make_eagle3(target, layer_ids=(2, 4, 5)))
    tensors |= {"d2t": vocab, "t2d": torch.zeros(160, dtype=torch.bool).index_fill_(0, vocab, True)}
    if not marked:
        del tensors["t2d"]
    folder = write(tmp_path / "head", config, tensors, "model.safetensors")
    if marked:
        with pytest.raises(UserError, match="does not hold 9 offsets"):
            load_head(folder, target)
    else:
        assert load_head(folder, target).draft_vocab.tolist() == (vocab + torch.arange(9)).tolist()


def medusa_tensors(head: DraftHead, layers: int = 1) -> dict[str, Tensor]:
    """The names of FasterDecoding's files."""
    named = {}
    for name, value in head.state_dict().items():
        kind, i, rest = name.split(".", 2)
        named[f"{i}.{rest}" if kind == "blocks" else f"{i}.{layers}.{rest}"] = value
    return named


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("shared", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("counts", [(3, 1), (2, 1), (5, 2)])
def test_medusa_as_it_is_published(file, shared, counts, tmp_path):
    """The file says how many heads there are, whatever the configuration does."""
    target = make_target()
    head = make_medusa(target, original_lm_head=shared)
    config = {"base_model_name_or_path": "x/y", "medusa_num_heads": counts[0], "medusa_num_layers": counts[1]}
    config |= {"version": "2"} if shared else {}
    folder = write(tmp_path / "head", config, medusa_tensors(head), file)
    check_the_same(head, load_head(folder, target), target)


def test_blocks_that_share_a_tensor_in_a_pickle_are_apart_afterwards(tmp_path):
    """The original code makes all blocks of a head one module."""
    target = make_target()
    tensors = medusa_tensors(make_medusa(target, num_layers=2), 2)
    for name in list(tensors):
        tensors[name] = tensors[name.replace(".1.linear", ".0.linear")]
    folder = write(tmp_path / "head", {"medusa_num_heads": 3}, tensors, "medusa_lm_head.pt")
    again = load_head(folder, target)
    assert again.options.num_layers == 2
    assert len({p.data_ptr() for p in again.parameters()}) == len(list(again.parameters()))


@pytest.mark.parametrize("old_names", [True, False])
def test_vllms_medusa_without_biases(old_names, tmp_path):
    target = make_target()
    head = make_medusa(target)
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 1}
    tensors = {name: x for name, x in medusa_tensors(head).items() if not name.endswith("bias")}
    if not old_names:
        tensors = {n.replace(".0.linear", ".layers.0"): x for n, x in tensors.items()}
        tensors = {f"blocks.{n}" if "layers" in n else f"lm_heads.{n[0]}.weight": x for n, x in tensors.items()}
    folder = write(tmp_path / "head", config, tensors, "model.safetensors")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.mul_(0 if name.endswith("bias") else 1)
    check_the_same(head, load_head(folder, target), target)
    (folder / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": True}))
    with pytest.raises(UserError, match=r"lacks the tensor blocks\.0\.0\.linear\.bias"):
        load_head(folder, target)


def shard(folder: Path) -> Path:
    """Cut model.safetensors into two files with an index."""
    whole = folder / "model.safetensors"
    tensors, listed = load_file(whole), {}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        listed |= dict.fromkeys(part, file)
    whole.unlink()
    (folder / "draftsmith.json").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


def test_several_files_with_an_index(tmp_path):
    target = make_target()
    head = make_eagle3(target)
    folder = shard(export_head(head, target, tmp_path / "out", dtype="float32"))
    check_the_same(head, load_head(folder, target), target)
    assert [file.suffix for file in all_weights_files(folder)] == [".json", ".safetensors", ".safetensors"]
    assert is_head_config(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for listed, words in (
        ({"fc.weight": "../other.safetensors"}, "which is not in its folder"),
        ({}, "no index of weight files"),
        (None, "no index of weight files"),
        (
            good["weight_map"] | {"extra": "model-00001-of-00002.safetensors"},
            "lists the tensor extra, which its file lacks",
        ),
        (good["weight_map"] | {"extra": "model-3.safetensors"}, "model-3.safetensors, which .* is missing"),
    ):
        index.write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(UserError, match=words):
            load_head(folder, target)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (make_eagle3, lambda config: config["options"].update(norm_before_residual=True)),
        (make_eagle3, lambda config: config.update(layer_ids=[2, 4, 6])),
        (make_eagle3, lambda config: config["layer_config"].update(rms_norm_eps=1e-3)),
        (PLAIN["mtp"], lambda config: config["options"].update(target_state="vllm")),
    ],
)
def test_a_digest_tells_heads_with_the_same_weights_apart(make, change, tmp_path):
    """Which compute other drafts, so that results of one are none of the other; where the target or a model of the training lies is no part of it."""
    target = make_target()
    save_head(make(target), tmp_path, target)
    file, before = tmp_path / "config.json", head_digest(tmp_path)
    config = json.loads(file.read_text())
    elsewhere = config["target"] | {"path": "elsewhere"}
    file.write_text(json.dumps(config | {"target": elsewhere}))
    assert head_digest(tmp_path) == before
    assert len(before) == 16
    change(config)
    file.write_text(json.dumps(config))
    load_head(tmp_path, target)
    assert head_digest(tmp_path) != before


def test_a_digest_does_not_tell_where_a_draft_model_began(tmp_path):
    target, found = make_target(), set()
    for place in ("here", "there"):
        save_head(make_draft_model(target), tmp_path / place, target)
        file = tmp_path / place / "config.json"
        config = json.loads(file.read_text())
        config["options"]["init_from"] = place
        file.write_text(json.dumps(config))
        found.add(head_digest(tmp_path / place))
    assert len(found) == 1


class Commands:
    """A pickle of it runs a command when opened."""

    def __reduce__(self):
        return os.mkdir, ("opened",)


@pytest.mark.parametrize(
    ("config", "file"),
    [({"medusa_num_heads": 3}, "medusa_lm_head.pt"), ({"hydra_num_heads": 3}, "hydra_lm_head.pt"), ({"draft_vocab_size": 9, "vocab_size": 160, "hidden_size": 64}, "pytorch_model.bin"), ({"vocab_size": 160, "num_hidden_layers": 1}, "pytorch_model.bin")],
)  # fmt: skip
def test_pickles_are_read_without_code(config, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = make_target()
    folder = write(tmp_path / "head", config, {"0.0.linear.weight": Commands()}, file)
    with pytest.raises(UserError, match="could run code when opened"):
        load_head(folder, target)
    assert is_head_config(folder / "config.json") == (len(config) != 2)
    assert not (tmp_path / "opened").exists()
    torch.save(medusa_tensors(make_medusa(target)), folder / file)
    whole = (folder / file).read_bytes()
    for length in (len(whole) - 10, len(whole) // 2, 60, 0):
        (folder / file).write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"(are|is) damaged or"):
            load_head(folder, target)


ONE = {"x": torch.ones(2)}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 160, "num_hidden_layers": 8}
WHOLE = {"model.norm.weight": torch.ones(2), "model.layers.0.input_layernorm.weight": torch.ones(2)}
STRANGERS: dict[str, tuple[dict[str, Any] | None, dict[str, Tensor], str, str]] = {
    "speculators": ({"speculators_model_type": "new"}, ONE, "model.safetensors", "of speculators other than EAGLE-3"),
    "mtp": ({"architectures": ["DeepSeekMTPModel"]}, ONE, "model.safetensors", "an MTP head"),
    "whole": (LLAMA, WHOLE, "model.safetensors", "a whole language model"),
    "adapter": (None, ONE, "adapter_model.safetensors", "a PEFT adapter"),
    "gguf": (None, ONE, "draft.gguf", "a GGUF file"),
    "nothing": ({"model_type": "bert"}, ONE, "model.safetensors", "no draft head that is known here"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGERS)
def test_what_cannot_be_loaded_is_refused_by_name(case, tmp_path):
    config, tensors, file, words = STRANGERS[case]
    folder = write(tmp_path / "head", config, tensors, file)
    if case == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=words) as caught:
        load_head(folder, make_target())
    assert "\n" not in str(caught.value)
    assert "give a draftsmith checkpoint or the folder of an EAGLE-1, EAGLE-3, " in str(caught.value)
    if case == "gguf":
        with pytest.raises(UserError, match=words):
            recognise(folder / file)


@pytest.mark.parametrize("layers", [1, 8])
def test_a_whole_model_is_no_head_and_may_be_a_target(layers, tmp_path):
    tiny_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path / "model")
    assert not is_head_config(tmp_path / "model" / "config.json")
    assert load_target(str(tmp_path / "model")).num_layers == layers


def test_an_eagle1_head_is_no_target(tmp_path):
    target = make_target()
    export_head(make_eagle1(target), target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(UserError, match="is a draft head"):
        draftsmith.load_target(str(tmp_path / "out"))
