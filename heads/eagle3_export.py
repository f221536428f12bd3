"""EAGLE-3 heads in and out of the layouts that engines read.

Shapes: H hidden, A aux layers, V target vocab, W draft vocab.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import WEIGHTS, describe_target, fill, read_config, read_tensors
from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.eagle3_layouts import FLAGS, LAYER_SECTION, flatten, proposal_method
from draftsmith.heads.eagle3_options import Eagle3Options
from draftsmith.heads.layer_config import LAYER_KEYS
from draftsmith.heads.target import Target

NATIVE_LAYER, FLAT_LAYER = "layers.0.", "midlayer."
SPECULATORS_VERSION = "0.9.0"
"""The version of the speculators package that the layout was held against."""


def to_flat_eagle3(head: Eagle3Head, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the flat EAGLE-3 layout, the embeddings included."""
    tensors = {name.replace(NATIVE_LAYER, FLAT_LAYER): value for name, value in _tensors(head, target, request).items()}
    return ModelFiles(flat_config(head, target, request.dtype), tensors, request.dtype)


def to_speculators(head: Eagle3Head, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the speculators layout, the embeddings included.

    Raises UserError where the request does not say how many tokens to draft: the configuration names it.
    """
    K = request.num_speculative_tokens
    if K is None or K < 1:
        raise UserError(
            f"num_speculative_tokens is {K}: the layout eagle3_speculators tells the engine how many tokens to draft, "
            "so it must be at least 1."
        )
    flat = flat_config(head, target, request.dtype)
    layer_keys = {"model_type", "num_hidden_layers", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias"}
    layer_keys |= {"tie_word_embeddings", "torch_dtype", "num_aux_hidden_states", *LAYER_KEYS}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **{key: value for key, value in flat.items() if key not in layer_keys | {"architectures"}},
        LAYER_SECTION: {key: value for key, value in flat.items() if key in layer_keys},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal_method(K)],
            "verifier": {
                "name_or_path": target_reference(target),
                "architectures": describe_target(target)["architectures"],
            },
        },
    }
    return ModelFiles(config, _tensors(head, target, request), request.dtype)


def target_reference(target: Target) -> str:
    """Return how an engine finds the target from wherever it is started: a folder's full path, or a Hub name."""
    return str(Path(target.path).resolve()) if Path(target.path).is_dir() else target.path


def flat_config(head: Eagle3Head, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of the flat EAGLE-3 layout; every key that engines have differing defaults for is there."""
    rope: dict[str, Any] = dict(head.config.rope_parameters)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **head.describe()["layer_config"],
        "num_hidden_layers": 1,
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": target.hidden_size,
        "rope_theta": float(rope["rope_theta"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(head.layer_ids),
        **{flag: getattr(head.options, flag) for flag in FLAGS},
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if len(head.layer_ids) != 3:
        config["num_aux_hidden_states"] = len(head.layer_ids)
    return config


def load_eagle3_directory(path: Path | str, target: Target) -> Eagle3Head:
    """Return the head in a flat EAGLE-3 directory, ours or another tool's, fp32, on the target's device.

    Reads the layer's tensors under `midlayer.` or `layers.0.`; a missing embedding is the target's. Raises UserError
    for anything missing or misshapen and for a head of another target's dimensions.
    """
    return _load(Path(path), read_config(Path(path)), target)


def load_speculators_directory(path: Path | str, target: Target) -> Eagle3Head:
    """Return the head in an EAGLE-3 directory of the speculators layout; otherwise as `load_eagle3_directory`."""
    config = read_config(Path(path))
    if config.get("speculators_model_type") != "eagle3" or not isinstance(config.get(LAYER_SECTION), dict):
        raise UserError(f"{path}/config.json is no EAGLE-3 head of speculators: give the directory of an export.")
    if "norm_before_residual" not in config:
        raise UserError(
            f"{path}/config.json lacks norm_before_residual, which vLLM takes for true and speculators for false: "
            "write there how the head was trained."
        )
    return _load(Path(path), flatten(config), target)


def _tensors(head: Eagle3Head, target: Target, request: ExportRequest) -> dict[str, Tensor]:
    """The head's tensors, and where its vocabulary is not the whole one the maps d2t (offsets) and t2d."""
    tensors = {n: value.detach().to(request.dtype) for n, value in head.state_dict().items() if n != "draft_vocab"}
    ids = head.draft_vocab
    if ids is None or len(ids) == target.vocab_size:
        return tensors
    marks = torch.zeros(target.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {**tensors, "d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": marks}


def _load(path: Path, config: Mapping[str, Any], target: Target) -> Eagle3Head:
    """The head described by the flat `config`, with the tensors in `path`."""
    tensors = read_tensors(path, target.device)
    _check_dimensions(path, config, target)
    tensors = {name.replace(FLAT_LAYER, NATIVE_LAYER): value for name, value in tensors.items() if name != "t2d"}
    draft_vocab = _draft_vocab(path, config, tensors.pop("d2t", None), target)
    layer = LlamaConfig.from_dict({**config, "vocab_size": target.vocab_size})
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or list(target.default_layer_ids())
    target.check_layer_ids(tuple(layer_ids))
    W = target.vocab_size if draft_vocab is None else len(draft_vocab)
    options = Eagle3Options(
        layer_ids=list(layer_ids), draft_vocab_size=W, **{flag: bool(config.get(flag, False)) for flag in FLAGS}
    )
    with torch.device(target.device):
        head = Eagle3Head(options, layer, layer_ids, target.embedding, draft_vocab)
    fill(head, tensors if draft_vocab is None else {**tensors, "draft_vocab": draft_vocab}, path / WEIGHTS)
    return head


def _check_dimensions(path: Path, config: Mapping[str, Any], target: Target) -> None:
    expected = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    for key, value in expected.items():
        if config.get(key) != value:
            raise UserError(
                f"{path}/config.json says {key} {config.get(key)}, but the target {target.path} has {value}: give the "
                "target this head was made for."
            )


def _draft_vocab(path: Path, config: Mapping[str, Any], d2t: Tensor | None, target: Target) -> Tensor | None:
    """Return the sorted target ids that `d2t` (offsets) stands for, None for the whole vocabulary."""
    W = config.get("draft_vocab_size") or target.vocab_size
    if d2t is None and target.vocab_size != W:
        raise UserError(f"{path} lacks the tensor d2t, but its draft vocabulary has {W} of {target.vocab_size} tokens.")
    if d2t is None or target.vocab_size == W:
        return None
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if len(ids) != W or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or not bool((ids.diff() > 0).all()):
        raise UserError(f"{path}: d2t does not hold {W} offsets of ascending target ids; export the head again.")
    return ids
