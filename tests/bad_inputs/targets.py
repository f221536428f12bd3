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
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_NAMED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SIZES, _BAD_SIZES),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), (0, "2", -4)),
    "num_hidden_layers": (*_BAD_SIZES, 1_000_000),
    "intermediate_size": (0, "96", -1, 2.5, []),
    "max_position_embeddings": (0, "256", -1),
    "hidden_act": (3, ["silu"]),
    "dtype": ("float12", 16, "int8"),
    "rms_norm_eps": ("small", [1e-6], -1.0),
    "model_type": (7,),
    "architectures": ("LlamaForCausalLM", [1]),
    "eos_token_id": ("two", [[2]], [2, "x"], 2.5, True, {"id": 2}),
    "tie_word_embeddings": ("yes",),
    "text_config": ([],),
    "layer_types": ("full", ["full_attention"]),
    "quantization_config": ("int4",),
}
"""Values of keys that the sentence names."""
_CONFIGS = (
    *(config(f"{key}-{value!r}", **{key: value}) for key, values in _NAMED.items() for value in values),
    config("heads-no-multiple", ("num_attention_heads",), num_attention_heads=3),
    config("other-hidden", (), hidden_size=32),
    *(config(f"vocab-{size}", (), vocab_size=size) for size in (161, 50_000_000)),
    *(config(f"layers-{count}", (), num_hidden_layers=count) for count in (3, 9_000)),
    *(config(f"wide-{size}", (), intermediate_size=size) for size in (97, 2**31 - 1)),
    config("activation-unknown", ("relu9",), hidden_act="relu9"),
    *(config(f"rope-{value}", ("rope",), rope_parameters=value) for value in ("yarn", [1])),
    config("rope-unknown", ("spiral",), rope_parameters=_ROPE | {"rope_type": "spiral"}),
    *(config(f"theta-{it}", ("rope_theta",), rope_parameters=_ROPE | {"rope_theta": it}) for it in ("big", 0)),
    config("model_type-unknown", ("gpt-99",), model_type="gpt-99"),
    config("model_type-missing", (), model_type=..., architectures=...),
    config("model_type-encoder", ("t5",), model_type="t5"),
    *(Case(f"eos-{it}", _only_config(eos_token_id=it), ("eos_token_id", f"token {it}")) for it in (160, -1)),
    *(
        Case(f"generation-eos-{value!r}", edit_json("generation_config.json", eos_token_id=value), ("eos_token_id",))
        for value in ("two", -1, 160, 10**9, [[2]], [2, [3]], [2, "x"], [2, 200], {"a": 1}, True, [None])
    ),
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
