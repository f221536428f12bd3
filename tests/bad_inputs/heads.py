"""Bad heads: native checkpoints whose configuration, tensors or vocabulary mean nothing, and published layouts alike."""

import functools
import math
from pathlib import Path
from typing import Any

import torch

from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.target.target import Target
from tests.bad_inputs.cases import Case, Table, copied, damaged, edit_json, edit_tensors
from tests.exports import make_eagle3, make_target

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@functools.cache
def _target() -> Target:
    return make_target()


make = copied(lambda folder: save_head(make_eagle3(_target()), folder, _target()))
"""A native EAGLE-3 head with a draft vocabulary of 9 of 160 tokens."""


def config(name: str, *words: str, **changes: Any) -> Case:
    """Return the case of a config.json with other values."""
    return Case(f"config-{name}", edit_json(CONFIG, **changes), words)


def layer(name: str, **changes: Any) -> Case:
    """Return the case of a head's layer with other sizes."""
    return Case(f"layer-{name}", edit_json(CONFIG, "layer_config", **changes), (CONFIG,))


def option(name: str, **changes: Any) -> Case:
    """Return the case of other options."""
    return Case(f"option-{name}", edit_json(CONFIG, "options", **changes))


def vocab(name: str, change: Any) -> Case:
    """Return the case of another draft vocabulary."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["draft_vocab"] = change(tensors["draft_vocab"])

    return Case(f"vocab-{name}", edit_tensors(WEIGHTS, spoil), ("vocab",))


def fused(name: str, change: Any, *words: str) -> Case:
    """Return the case of another projection of the aux streams; None leaves it out."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        weight = change(tensors.pop("fc.weight"))
        tensors |= {} if weight is None else {"fc.weight": weight}

    return Case(f"tensor-{name}", edit_tensors(WEIGHTS, spoil), ("fc.weight", *words))


def _put(place: Any, value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")


class _Command:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, ("touch run-by-a-pickle",)


def _torch_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"fc.weight": _Command()}, folder / "pytorch_model.bin")


_BAD_SIZES: tuple[Any, ...] = (0, -1, 10**9, "64", None, 2.5, [2], True)
_CONFIGS = (
    *(
        layer(f"{key}-{value!r}", **{key: value})
        for key, values in {
            "intermediate_size": _BAD_SIZES,
            "num_attention_heads": _BAD_SIZES,
            "num_key_value_heads": (0, -1, 10**9, "2", 3),
            "head_dim": (0, -1, 10**9, "16"),
            "hidden_act": ("relu9",),
            "rms_norm_eps": ("small",),
            "rope_parameters": ("yarn", {"rope_type": "spiral", "rope_theta": 1e4}),
        }.items()
        for value in values
    ),
    *(
        option(f"{key}-{value!r}", **{key: value})
        for key, values in {"num_hidden_layers": (10**9, 0, "one"), "colour": ("red",), "ttt_steps": (10**9,)}.items()
        for value in values
    ),
    *(
        config(f"{key}-{value!r}", **{key: value})
        for key, values in {
            "layer_config": ([], ...),
            "options": ([1], None),
            "layer_ids": (None, "1,3,5", {"a": 1}),
            "method": (3, ["eagle3"], "medusa", ...),
            "schema_version": (2, "1"),
            "target": ("llama", []),
        }.items()
        for value in values
    ),
    *(config(f"ids-{ids!r}", "layer_ids", layer_ids=ids) for ids in ([5, 3, 1], [1, 3, 99], ["a"], [-1, 0, 1])),
    config("method-unknown", "eagle99", method="eagle99"),
    *damaged(CONFIG, name="config"),
)
_TENSORS = (
    vocab("beyond", _put(-1, 160)),
    vocab("far-beyond", _put(-1, 2**40)),
    vocab("negative", _put(0, -1)),
    vocab("negated", lambda ids: -ids),
    vocab("repeated", _put(1, 0)),
    vocab("not-ascending", lambda ids: ids.flip(0).contiguous()),
    vocab("empty", lambda ids: ids[:0].clone()),
    vocab("shorter", lambda ids: ids[:-1].clone()),
    vocab("two-dimensional", lambda ids: ids[None].clone()),
    vocab("floats", lambda ids: ids.float()),
    fused("missing", lambda weight: None),
    fused("nan", _put((0, 0), math.nan), "NaN"),
    fused("infinite", _put((0, 0), math.inf)),
    fused("integers", torch.Tensor.int),
    fused("of-another-size", lambda weight: weight[:, :-1].clone()),
    Case("tensor-surplus", edit_tensors(WEIGHTS, lambda held: held.update(surplus=torch.zeros(2))), ("surplus",)),
)
_OF_JSON = "list null deep long-integer half-surrogate"
_FILES = (
    *damaged(WEIGHTS, "", name="weights", without=f"{_OF_JSON} device loop empty word cut binary"),
    *damaged(WEIGHTS, name="weights", without=f"{_OF_JSON} device loop missing folder dangling pipe"),
    Case("weights-longer", lambda folder: (folder / WEIGHTS).open("ab").write(b"1"), (WEIGHTS,)),
    Case("pickle-of-code", _pickle),
    Case("pickle-of-torch", _torch_pickle),
)

TABLE = Table("heads", make, lambda folder: load_head(folder, _target()), (*_CONFIGS, *_TENSORS, *_FILES))
