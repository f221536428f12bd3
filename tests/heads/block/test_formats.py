"""DFlash and DSpark in the layouts of engines: there and back, what others' files say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from draftsmith.errors import UserError
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.recognise import load_head, recognise
from draftsmith.target.target import Target
from tests.exports import (
    LLAMA3,
    VOCAB,
    make_dflash,
    make_dflash2,
    make_domino,
    make_dspark,
    make_jetspec,
    make_target,
    make_xpress,
    sign_again,
)

MAKE = {
    "dflash": make_dflash,
    "dflash2": make_dflash2,
    "domino": make_domino,
    "dspark": make_dspark,
    "jetspec": make_jetspec,
    "xpress": make_xpress,
}


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if (folder / "draftsmith.json").is_file():
        sign_again(folder)
    return folder


def exported(method: str, folder: Path, target: Target, vocab: torch.Tensor | None = None, **options: Any) -> Path:
    return export_head(MAKE[method](target, vocab), target, folder / "out", layout=method, dtype="float32", **options)


def test_the_scaling_of_the_target_goes_to_vllm(tmp_path: Path) -> None:
    target = make_target()
    target.config.rope_parameters = LLAMA3
    path = exported("dflash", tmp_path, target)
    config = json.loads((path / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert load_head(path, target).config.rope_parameters["factor"] == 8.0
    with pytest.raises(UserError, match=r"leaves the scaling out where it converts this draft"):
        export_head(make_dflash(target), target, tmp_path / "other", layout="dflash_llama_cpp")


def test_engines_are_told_the_whole_block(tmp_path: Path) -> None:
    """Whatever number the recipe drafts: a shorter block is another one than the head was trained on."""
    target = make_target()
    path = export_head(make_dflash2(target), target, tmp_path / "dflash2", num_speculative_tokens=2)
    assert '"num_speculative_tokens": 2' in (path / "README.md").read_text(), "whose block is as long as the draft"
    for method, tokens in (("dflash", 3), ("dspark", 3)):
        path = export_head(MAKE[method](target), target, tmp_path / method, layout=method, num_speculative_tokens=2)
        text = (path / "README.md").read_text()
        assert f'"num_speculative_tokens": {tokens}' in text
        assert (", read from its source." in text) == (method == "dspark"), "which vLLM was not run with"
        path = export_head(MAKE[method](target), target, tmp_path / f"{method}-c", layout=f"{method}_llama_cpp")
        text = (path / "README.md").read_text()
        assert f"--spec-type draft-{method}" in text
        assert f"--spec-draft-n-max {tokens}" in text


def test_temperatures_are_neutral_where_a_file_names_none(tmp_path: Path) -> None:
    target = make_target()
    path = edit(exported("dspark", tmp_path, target), confidence_temperatures=None)
    assert load_head(path, target).temperatures.tolist() == [1.0] * 3


def test_a_published_configuration(tmp_path: Path) -> None:
    """Keys that the published ones leave out or place elsewhere."""
    target = make_target()
    path = exported("dflash", tmp_path, target)
    (path / "draftsmith.json").unlink()
    edit(path, draft_vocab_size=None, torch_dtype=None, layer_types=["full_attention"] * 2, num_target_layers=8)
    assert recognise(path).name == "a DFlash head"
    assert torch.equal(load_head(path, target).fc.weight, make_dflash(target).fc.weight)
    for number, key in enumerate(("causal", "causal_head")):
        path = exported("jetspec", tmp_path / f"{number}", target)
        (path / "draftsmith.json").unlink()
        edit(path, dflash_config={**MASKS, key: True})
        assert recognise(path).name == "a JetSpec head"
        assert load_head(path, target).causal
    path = exported("dspark", tmp_path / "b", target)
    edit(path, dflash_config=None, mask_token_id=3, target_layer_ids=[0, 2, 4], architectures=["DSparkDraftModel"])
    assert load_head(path, target).reads.layer_ids == (1, 3, 5)
    path = exported("xpress", tmp_path / "d", target)
    (path / "draftsmith.json").unlink()
    edit(path, is_causal=None, sample_from_anchor=None, block_size=None, layer_types=["full_attention"] * 2)
    assert recognise(path).name == "an XPress head"
    assert load_head(path, target).options.block_size == 4
    path = exported("dflash2", tmp_path / "c", target)
    (path / "draftsmith.json").unlink()
    section = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4], "block_size": 8, "swa_window_size": 12} | SIZES
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 99, "use_sliding_window": True}
    edit(path, dflash_config=section, **windows)
    assert recognise(path).name == "a DFlash2 head"
    head = load_head(path, target)
    assert (head.window, head.options.block_size) == (12, 8)


SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
MASKS = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4]}
SECTION = {**MASKS, **SIZES}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
DERIVED = {**SLIDING, "layer_types": None, "max_window_layers": 0}
DOMINO = {
    **MASKS,
    "projector_type": "domino",
    "emb_dim": 5,
    "gru_hidden_dim": 6,
    "pure_draft_prefix_len": 1,
    "shift_label": True,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"is_causal": True}, "causal or sliding attention"),
    ("dflash", {"layer_types": ["sliding_attention"] * 2}, "causal or sliding attention"),
    ("dflash", {"sample_from_anchor": True}, "with which the first slot drafts too"),
    ("dflash", {"speculators_model_type": "dflash"}, "the format of speculators"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "conv_kernel_size": 4}}, "conv_kernel"),
    ("dflash", {"dflash_config": {"mask_token_id": 160, "target_layer_ids": [0, 2, 4]}}, "says mask_token_id 160"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 9]}}, "10 is out of range"),
    ("dflash", {"hidden_size": 65}, "but the target models/tiny has 64"),
    ("dflash", {"dflash_config": {**MASKS, "variable_prefix": 3}}, "head.variable_prefix is 3"),
    ("dflash", {"dflash_config": {**MASKS, "variable_prefix": "2"}}, "DFlash head"),
    ("dflash2", {"is_causal": True}, "causal or sliding attention"),
    ("dflash2", {**SLIDING, "is_causal": None}, "causal or sliding attention"),
    ("dflash2", {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, "causal or sliding attention"),
    ("dflash2", {**SLIDING, "use_sliding_window": False}, "layers some of which see a window"),
    (
        "dflash2",
        {
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention"],
            "dflash_config": {**SECTION, "use_swa": True},
        },
        "layers some of which see a window",
    ),
    ("dflash2", {**SLIDING, "sliding_window": "9"}, "DFlash2 head"),
    ("dflash2", {**DERIVED, "is_causal": None}, "causal or sliding attention"),
    ("dflash2", {**DERIVED, "max_window_layers": 1}, "causal or sliding attention"),
    ("dflash2", {**DERIVED, "sliding_window": "9"}, "list of layer_types"),
    ("dflash", DERIVED, "causal or sliding attention"),
    ("dflash2", {"dflash_config": {**SECTION, "selector_top_k": 2.7}}, "DFlash2 head"),
    ("dflash2", {**SLIDING, "sliding_window": None}, "a sliding attention without a length"),
    ("dflash2", {**SLIDING, "sliding_window": 4}, "head.sliding_window is 4, which a block of 4 slots fills"),
    ("dflash2", {"dflash_config": {**SECTION, "selector_rank": None}}, "DFlash2 head"),
    ("dflash2", {"dflash_config": {**SECTION, "conv_group_size": 7}}, "head.conv_group_size is 7"),
    ("dflash2", {"dflash_config": {**SECTION, "output_multiplier": 2.0}}, "another scale or softcap of its logits"),
    ("dflash2", {"dflash_config": {**SECTION, "input_embedding_scale": 8.0}}, "dflash_config.input_embedding_scale"),
    ("dflash2", {"speculators_model_type": "dflash2"}, "the format of speculators"),
    ("jetspec", {"is_causal": False}, "bidirectional or sliding attention"),
    ("jetspec", {"dflash_config": {**MASKS, "causal": False, "causal_head": True}}, "bidirectional or sliding"),
    ("jetspec", {"dflash_config": {**MASKS, "causal": True, "target_hidden_size": 32}}, "target_hidden_size"),
    ("jetspec", {"layer_types": ["sliding_attention"] * 2}, "bidirectional or sliding attention"),
    ("jetspec", {"sample_from_anchor": True}, "with which the first slot drafts too"),
    ("jetspec", {"speculators_model_type": "jetspec", "dflash_config": None}, "the format of speculators"),
    ("domino", {"dflash_config": {**DOMINO, "projector_type": "lilicorr"}}, "another projector_type than domino"),
    ("domino", {"dflash_config": {**DOMINO, "emb_dim": None}}, "Domino head"),
    ("domino", {"dflash_config": {**DOMINO, "emb_dim": 2.5}}, "Domino head"),
    ("domino", {"dflash_config": {**DOMINO, "shift_label": "yes"}}, "shift_label is true or false"),
    ("domino", {"dflash_config": {**DOMINO, "pure_draft_prefix_len": 4}}, "none of which would be corrected"),
    ("domino", {"dflash_config": {**DOMINO, "output_multiplier": 2.0}}, "dflash_config.output_multiplier"),
    ("xpress", {"sample_from_anchor": True}, "with which the first slot drafts too"),
    ("xpress", {"is_causal": True}, "causal or sliding attention"),
    ("xpress", {"speculators_model_type": "xpress"}, "the format of speculators"),
    ("xpress", {"xpress_rank": None}, "XPress head"),
    ("xpress", {"xpress_mlp_hidden": 2.5}, "XPress head"),
    ("xpress", {"xpress_block_size": 3}, "xpress_head.mix.L"),
    ("dspark", {"sample_from_anchor": False}, "whose first slot drafts nothing"),
    ("dspark", {"markov_head_type": "rnn"}, "another Markov head"),
    ("dspark", {"confidence_head_with_markov": False}, "a confidence that does not read the token before"),
    ("dspark", {"markov_rank": None}, "DSpark head"),
    ("dspark", {"confidence_temperatures": "hot"}, "list of temperatures"),
    ("dspark", {"confidence_temperatures": [1.0]}, "numbers above 0 are needed, one for each slot"),
    ("dspark", {"confidence_temperatures": [0.0] * 5}, "numbers above 0 are needed, one for each slot"),
    ("dflash", {"layer_types": 2}, "list of layer_types"),
    ("dflash", {"block_size": "8"}, "describes no block drafter"),
    ("dflash", {"block_size": 1}, "head.block_size is 1"),
    ("dflash", {"block_size": 257}, "head.block_size is 257, but the target models/tiny reads no more than 256 tokens"),
]


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 9),
        ({"sliding_window": None}, 4096),
        ({"max_window_layers": 2}, None),
        ({"max_window_layers": None}, None),
        ({"use_sliding_window": False}, None),
    ],
)
def test_layers_whose_kinds_are_not_named_see_what_qwen3_says(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    """As engines read such a file: which layers have a window, from which one on, how long it is and whether any has."""
    target = make_target()
    path = edit(exported("dflash2", tmp_path, target), **DERIVED | changes)
    (path / "draftsmith.json").unlink()
    config = {key: value for key, value in json.loads((path / "config.json").read_text()).items() if "window" in key}
    assert Qwen3Config(num_hidden_layers=2, **config).layer_types == [kind_of(window)] * 2
    assert load_head(path, target).window == window


def kind_of(window: int | None) -> str:
    return "full_attention" if window is None else "sliding_attention"


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_what_is_not_computed_here_is_refused(method: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    target = make_target()
    path = edit(exported(method, tmp_path, target), **changes)
    with pytest.raises(UserError, match=words) as caught:
        load_head(path, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole vocabulary", "draft vocabulary"])
def test_a_trained_output_projection_is_refused(vocab: torch.Tensor | None, tmp_path: Path) -> None:
    target = make_target()
    path = exported("dflash", tmp_path, target, vocab)
    tensors = load_file(path / "model.safetensors")
    own = target.head.weight if vocab is None else target.head.weight[vocab]
    save_file({**tensors, "lm_head.weight": own.clone()}, path / "model.safetensors")
    sign_again(path)
    load_head(path, target)
    save_file({**tensors, "lm_head.weight": own + 1}, path / "model.safetensors")
    sign_again(path)
    with pytest.raises(UserError, match="an output projection that was trained with it"):
        load_head(path, target)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    target = make_target()
    path = exported("dflash", tmp_path, target)
    torch.save({"mask_token_id": 3, "embedding": torch.zeros(64)}, path / "mask_embedding.pt")
    with pytest.raises(UserError, match="an embedding of its own for the mask"):
        load_head(path, target)


@pytest.mark.parametrize("method", [method for method in MAKE if f"{method}_llama_cpp" in layouts()])
def test_llama_cpp_gets_no_embeddings_which_it_would_draft_through(method: str) -> None:
    """It takes them for the output projection of a draft that has none of its own."""
    target, layout = make_target(tie_word_embeddings=False), f"{method}_llama_cpp"
    head = MAKE[method](target, None)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(convert_head(head, target, layout=layout).tensors)
    with pytest.raises(
        UserError, match=f"include_embeddings is true, but the layout {layout} holds no input embeddings"
    ):
        convert_head(head, target, layout=layout, include_embeddings=True)
