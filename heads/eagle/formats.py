"""The layouts of EAGLE-3, which P-EAGLE shares: the flat one and that of speculators, contracts and conversion both ways.

How each engine takes them stands in the formats.py of both methods. Symbols in shapes: those of a Llama layer (LLAMA_KEYS), H being the draft's width; Ht target hidden,
W draft vocab, A aux layers, M decoder layers of the draft.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.heads.eagle.options import DraftShape
from draftsmith.heads.files import CONFIG, explain_config, read_config, read_weights
from draftsmith.heads.formats.contracts import (
    LAYER_SECTION,
    LLAMA_KEYS,
    Config,
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    flatten,
    layer_sizes,
    llama_layer,
    lookup,
    replace_keys,
    target_reference,
)
from draftsmith.heads.formats.published import check_sizes, layer_keys, read_layer, take_vocab, tidy, vocab_offsets
from draftsmith.target.target import Target

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NATIVE_LAYER, FLAT_LAYER = "layers.0.", "midlayer."
AUX_LAYERS, AUX_COUNT = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
SPECULATORS_CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
SPECULATORS_VERSION = "0.9.0"
"""The version of the speculators package that the layout was held against."""


def _sizes(config: Config) -> dict[str, int]:
    flat = flatten(config)
    return {**layer_sizes(flat), "Ht": flat["target_hidden_size"], "A": len(flat[AUX_LAYERS])}


def _has_vocab_map(config: Config) -> bool:
    """vLLM refuses d2t beside a whole vocabulary; every engine takes a missing one as the identity."""
    flat = flatten(config)
    return flat["draft_vocab_size"] != flat["vocab_size"]


def _check_aux_layers(contract: Contract, files: ModelFiles, section: str = "") -> None:
    """Engines assume three aux layers unless num_aux_hidden_states says otherwise."""
    key, count = f"{section}{AUX_COUNT}", _sizes(files.config)["A"]
    found = lookup(files.config, key)
    if (found if isinstance(found, int) else 3) != count:
        said = repr(found) if isinstance(found, int) else "nothing"
        raise broken(contract, f"config key {key}", f"{count}, the number of aux layers", said)


def _nested_config(config: Config) -> dict[str, Any]:
    """Return `eagle_config`, where SGLang and TensorRT-LLM look for some keys, made from the flat ones.

    SGLang counts layer outputs, so its ids are one lower; the others take theirs from the top level.
    """
    return {
        AUX_LAYERS: [k - 1 for k in config[AUX_LAYERS]],
        "use_aux_hidden_state": True,
        "norm_before_fc": config["norm_before_fc"],
    }


def _check_nested(contract: Contract, files: ModelFiles) -> None:
    found, expected = files.config["eagle_config"], _nested_config(files.config)
    if found != expected:
        raise broken(contract, "config key eagle_config", f"{expected}, the flat keys again", repr(found))


_CHAIN = {"proposal_type": "greedy", "speculative_tokens": 0, "verifier_accept_k": 1, "accept_tolerance": 0.0}
"""How speculators calls a chain that is accepted without loss."""


def _check_proposal(contract: Contract, files: ModelFiles) -> None:
    """vLLM drafts as many tokens as the first proposal method says."""
    methods = files.config["speculators_config"]["proposal_methods"]
    count = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    plain = [{**_CHAIN, "speculative_tokens": count}] if type(count) is int and count >= 1 else None
    if methods != plain:
        expected = "one greedy method, speculative_tokens at least 1, verifier_accept_k 1, accept_tolerance 0.0"
        raise broken(contract, "config key speculators_config.proposal_methods", expected, repr(methods))


def _check_window(contract: Contract, files: ModelFiles) -> None:
    """vLLM and speculators take the window in the layers that layer_types names, and in no others."""
    flat = flatten(files.config)
    expected = ["sliding_attention"] * flat["num_hidden_layers"] if "sliding_window" in flat else None
    if flat.get("layer_types") != expected:
        raise broken(contract, "config key layer_types", repr(expected), repr(flat.get("layer_types")))


def _tensors(layer: str, *, embedding_optional: bool) -> tuple[TensorRule, ...]:
    """The tensors, those of the first decoder layer under the prefix `layer`; later ones, which are plain, are called by
    their number in every engine that takes them."""
    return (
        TensorRule("fc.weight", ("H", "A*Ht")),
        TensorRule("fc_norm.{i}.weight", ("Ht",), when=lambda config: config["fc_norm"]),
        TensorRule("input_norm.weight", ("A*Ht",), when=lambda config: config["norm_before_fc"]),
        *llama_layer(layer, reads="2*H"),
        TensorRule(f"{layer}hidden_norm.weight", ("H",)),
        *llama_layer("layers.{m}."),
        TensorRule("norm.weight", ("H",)),
        TensorRule("lm_head.weight", ("W", "H")),
        TensorRule("d2t", ("W",), torch.int64, when=_has_vocab_map),
        TensorRule("t2d", ("V",), torch.bool, when=_has_vocab_map),
        TensorRule(EMBEDDING, ("V", "H"), optional=embedding_optional),
    )


_LAYER_KEYS = (
    *replace_keys(LLAMA_KEYS, "the first reads tokens, the others are plain", num_hidden_layers=None),
    KeyRule("sliding_window", int, "how many tokens a row sees", optional=True),
    KeyRule("layer_types", list, "in which layers", optional=True),
    KeyRule("attention_bias", bool, "biases do not load in llama.cpp", False),
    KeyRule("mlp_bias", bool, "biases do not load in llama.cpp", False),
    KeyRule("tie_word_embeddings", bool, "lm_head has rows of its own", False),
    KeyRule("torch_dtype", str, "the dtype of every float tensor"),
    KeyRule(AUX_COUNT, int, "A; engines assume 3", optional=True),
)
_HEAD_KEYS = (
    KeyRule("draft_vocab_size", int, "W; without it engines expect V rows in lm_head"),
    KeyRule("target_hidden_size", int, "Ht"),
    KeyRule(AUX_LAYERS, list, "top level; llama.cpp reads it nowhere else"),
    KeyRule("norm_before_residual", bool, "engines disagree about its default"),
    KeyRule("norm_before_fc", bool, "adds input_norm"),
    KeyRule("fc_norm", bool, "adds fc_norm"),
    KeyRule("norm_output", bool, "which state is fed back"),
)
_FORBIDDEN = {"bias": "it would add biases to the drafts", "quantization_config": "the weights are plain"}

# Flat EAGLE-3: vLLM, SGLang, TensorRT-LLM, llama.cpp. "midlayer." is the one prefix that all of them know:
# SGLang skips "layers.0." without a word.
EAGLE3 = Contract(
    name="eagle3",
    tensors=_tensors(FLAT_LAYER, embedding_optional=True),
    keys=(
        KeyRule("architectures", list, "how engines find the model class", ["LlamaForCausalLMEagle3"]),
        *_LAYER_KEYS,
        *_HEAD_KEYS,
        KeyRule("eagle_config", dict, "SGLang finds its layers there alone, TensorRT-LLM norm_before_fc"),
    ),
    sizes=_sizes,
    ranges={"i": "A", "m": "1:M"},
    forbidden=_FORBIDDEN,
    checks=(_check_aux_layers, _check_nested, _check_window),
)

# speculators: the package and vLLM, which starts the target that the directory names. The package knows only
# "layers.0." and leaves what it does not find uninitialised, the embeddings too (it looks for NaN there, and memory
# seldom holds any); vLLM knows both prefixes, and shares the target's embeddings where those in the file are the same.
EAGLE3_SPECULATORS = Contract(
    name="eagle3_speculators",
    tensors=_tensors(NATIVE_LAYER, embedding_optional=False),
    keys=(
        KeyRule("speculators_model_type", str, "how vLLM and speculators find the algorithm", "eagle3"),
        KeyRule("speculators_version", str, "the version of the format"),
        KeyRule("architectures", list, "the class that speculators loads", [SPECULATORS_CLASSES["eagle3"]]),
        *replace_keys(
            _HEAD_KEYS, "vLLM takes a missing one for true, speculators for false", norm_before_residual=None
        ),
        KeyRule(LAYER_SECTION, dict, "vLLM builds the layer from it"),
        *(replace(k, name=f"{LAYER_SECTION}.{k.name}") for k in _LAYER_KEYS),
        KeyRule("speculators_config.algorithm", str, "the algorithm once more", "eagle3"),
        KeyRule("speculators_config.default_proposal_method", str, "the only one there", "greedy"),
        KeyRule("speculators_config.proposal_methods", list, "vLLM drafts as many tokens as the first says"),
        KeyRule("speculators_config.verifier.name_or_path", str, "the target, which vLLM loads from there"),
        KeyRule("speculators_config.verifier.architectures", list, "the target's model class"),
    ),
    sizes=_sizes,
    ranges=EAGLE3.ranges,
    forbidden={
        **_FORBIDDEN,
        "model_type": "vLLM reads the layout as another one where it is there",
        AUX_COUNT: f"vLLM reads it in {LAYER_SECTION} alone",
    },
    checks=(partial(_check_aux_layers, section=f"{LAYER_SECTION}."), _check_proposal, _check_window),
)


def to_flat_eagle3(head: FusedHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the flat EAGLE-3 layout, the embeddings included."""
    tensors = _head_tensors(head, target, request)
    tensors = {name.replace(NATIVE_LAYER, FLAT_LAYER): value for name, value in tensors.items()}
    config = _flat_config(head, target, request.dtype)
    config["eagle_config"] = _nested_config(config)
    return ModelFiles(config, tensors, request.dtype)


