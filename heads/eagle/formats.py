"""The layouts of EAGLE-3, which P-EAGLE shares: the flat one and that of speculators, and how heads in them are read.

How each engine takes them stands in the formats.py of both methods.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.eagle import DraftShape
from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.heads.files import CONFIG, explain_config, read_config, read_weights
from draftsmith.heads.formats.published import check_sizes, read_layer, take_vocab, tidy, vocab_offsets
from draftsmith.heads.formats.schema import (
    ABSENT,
    LAYER_SECTION,
    LLAMA_KEYS,
    Config,
    Export,
    Schema,
    TensorRow,
    draft_vocab_size,
    flatten,
    llama_layer,
    renamed,
    target_reference,
)
from draftsmith.target.target import Target

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ELSEWHERE = {
    "norm_before_fc": ((True, "norm_before_fc"),),
    "norm_output": ((False, "return_hidden_post_norm"), (True, "return_hidden_post_norm")),  # TensorRT-LLM's name
}
"""Where else files say a flag: whether under `eagle_config`, and its name there."""
NATIVE_LAYER, FLAT_LAYER = "layers.0.", "midlayer."
AUX_LAYERS, AUX_COUNT = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
SPECULATORS_CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
SPECULATORS_VERSION = "0.9.0"
"""The version of the speculators package that the layout was held against."""


class FusedSchema(Schema):
    """A layout of EAGLE-3. Where the vocabulary of the head is not the whole one, it has the maps d2t (offsets) and t2d."""

    def head_tensors(self, export: Export) -> Mapping[str, Tensor]:
        tensors = {name: value for name, value in export.head.state_dict().items() if name != "draft_vocab"}
        ids, V = export.head.draft_vocab, export.target.vocab_size
        if ids is None or len(ids) == V:
            return tensors
        marks = torch.zeros(V, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
        return {**tensors, "d2t": vocab_offsets(ids), "t2d": marks}


def _has_vocab_map(config: Config) -> bool:
    """vLLM refuses d2t beside a whole vocabulary; every engine takes a missing one as the identity."""
    flat = flatten(config)
    return flat["draft_vocab_size"] != flat["vocab_size"]


# The tensors by the head's names. Later layers, which are plain, are called by their number in every engine that takes them.
_TENSORS = (
    TensorRow("fc.weight"),
    TensorRow("fc_norm.{i}.weight", when=lambda config: config["fc_norm"]),
    TensorRow("input_norm.weight", when=lambda config: config["norm_before_fc"]),
    *llama_layer(NATIVE_LAYER),
    TensorRow(f"{NATIVE_LAYER}hidden_norm.weight"),
    *llama_layer("layers.{m}."),
    TensorRow("norm.weight"),
    TensorRow("lm_head.weight"),
    TensorRow("d2t", dtype=torch.int64, when=_has_vocab_map),
    TensorRow("t2d", dtype=torch.bool, when=_has_vocab_map),
)
_EMBEDDING = TensorRow(EMBEDDING)


def _layer_ids(export: Export) -> list[int]:
    return list(export.head.reads.layer_ids)


def _flag(name: str) -> Any:
    return lambda export: getattr(export.head.options, name, False)


_LAYER_KEYS = {**LLAMA_KEYS, "num_hidden_layers": lambda export: len(export.head.layers)}
# Every key is there for which engines have differing defaults.
_HEAD_KEYS = {
    "draft_vocab_size": draft_vocab_size,  # without it engines expect V rows in lm_head
    "target_hidden_size": attrgetter("target.hidden_size"),
    AUX_LAYERS: _layer_ids,  # llama.cpp reads it nowhere else
    **{flag: _flag(flag) for flag in FLAGS},
}
_MORE_LAYER_KEYS = {
    # vLLM and speculators take the window in the layers that layer_types names, and in no others.
    "sliding_window": lambda export: ABSENT if export.head.window is None else export.head.window,
    "layer_types": lambda export: (
        ABSENT if export.head.window is None else ["sliding_attention"] * len(export.head.layers)
    ),
    AUX_COUNT: lambda export: ABSENT if len(_layer_ids(export)) == 3 else len(_layer_ids(export)),  # engines assume 3
}

# Flat EAGLE-3: vLLM, SGLang, TensorRT-LLM, llama.cpp. "midlayer." is the one prefix that all of them know:
# SGLang skips "layers.0." without a word.
EAGLE3 = FusedSchema(
    name="eagle3",
    tensors=renamed((*_TENSORS, replace(_EMBEDDING, optional=True)), {NATIVE_LAYER: FLAT_LAYER}),
    keys={
        "architectures": ["LlamaForCausalLMEagle3"],
        **_LAYER_KEYS,
        **_HEAD_KEYS,
        **_MORE_LAYER_KEYS,
        # Where SGLang and TensorRT-LLM look for some keys. SGLang counts layer outputs, so its ids are one lower.
        "eagle_config": {
            AUX_LAYERS: lambda export: [k - 1 for k in _layer_ids(export)],
            "use_aux_hidden_state": True,
            "norm_before_fc": _flag("norm_before_fc"),
        },
    },
)


def _tokens(export: Export) -> int:
    """How many tokens vLLM drafts: as many as the first proposal method says."""
    K = export.num_speculative_tokens
    if K is None or K < 1:
        raise UserError(
            f"num_speculative_tokens is {K}: the layout {export.head.method}_speculators tells the engine how many tokens to "
            "draft, so it must be at least 1."
        )
    return K


def speculators_keys(kind: str) -> dict[str, Any]:
    """Return the keys of the layout of speculators. kind: what the format calls the head."""
    return {
        "architectures": [SPECULATORS_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        **_HEAD_KEYS,
        LAYER_SECTION: {**_LAYER_KEYS, **_MORE_LAYER_KEYS},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            # A chain that is accepted without loss.
            "proposal_methods": lambda export: [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _tokens(export),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {  # which vLLM loads from there
                "name_or_path": lambda export: target_reference(export.target),
                "architectures": lambda export: export.target.identity.to_json()["architectures"],
            },
        },
    }


# speculators: the package and vLLM, which starts the target that the directory names. The package knows only
# "layers.0." and leaves what it does not find uninitialised, the embeddings too (it looks for NaN there, and memory
# seldom holds any); vLLM knows both prefixes, and shares the target's embeddings where those in the file are the same.
EAGLE3_SPECULATORS = FusedSchema(
    name="eagle3_speculators", tensors=(*_TENSORS, _EMBEDDING), keys=speculators_keys("eagle3")
)


def read_either(path: Path, kind: str, title: str) -> dict[str, Any]:
    """Return the configuration of a head in the flat layout or in that of speculators, its keys flat. kind, title: what
    speculators and people call the head. Raises UserError for another kind, and where readers would take it differently."""
    config = read_config(path)
    if "speculators_model_type" not in config:
        return config
    if config["speculators_model_type"] != kind or not isinstance(config.get(LAYER_SECTION), dict):
        raise UserError(f"{path}/config.json is no {title} head of speculators: give the directory of an export.")
    if "norm_before_residual" not in config:
        raise UserError(
            f"{path}/config.json lacks norm_before_residual, which vLLM takes for true and speculators for false: "
            "write there how the head was trained."
        )
    return flatten(config)


Head = TypeVar("Head", bound=FusedHead)


def read_fused(
    path: Path,
    config: Mapping[str, Any],
    target: Target,
    kind: type[Head],
    options: type[DraftShape],
    names: Schema = EAGLE3,
    **more: Any,
) -> Head:
    """Return the head of that kind described by the flat `config`, with the tensors in `path`. names: of the tensors there; more:
    further fields of the head's options."""
    check_sizes(path, config, target, shapes=True)
    file, stored = read_weights(path, target.device)
    tensors = tidy(stored, file, target, names)
    draft_vocab = take_vocab(tensors, config.get("draft_vocab_size") or target.vocab_size, file, target)
    layer_ids = _read_layer_ids(path, config, target)
    switches = {flag: _flag_of(path, config, flag) for flag in FLAGS}
    own_width = config["hidden_size"] != target.hidden_size
    if own_width and EMBEDDING not in tensors:
        raise UserError(
            f"{file} lacks the tensor {EMBEDDING}, and the target's does not fit a draft of width {config['hidden_size']}: "
            "fetch the whole head."
        )
    chosen = options(
        layer_ids=list(layer_ids),
        draft_vocab_size=target.vocab_size if draft_vocab is None else len(draft_vocab),
        num_hidden_layers=config.get("num_hidden_layers", 1),
        hidden_size=config["hidden_size"] if own_width else None,
        train_embeddings=own_width,
        sliding_window=_window(path, config),
        **{flag: switches[flag] for flag in FLAGS if flag in {field.name for field in fields(options)}},
        **more,
    )
    with explain_config(path, "Llama layer", "fetch the head again"), torch.device(target.device):
        head = kind(chosen, read_layer(config), target, layer_ids, draft_vocab)
    held = tensors if draft_vocab is None else {**tensors, "draft_vocab": draft_vocab}
    fill(head, held, file, remedy="fetch or export it again")
    return head


