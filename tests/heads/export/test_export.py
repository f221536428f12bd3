"""What an export writes, whatever the layout, and the flat EAGLE-3 layout as others write it."""

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
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.eagle.formats import EAGLE3, FusedSchema
from draftsmith.heads.eagle3.formats import load_eagle3_directory
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.export.export import agree, convert_head, engines_without, export_head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.schema import Export, TensorRow, flatten
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import LLAMA3, PLAIN, make_draft_model, make_eagle1, make_target, replace_layout
from tests.exports import make_eagle3 as make_head


def check_same_logits(a: Eagle3Head, b: Eagle3Head, target: Target, tolerance: float = 0.0) -> None:
    batch = pack(target, documents_of(target), a.reads.layer_ids)
    for x, y in zip(a(batch, 3).steps, b(batch, 3).steps, strict=True):
        assert torch.equal(x.rows, y.rows)
        torch.testing.assert_close(x.logits, y.logits, atol=tolerance, rtol=tolerance)


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


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
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


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_logits_agree_where_what_is_not_finite_is_the_same(value: float) -> None:
    logits = torch.randn(3, 8)
    spoilt = logits.clone()
    spoilt[1, 2] = value
    assert not agree(logits, spoilt)
    assert not agree(spoilt, logits)
    assert not agree(spoilt, spoilt.roll(1, -1))
    assert agree(spoilt, spoilt) == (value == value)
    assert not agree(spoilt, -spoilt)


def test_logits_in_halves_may_have_a_sum_that_a_half_does_not_hold() -> None:
    logits = torch.full((1, 4096), 64.0, dtype=torch.float16)
    assert agree(logits, logits)
    assert not agree(logits, -logits)


def test_embeddings_that_are_there_anyway_may_be_asked_for():
    target = make_target()
    files = convert_head(make_draft_model(target), target, layout="draft_model", include_embeddings=True)
    assert "model.embed_tokens.weight" in files.tensors


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("spoiled", [False, True])
def test_embeddings_are_compared_whatever_a_layout_calls_them(trained, spoiled, tmp_path, monkeypatch):
    target = make_target()
    head = make_head(target, train_embeddings=trained)
    with torch.no_grad():
        head.embed_tokens.weight += 1.0 * trained

    class Spoiled(FusedSchema):
        def head_tensors(self, export: Export) -> dict[str, Tensor]:
            tensors = super().head_tensors(export)
            return {**tensors, EMBEDDING: tensors[EMBEDDING] + 0.5 * spoiled}

    renamed = TensorRow(f"model.{EMBEDDING}", EMBEDDING)
    rows = tuple(renamed if row.name == EMBEDDING else row for row in EAGLE3.tensors)
    replace_layout(monkeypatch, "eagle3", schema=Spoiled("eagle3", rows, EAGLE3.keys))
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


def test_what_does_not_fit_the_schema_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    target = make_target()
    replace_layout(monkeypatch, "eagle3", schema=replace(EAGLE3, tensors=EAGLE3.tensors[1:]))
    with pytest.raises(UserError, match=r"layout eagle3: tensor fc\.weight: expected no such tensor"):
        export_head(make_head(target), target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", layouts())
def test_floats_are_written_in_the_dtype_that_was_asked_for_and_the_head_is_left_alone(layout):
    target = make_target()
    head = PLAIN[layouts()[layout].method](target)
    files = convert_head(head, target, layout=layout, dtype="bfloat16", num_speculative_tokens=3)
    assert {x.dtype for x in files.tensors.values() if x.is_floating_point()} == {torch.bfloat16}
    assert flatten(files.config).get("torch_dtype", "bfloat16") == "bfloat16"
    assert {value.dtype for value in head.parameters()} == {torch.float32}


def test_another_dtype_is_one_sentence(tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=r"export\.dtype is 'int8'"):
        export_head(make_head(target), target, tmp_path / "out", dtype="int8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_tensor_beyond_half_precision_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    target = make_target()
    head = make_head(target)
    with torch.no_grad():
        head.get_parameter("layers.0.mlp.up_proj.weight")[3, 4] = 70_000.0
    if dtype == "float16":
        words = r"The tensor midlayer\.mlp\.up_proj\.weight does not fit float16, which holds numbers up to 65504: export bfloat16 or"
        with pytest.raises(UserError, match=words):
            export_head(head, target, tmp_path / "out", dtype=dtype)
        assert not list(tmp_path.iterdir())
    else:
        export_head(head, target, tmp_path / "out", dtype=dtype)


def test_the_targets_embeddings_in_another_dtype_are_not_a_heads_own():
    target = make_target()
    files = convert_head(make_eagle1(target), target, layout="eagle1_sglang", include_embeddings=True, dtype="bfloat16")
    assert files.tensors["embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({}, set()),
        ({"sliding_window": 16}, {"eagle3/sglang", "eagle3/tensorrt_llm", "eagle3_llama_cpp/llama_cpp"}),
        ({"norm_output": True}, {"eagle3_llama_cpp/llama_cpp"}),
    ],
)
def test_engines_that_do_not_compute_a_head_are_named(options: dict[str, Any], without: set[str]) -> None:
    """SGLang lets a window's draft see all of the text, in silence; llama.cpp feeds back another state."""
    target = make_target()
    found = {name for name in engines_without(make_head(target, **options), target) if "speculators" not in name}
    assert found == without