def to_speculators(head: FusedHead, target: Target, request: ExportRequest, kind: str = "eagle3") -> ModelFiles:
    """Convert to the speculators layout, the embeddings included. kind: what the format calls the head.

    Raises UserError where the request does not say how many tokens to draft: the configuration names it.
    """
    K = request.num_speculative_tokens
    if K is None or K < 1:
        raise UserError(
            f"num_speculative_tokens is {K}: the layout {kind}_speculators tells the engine how many tokens to draft, "
            "so it must be at least 1."
        )
    flat, layer_names = _flat_config(head, target, request.dtype), {rule.name for rule in _LAYER_KEYS}
    config = {
        "architectures": [SPECULATORS_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        **{key: value for key, value in flat.items() if key not in {*layer_names, "architectures"}},
        LAYER_SECTION: {key: value for key, value in flat.items() if key in layer_names},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**_CHAIN, "speculative_tokens": K}],
            "verifier": {
                "name_or_path": target_reference(target),
                "architectures": target.identity.to_json()["architectures"],
            },
        },
    }
    return ModelFiles(config, _head_tensors(head, target, request), request.dtype)


def _flat_config(head: FusedHead, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of the flat EAGLE-3 layout; every key that engines have differing defaults for is there."""
    layer_ids = list(head.reads.layer_ids)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(head.config, dtype),
        "num_hidden_layers": len(head.layers),
        "draft_vocab_size": target.vocab_size if head.draft_vocab is None else len(head.draft_vocab),
        "target_hidden_size": target.hidden_size,
        AUX_LAYERS: layer_ids,
        **{flag: getattr(head.options, flag, False) for flag in FLAGS},
    }
    if head.window is not None:
        config |= {"sliding_window": head.window, "layer_types": ["sliding_attention"] * len(head.layers)}
    if len(layer_ids) != 3:
        config[AUX_COUNT] = len(layer_ids)
    return config


def _head_tensors(head: FusedHead, target: Target, request: ExportRequest) -> dict[str, Tensor]:
    """The head's tensors, and where its vocabulary is not the whole one the maps d2t (offsets) and t2d."""
    tensors = {n: value.detach().to(request.dtype) for n, value in head.state_dict().items() if n != "draft_vocab"}
    ids = head.draft_vocab
    if ids is None or len(ids) == target.vocab_size:
        return tensors
    marks = torch.zeros(target.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {**tensors, "d2t": vocab_offsets(ids), "t2d": marks}


def read_speculators(path: Path, kind: str, title: str) -> dict[str, Any]:
    """Return the configuration of a head of that kind in the speculators layout, its keys flat. Raises UserError for
    another kind, and where readers would take it differently."""
    config = read_config(path)
    if config.get("speculators_model_type") != kind or not isinstance(config.get(LAYER_SECTION), dict):
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
    **more: Any,
) -> Head:
    """Return the head of that kind described by the flat `config`, with the tensors in `path`. more: further fields of its
    options."""
    check_sizes(path, config, target, shapes=True)
    file, found = read_weights(path, target.device)
    tensors = {name.replace(FLAT_LAYER, NATIVE_LAYER): value for name, value in tidy(found, file, target).items()}
    draft_vocab = take_vocab(tensors, config.get("draft_vocab_size") or target.vocab_size, file, target)
    layer_ids = _layer_ids(path, config, target)
    switches = {flag: _switch(path, config, flag) for flag in FLAGS}
    nested = _switch(path, _nested(path, config), "norm_before_fc", switches["norm_before_fc"])
    if nested != switches["norm_before_fc"] and "norm_before_fc" in config:
        raise UserError(f"{path / CONFIG} says norm_before_fc twice, true and false, and engines differ: remove one.")
    switches["norm_before_fc"] = nested
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
        head = kind(chosen, read_layer(config), layer_ids, target.embedding, draft_vocab)
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


def _switch(path: Path, config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a switch; another value than true or false, such as the text "false", would count as on."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path / CONFIG} says {name} {value!r}: write true or false there, as the head was trained.")
    return default if value is None else value


def _layer_ids(path: Path, config: Mapping[str, Any], target: Target) -> tuple[int, ...]:
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
