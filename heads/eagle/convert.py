"""EAGLE-3 heads in and out of the layouts that engines read.

Shapes: H draft hidden, A aux layers, V target vocab, W draft vocab. Heads of P-EAGLE go the same ways (heads/peagle/formats.py).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.eagle.contracts import FLAGS, nested_config, proposal_method
from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.heads.eagle.options import DraftShape
from draftsmith.heads.files import CONFIG, explain_config, read_config, read_weights
from draftsmith.heads.formats.contracts import LAYER_SECTION, ExportRequest, ModelFiles, flatten, target_reference
from draftsmith.heads.formats.published import check_sizes, layer_keys, read_layer, tidy
from draftsmith.heads.layers.config import LAYER_KEYS
from draftsmith.heads.target.target import Target

WINDOW_KEYS = ("sliding_window", "layer_types")
NATIVE_LAYER, FLAT_LAYER = "layers.0.", "midlayer."
SPECULATORS_VERSION = "0.9.0"
"""The version of the speculators package that the layout was held against."""


def to_flat_eagle3(head: FusedHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the flat EAGLE-3 layout, the embeddings included."""
    tensors = {name.replace(NATIVE_LAYER, FLAT_LAYER): value for name, value in _tensors(head, target, request).items()}
    config = flat_config(head, target, request.dtype)
    config["eagle_config"] = nested_config(config)
    return ModelFiles(config, tensors, request.dtype)


def to_speculators(
    head: FusedHead,
    target: Target,
    request: ExportRequest,
    kind: str = "eagle3",
    architecture: str = "Eagle3DraftModel",
) -> ModelFiles:
    """Convert to the speculators layout, the embeddings included. kind, architecture: what the format calls the head.

    Raises UserError where the request does not say how many tokens to draft: the configuration names it.
    """
    K = request.num_speculative_tokens
    if K is None or K < 1:
        raise UserError(
            f"num_speculative_tokens is {K}: the layout {kind}_speculators tells the engine how many tokens to draft, "
            "so it must be at least 1."
        )
    flat = flat_config(head, target, request.dtype)
    layer_keys = {"model_type", "num_hidden_layers", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias"}
    layer_keys |= {"tie_word_embeddings", "torch_dtype", "num_aux_hidden_states", *LAYER_KEYS, *WINDOW_KEYS}
    config = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        **{key: value for key, value in flat.items() if key not in layer_keys | {"architectures"}},
        LAYER_SECTION: {key: value for key, value in flat.items() if key in layer_keys},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal_method(K)],
            "verifier": {
                "name_or_path": target_reference(target),
                "architectures": target.identity.to_json()["architectures"],
            },
        },
    }
    return ModelFiles(config, _tensors(head, target, request), request.dtype)


def flat_config(head: FusedHead, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of the flat EAGLE-3 layout; every key that engines have differing defaults for is there."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(head.config, dtype),
        "num_hidden_layers": len(head.layers),
        "draft_vocab_size": target.vocab_size if head.draft_vocab is None else len(head.draft_vocab),
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.reads.layer_ids),
        **{flag: getattr(head.options, flag, False) for flag in FLAGS},
    }
    if head.window is not None:
        config |= {"sliding_window": head.window, "layer_types": ["sliding_attention"] * len(head.layers)}
    if len(head.reads.layer_ids) != 3:
        config["num_aux_hidden_states"] = len(head.reads.layer_ids)
    return config


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


def _tensors(head: FusedHead, target: Target, request: ExportRequest) -> dict[str, Tensor]:
    """The head's tensors, and where its vocabulary is not the whole one the maps d2t (offsets) and t2d."""
    tensors = {n: value.detach().to(request.dtype) for n, value in head.state_dict().items() if n != "draft_vocab"}
    ids = head.draft_vocab
    if ids is None or len(ids) == target.vocab_size:
        return tensors
    marks = torch.zeros(target.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {**tensors, "d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": marks}


Head = TypeVar("Head", bound=FusedHead)


def read_fused(
    path: Path,
    config: Mapping[str, Any],
    target: Target,
    kind: type[Head],
    options: Callable[..., DraftShape],
    flags: Sequence[str],
    **more: Any,
) -> Head:
    """Return the head of that kind described by the flat `config`, with the tensors in `path`.

    flags: the switches that its options have. more: further fields of them.
    """
    check_sizes(path, config, target, shapes=True)
    file, found = read_weights(path, target.device)
    tensors = {name.replace(FLAT_LAYER, NATIVE_LAYER): value for name, value in tidy(found, file, target).items()}
    draft_vocab = _draft_vocab(file, config, tensors.pop("d2t", None), tensors.pop("t2d", None), target)
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
        **{flag: switches[flag] for flag in flags},
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
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not layer_ids:
        layer_ids, held = target.default_layer_ids(), nested.get("eagle_aux_hidden_state_layer_ids")
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


def _draft_vocab(
    file: Path, config: Mapping[str, Any], d2t: Tensor | None, t2d: Tensor | None, target: Target
) -> Tensor | None:
    """Return the sorted target ids that `d2t` (offsets) stands for, None for the whole vocabulary.

    t2d, where it is there, marks the same ids: absolute ids in place of offsets may be ascending too.
    """
    V = target.vocab_size
    W = config.get("draft_vocab_size") or V
    if d2t is None and W != V:
        raise UserError(
            f"{file} lacks the tensor d2t, but its draft vocabulary has {W!r} of {V} tokens: fetch the whole head."
        )
    if d2t is None:
        return None
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    fits = (
        not ids.is_floating_point()
        and len(ids) == W
        and int(ids.min()) >= 0
        and int(ids.max()) < V
        and bool((ids.diff() > 0).all())
    )
    if not fits or (t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids)):
        raise UserError(
            f"{file}: d2t does not hold {W} offsets of ascending target ids; fetch or export the head again."
        )
    return None if W == V else ids