def _window(path: Path, config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of all layers, None where no layer has one: engines go by layer_types."""
    with explain_config(path, "list of layer_types", "fetch the head again"):
        kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    window = config.get("sliding_window")
    if kinds != {"sliding_attention"} or type(window) is not int or window < 1:
        raise UserError(
            f"{path / CONFIG} says layer_types {sorted(kinds)} and sliding_window {window!r}: only heads of which all layers "
            "or none have the same window can be loaded."
        )
    return window


def _nested(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what stands under `eagle_config`, where some readers look for keys."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise UserError(f"{path / CONFIG} says eagle_config {nested!r}, which is no JSON object: fetch the head again.")
    return nested


def _flag_of(path: Path, config: Mapping[str, Any], flag: str) -> bool:
    """Return one of FLAGS, wherever and under whatever name an engine looks for it. Raises UserError where two places differ."""
    nested = _nested(path, config)
    places = [(config, flag), *((nested if inside else config, name) for inside, name in _ELSEWHERE.get(flag, ()))]
    said = [(name, value) for where, name in places if (value := _switch(path, where, name)) is not None]
    if len({value for _, value in said}) > 1:
        names = " and ".join(dict.fromkeys(name for name, _ in said))
        how = "twice, true and false" if names == flag else "of the same thing, one true and one false"
        raise UserError(f"{path / CONFIG} says {names} {how}, and engines differ: remove one.")
    return any(value for _, value in said)


def _switch(path: Path, config: Mapping[str, Any], name: str) -> bool | None:
    """Return a switch, None where it is not there; another value than true or false, such as the text "false", would count as on."""
    value: bool | None = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path / CONFIG} says {name} {value!r}: write true or false there, as the head was trained.")
    return value


def _read_layer_ids(path: Path, config: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """Return the aux layers of a flat configuration; without any, the default.

    Under `eagle_config` vLLM reads the same ids as at the top level, SGLang those of layer outputs, one lower. So they
    count there only where both readings are known: the default's, either way.
    """
    nested = _nested(path, config)
    if nested.get("use_aux_hidden_state", True) is False:
        raise UserError(
            f"{path / CONFIG} says use_aux_hidden_state false: an EAGLE-3 head without aux layers cannot be loaded; give "
            "one that reads them."
        )
    layer_ids = config.get(AUX_LAYERS)
    if not layer_ids:
        layer_ids, held = target.default_layer_ids(), nested.get(AUX_LAYERS)
        if held and held not in ([*layer_ids], [k - 1 for k in layer_ids]):
            raise UserError(
                f"{path / CONFIG} names the layers {held} in eagle_config alone, where vLLM counts what enters a layer and "
                "SGLang what leaves it: write eagle_aux_hidden_state_layer_ids at its top level, id k for the state that "
                "enters layer k."
            )
    with explain_config(path, "list of aux layers", "fetch the head again"):
        layer_ids = tuple(layer_ids)
    target.check_layer_ids(layer_ids)
    return layer_ids
