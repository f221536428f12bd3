"""The flat EAGLE-3 layout: equal logits after a reload, and every way to get it wrong refused before writing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.eagle.formats import EAGLE3, to_flat_eagle3
from draftsmith.heads.eagle3.formats import load_eagle3_directory
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.contracts import ExportRequest, ModelFiles
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import LLAMA3, VOCAB, make_draft_model, make_eagle1, make_target, replace_layout
from tests.exports import make_eagle3 as make_head

SHARED_FIXTURES = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures"


def check_same_logits(a: Eagle3Head, b: Eagle3Head, target: Target, tolerance: float = 0.0) -> None:
    batch = pack(target, documents_of(target), a.reads.layer_ids)
    for x, y in zip(a(batch, 3).steps, b(batch, 3).steps, strict=True):
        assert torch.equal(x.rows, y.rows)
        torch.testing.assert_close(x.logits, y.logits, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, {}),
        ({}, {"vocab": None}),
        ({}, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
        ({}, {"fc_norm": True, "layer_ids": (1, 6)}),
        ({"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}, {"num_key_value_heads": 1, "head_dim": 8}),
    ],
    ids=["plain", "whole-vocab", "norm-flags", "fc_norm-two-layers", "rope-and-dimensions"],
)
def test_the_reloaded_export_gives_the_training_logits(overrides, options, tmp_path):
    target = make_target(**overrides)
    head = make_head(target, **options)
    export_head(head, target, tmp_path / "out", dtype="float32")
    check_same_logits(load_eagle3_directory(tmp_path / "out", target), head, target)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_another_dtype_rounds_and_leaves_the_head_alone(dtype, tmp_path):
    target = make_target()
    head = make_head(target)
    export_head(head, target, tmp_path / "out", dtype=dtype, include_embeddings=True)
    assert head.fc.weight.dtype == torch.float32
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    assert {str(t.dtype).removeprefix("torch.") for t in tensors.values()} == {name, "int64", "bool"}
    check_same_logits(load_eagle3_directory(tmp_path / "out", target), head, target, tolerance=0.1)


def test_the_files_are_what_engines_read(tmp_path):
    target = make_target()
    export_head(make_head(target, norm_before_residual=True), target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (config["norm_before_residual"], config["norm_output"], config["fc_norm"]) == (True, False, False)
    assert (config["vocab_size"], config["draft_vocab_size"], config["torch_dtype"]) == (160, 9, "float32")
    assert "num_aux_hidden_states" not in config
    assert "rope_scaling" not in config
    assert (torch.arange(9) + tensors["d2t"]).tolist() == VOCAB.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == VOCAB.tolist()
    assert "embed_tokens.weight" not in tensors
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert not [name for name in tensors if name.startswith(("layers.", "model."))]


def test_two_aux_layers_and_rope_scaling_are_written(tmp_path):
    target = make_target(rope_parameters=LLAMA3)
    export_head(make_head(target, layer_ids=(1, 6)), target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_aux_hidden_states"] == 2
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert config["rope_scaling"]["rope_type"] == "llama3"


def test_a_whole_vocabulary_has_no_map(tmp_path):
    """vLLM refuses d2t where nothing is mapped; every engine takes a missing one as the identity."""
    target = make_target()
    for number, vocab in enumerate((None, torch.arange(160))):
        head = make_head(target, vocab)
        export_head(head, target, tmp_path / str(number))
        assert not {"d2t", "t2d"} & load_file(tmp_path / str(number) / "model.safetensors").keys()
        check_same_logits(load_eagle3_directory(tmp_path / str(number), target), head, target)


def test_an_embedding_of_its_own_is_always_written(tmp_path):
    target = make_target()
    head = make_head(target)
    head.embed_tokens.weight = torch.nn.Parameter(2 * head.embed_tokens.weight, requires_grad=False)
    export_head(head, target, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"], 2 * target.embedding)
    check_same_logits(load_eagle3_directory(tmp_path / "out", target), head, target)


Mutation = Callable[[dict[str, Tensor], dict[str, Any]], None]
MUTANTS: dict[str, tuple[Mutation, str]] = {
    "wrong shape": (lambda t, c: t.update({"fc.weight": t["fc.weight"][:, :-1]}), r"fc\.weight: expected shape \[64, 192\], got \[64, 191\]"),
    "swapped axes": (lambda t, c: t.update({"lm_head.weight": t["lm_head.weight"].T}), r"lm_head\.weight: expected shape \[9, 64\]"),
    "missing norm": (lambda t, c: t.pop("norm.weight"), r"norm\.weight: expected shape \[64\], got nothing"),
    "missing d2t": (lambda t, c: t.pop("d2t"), r"d2t: expected shape \[9\], got nothing"),
    "absolute ids": (lambda t, c: t.update(d2t=VOCAB.clone()), "d2t: .*absolute ids"),
    "shifted ids": (lambda t, c: t.update(d2t=t["d2t"] + torch.tensor([0] * 8 + [-1])), "tensor t2d"),
    "unsorted ids": (lambda t, c: t.update(d2t=t["d2t"].flip(0)), "tensor d2t"),
    "int32 d2t": (lambda t, c: t.update(d2t=t["d2t"].int()), r"d2t: expected torch\.int64, got torch\.int32"),
    "fc bias": (lambda t, c: t.update({"fc.bias": torch.zeros(64)}), r"fc\.bias: expected no such tensor"),
    "attention bias": (lambda t, c: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}), "no such tensor"),
    "model prefix": (lambda t, c: t.update({"model.norm.weight": t.pop("norm.weight")}), "no such tensor"),
    "engine-unknown prefix": (lambda t, c: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}), "no such tensor"),
    "second layer": (lambda t, c: c.update(num_hidden_layers=2), r"tensor layers\.1\..*: expected shape .*, got nothing"),
    "mixed dtypes": (lambda t, c: t.update({"norm.weight": t["norm.weight"].half()}), r"norm\.weight: expected torch\.float32"),
    "dtype of config": (lambda t, c: c.update(torch_dtype="bfloat16"), "torch_dtype: expected 'float32', the dtype of the tensors, got 'bfloat16'"),
    "flag left out": (lambda t, c: c.pop("norm_before_residual"), "norm_before_residual: .*got nothing"),
    "flag without tensor": (lambda t, c: c.update(norm_before_fc=True), r"input_norm\.weight: expected shape \[192\], got nothing"),
    "tensor without flag": (lambda t, c: t.update({"fc_norm.0.weight": torch.ones(64)}), "no such tensor"),
    "bias key": (lambda t, c: c.update(bias=True), "config key bias: expected no such key"),
    "tied": (lambda t, c: c.update(tie_word_embeddings=True), "tie_word_embeddings: expected False"),
    "number as text": (lambda t, c: c.update(draft_vocab_size="9"), "draft_vocab_size: expected a int"),
    "architecture": (lambda t, c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
    "nested ids": (lambda t, c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), r"eagle_config: expected .*\[0, 2, 4\]"),
    "no nested keys": (lambda t, c: c.pop("eagle_config"), "eagle_config: expected a dict .*SGLang"),
    "aux count": (lambda t, c: c.update(num_aux_hidden_states=4), "num_aux_hidden_states: expected 3"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused_before_anything_is_written(mutant, tmp_path, monkeypatch):
    mutate, words = MUTANTS[mutant]
    target = make_target()
    head = make_head(target)

    def convert(head: Eagle3Head, target: Target, request: ExportRequest) -> ModelFiles:
        files = to_flat_eagle3(head, target, request)
        mutate(files.tensors, files.config)
        return files

    replace_layout(monkeypatch, "eagle3", convert=convert)
    with pytest.raises(UserError, match=words):
        export_head(head, target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_with_other_logits_is_not_kept(tmp_path, monkeypatch):
    target = make_target()
    head = make_head(target)

    def convert(head: Eagle3Head, target: Target, request: ExportRequest) -> ModelFiles:
        files = to_flat_eagle3(head, target, request)
        name = "midlayer.self_attn.k_proj.weight"
        files.tensors[name] = files.tensors[name].flip(0)
        return files

    replace_layout(monkeypatch, "eagle3", convert=convert)
    with pytest.raises(AssertionError, match="other logits"):
        export_head(head, target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm_output": True}, r"head\.norm_output, and llama\.cpp ignores .*; export the layout eagle3 "),
        ({"fc_norm": True}, r"head\.fc_norm, and llama\.cpp has no converter .*; export the layout eagle3 "),
        ({"layer_ids": (1, 2)}, r"layer_ids, and llama\.cpp takes exactly three; export the layout eagle3 "),
    ],
)
def test_what_llama_cpp_cannot_serve_is_refused_there_only(options, words, tmp_path):
    target = make_target()
    head = make_head(target, **options)
    with pytest.raises(UserError, match=words):
        export_head(head, target, tmp_path / "cpp", layout="eagle3_llama_cpp")
    assert not (tmp_path / "cpp").exists()
    export_head(head, target, tmp_path / "flat")
    convert_head(make_head(target), target, layout="eagle3_llama_cpp")


@pytest.mark.parametrize(
    ("keywords", "words"),
    [({"layout": "gguf"}, r"export\.layout is 'gguf'"), ({"dtype": "int8"}, r"export\.dtype is 'int8'")],
)
def test_mistakes(keywords, words, tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=words):
        export_head(make_head(target), target, tmp_path / "out", **keywords)


def rewrite(folder: Path, change: Mutation) -> None:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_reads_what_other_tools_write(tmp_path):
    """The other layer prefix, RoPE keys of older transformers, and keys left at their defaults."""
    target = make_target(rope_parameters=LLAMA3)
    head = make_head(target)
    export_head(head, target, tmp_path / "out")

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        for key in ("rope_parameters", "norm_output", "fc_norm", "norm_before_fc", "norm_before_residual", "head_dim"):
            del config[key]
        tensors.pop("t2d")

    rewrite(tmp_path / "out", change)
    check_same_logits(load_eagle3_directory(tmp_path / "out", target), head, target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("midlayer.mlp.up_proj.weight"), r"lacks the tensor layers\.0\.mlp\.up_proj\.weight"),
        (lambda t, c: t.pop("d2t"), "lacks the tensor d2t"),
        (lambda t, c: t.update(d2t=VOCAB.clone()), "offsets of ascending target ids"),
        (lambda t, c: c.update(vocab_size=99), "vocab_size 99, but the target models/tiny has 160"),
        (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 8]), "8 is the number of layers"),
        (lambda t, c: c.update(fc_norm=True), r"lacks the tensor fc_norm\.0\.weight"),
        (lambda t, c: c.update(norm_before_fc=True), "says norm_before_fc twice, true and false"),
    ],
    ids=["missing", "no d2t", "absolute d2t", "other target", "layer ids", "flag", "flag twice"],
)
def test_a_bad_directory_is_one_sentence(change, words, tmp_path):
    target = make_target()
    export_head(make_head(target), target, tmp_path / "out")
    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError, match=words):
        load_eagle3_directory(tmp_path / "out", target)


def test_embeddings_that_are_there_anyway_may_be_asked_for():
    target = make_target()
    files = convert_head(make_draft_model(target), target, layout="draft_model", include_embeddings=True)
    assert "model.embed_tokens.weight" in files.tensors


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("spoiled", [False, True])
def test_embeddings_are_compared_whatever_a_layout_calls_them(trained, spoiled, tmp_path, monkeypatch):
    target, name = make_target(), "model.embed_tokens.weight"
    head = make_head(target, train_embeddings=trained)
    with torch.no_grad():
        head.embed_tokens.weight += 1.0 * trained

    def convert(head: Eagle3Head, target: Target, request: ExportRequest) -> ModelFiles:
        files = to_flat_eagle3(head, target, request)
        files.tensors[name] = files.tensors.pop("embed_tokens.weight") + 0.5 * spoiled
        return files

    rules = [replace(rule, name=name if rule.name == "embed_tokens.weight" else rule.name) for rule in EAGLE3.tensors]
    replace_layout(monkeypatch, "eagle3", contract=replace(EAGLE3, tensors=tuple(rules)), convert=convert)
    if spoiled:
        with pytest.raises(AssertionError, match="the export gives other logits"):
            export_head(head, target, tmp_path / "out", dtype="float32")
        assert not list(tmp_path.iterdir())
        return
    export_head(head, target, tmp_path / "out", dtype="float32")
    assert (
        "takes the target's in silence (input embeddings that were trained)"
        in (tmp_path / "out" / "README.md").read_text()
    ) == trained


def test_the_targets_embeddings_in_another_dtype_are_not_a_heads_own():
    target = make_target()
    files = convert_head(make_eagle1(target), target, layout="eagle1_sglang", include_embeddings=True, dtype="bfloat16")
    assert files.tensors["embed_tokens.weight"].dtype == torch.bfloat16
