"""Bad targets: configurations that lie, headers that lie, indexes that point elsewhere, weights that are none."""

import math
from pathlib import Path
from typing import Any

import torch

from draftsmith.target.target import load_target
from tests.bad_inputs.cases import (
    Case,
    Table,
    copied,
    cut,
    damaged,
    edit_header,
    edit_json,
    edit_tensors,
    nested,
    remove,
    write,
)
from tests.models import save_tiny_target

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FIRST = "model.embed_tokens.weight"


make = copied(lambda folder: save_tiny_target(folder, "llama", num_hidden_layers=2))
"""A tiny Llama."""


def config(name: str, words: tuple[str, ...] | None = None, **changes: Any) -> Case:
    """Return the case of a config.json with other values; its sentence names the key."""
    return Case(f"config-{name}", edit_json(CONFIG, **changes), tuple(changes) if words is None else words)


def _swap_offsets(entries: dict[str, Any]) -> None:
    names = [name for name in entries if name != "__metadata__"][:2]
    one, two = (entries[name] for name in names)
    two["data_offsets"] = one["data_offsets"]
    two["shape"], two["dtype"] = one["shape"], one["dtype"]


def _only_config(**changes: Any) -> Any:
    """Change config.json, beside no generation_config.json, which goes before it."""

    def spoil(folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        edit_json(CONFIG, **changes)(folder)

    return spoil


def _index(weight_map: Any) -> Any:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        write(INDEX, weight_map)(folder)

    return spoil


def _fill(value: float) -> Any:
    return edit_tensors(WEIGHTS, lambda tensors: tensors[FIRST].fill_(value))


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = tensors[FIRST][:-3].clone()


_BAD_SIZES: tuple[Any, ...] = (0, -1, "64", None, 1.5, True, [64], {}, 10**12)
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_CONFIGS = (
    *(config(f"{key}-{value!r}", **{key: value}) for key in _SIZES for value in _BAD_SIZES),
    *(
        config(f"{key}-{value!r}", **{key: value})
        for key in ("num_key_value_heads", "head_dim")
        for value in (0, "2", -4)
    ),
    *(config(f"intermediate_size-{value!r}", intermediate_size=value) for value in (0, "96", -1, 2.5, [])),
    *(config(f"max_position_embeddings-{value!r}", max_position_embeddings=value) for value in (0, "256", -1)),
    config("heads-no-multiple", ("num_attention_heads",), num_attention_heads=3),
    config("other-hidden", (), hidden_size=32),
    config("other-vocab", (), vocab_size=161),
    config("other-vocab-huge", (), vocab_size=50_000_000),
    config("more-layers", (), num_hidden_layers=3),
    config("many-layers", (), num_hidden_layers=9_000),
    config("million-layers", num_hidden_layers=1_000_000),
    config("other-intermediate", (), intermediate_size=97),
    config("huge-intermediate", (), intermediate_size=2**31 - 1),
    config("activation-unknown", ("relu9",), hidden_act="relu9"),
    config("activation-number", hidden_act=3),
    config("activation-list", hidden_act=["silu"]),
    config("dtype-unknown", ("dtype",), dtype="float12"),
    config("dtype-number", ("dtype",), dtype=16),
    config("dtype-int", ("dtype",), dtype="int8"),
    config("eps-text", rms_norm_eps="small"),
    config("eps-null-list", rms_norm_eps=[1e-6]),
    config("eps-negative", rms_norm_eps=-1.0),
    config("rope-text", ("rope",), rope_parameters="yarn"),
    config("rope-list", ("rope",), rope_parameters=[1]),
    config("rope-unknown", ("spiral",), rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    config("rope-theta-text", ("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": "big"}),
    config("rope-theta-zero", ("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 0}),
    config("model_type-unknown", ("gpt-99",), model_type="gpt-99"),
    config("model_type-number", model_type=7),
    config("model_type-missing", (), model_type=..., architectures=...),
    config("model_type-encoder", ("t5",), model_type="t5"),
    config("architectures-text", architectures="LlamaForCausalLM"),
    config("architectures-numbers", architectures=[1]),
    config("eos-text", eos_token_id="two"),
    *(config(f"eos-{value!r}", eos_token_id=value) for value in ([[2]], [2, "x"], 2.5, True)),
    Case("config-eos-beyond", _only_config(eos_token_id=160), ("eos_token_id", "token 160")),
    Case("config-eos-below", _only_config(eos_token_id=-1), ("eos_token_id", "token -1")),
    *(
        Case(f"generation-eos-{value!r}", edit_json("generation_config.json", eos_token_id=value), ("eos_token_id",))
        for value in ("two", -1, 160, 10**9, [[2]], [2, [3]], [2, "x"], [2, 200], {"a": 1}, True, [None])
    ),
    config("eos-object", eos_token_id={"id": 2}),
    config("tie-text", tie_word_embeddings="yes"),
    config("text_config-list", text_config=[]),
    config("layer_types-text", layer_types="full"),
    config("layer_types-short", layer_types=["full_attention"]),
    config("quantization-text", quantization_config="int4"),
    *damaged(CONFIG, name="config"),
)
_OF_JSON = "list null deep long-integer half-surrogate"
_HEADERS = (
    Case("header-dtype", edit_header(WEIGHTS, lambda h: h[FIRST].update(dtype="F13")), (WEIGHTS, "F13")),
    Case("header-shape", edit_header(WEIGHTS, lambda h: h[FIRST].update(shape=[2**62, 2**62])), (WEIGHTS,)),
    Case("header-overlap", edit_header(WEIGHTS, _swap_offsets), (WEIGHTS,)),
    Case("header-length", write(WEIGHTS, b"\xff" * 64), (WEIGHTS,)),
    Case("header-deep", write(WEIGHTS, (200_000).to_bytes(8, "little") + nested(100_000).encode()), (WEIGHTS,)),
    *damaged(WEIGHTS, "", name="weights", without=f"{_OF_JSON} cut missing empty word binary"),
    *damaged(WEIGHTS, name="weights", without=f"{_OF_JSON} cut missing folder dangling loop pipe device"),
    Case("weights-cut", cut(WEIGHTS, 0.9), (WEIGHTS, "cut short")),
    Case("weights-missing", remove(WEIGHTS), ("no weights",)),
    Case(
        "weights-incomplete", edit_tensors(WEIGHTS, lambda tensors: tensors.pop("lm_head.weight")), ("lm_head.weight",)
    ),
    Case("weights-longer", lambda f: (f / WEIGHTS).open("ab").write(b"1234"), (WEIGHTS,)),
    Case("weights-nan", _fill(math.nan), ("NaN",)),
    Case("weights-infinite", _fill(math.inf), ("NaN or infinity",)),
    Case("weights-of-another-size", edit_tensors(WEIGHTS, _reshape), (FIRST,)),
    Case("weights-renamed", edit_header(WEIGHTS, lambda h: h.update({"x": h.pop(FIRST)})), (FIRST,)),
)
_INDEXES = (
    Case("index-list", _index("[]"), (INDEX,)),
    Case("index-null-map", _index('{"weight_map": null}'), (INDEX,)),
    Case("index-map-list", _index('{"weight_map": ["model-00001-of-00001.safetensors"]}'), (INDEX,)),
    Case("index-map-empty", _index('{"weight_map": {}}'), (INDEX,)),
    Case("index-map-numbers", _index('{"weight_map": {"a": 1}}'), (INDEX,)),
    Case("index-outside", _index('{"weight_map": {"a": "../model.safetensors"}}'), (INDEX, "../model.safetensors")),
    Case("index-absolute", _index('{"weight_map": {"a": "/etc/passwd"}}'), (INDEX, "/etc/passwd")),
    Case(
        "index-missing-file", _index('{"weight_map": {"a": "model-9.safetensors"}}'), ("model-9.safetensors", "missing")
    ),
    Case("index-cut", _index('{"weight_map": {"a": '), (INDEX,)),
)

TABLE = Table("targets", make, lambda folder: load_target(str(folder)), (*_CONFIGS, *_HEADERS, *_INDEXES))
