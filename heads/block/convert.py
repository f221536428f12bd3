"""DFlash and DSpark heads in and out of the layouts that engines read.

Shapes: H hidden, A aux layers, V target vocab, W draft vocab, S slots.
"""

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.block.base import BlockHead, Head
from draftsmith.heads.block.contracts import SECTION
from draftsmith.heads.block.options import check_block
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.files import CONFIG, explain_config, read_config, read_weights
from draftsmith.heads.formats.contracts import ExportRequest
from draftsmith.heads.formats.published import check_sizes, is_the_same, layer_keys, read_layer, tidy
from draftsmith.heads.target.target import Target

LM_HEAD, D2T = "lm_head.weight", "d2t"
_MARKOV = "markov_head.markov_w1.weight"
_NATIVE = ("draft_vocab", "temperatures")
"""Buffers that are no weights."""


def block_config(head: BlockHead, target: Target, request: ExportRequest) -> dict[str, Any]:
    """The keys that both have."""
    keys = layer_keys(head.config, request.dtype)
    del keys["mlp_bias"]
    return {
        **keys,
        "model_type": "qwen3",
        "num_hidden_layers": head.options.num_layers,
        "block_size": head.options.block_size,
        "draft_vocab_size": target.vocab_size if head.draft_vocab is None else len(head.draft_vocab),
        SECTION: {
            "mask_token_id": head.options.mask_token_id,
            "target_layer_ids": [k - 1 for k in head.reads.layer_ids],
        },
    }


def block_tensors(head: BlockHead, target: Target, request: ExportRequest) -> dict[str, Tensor]:
    """The head's tensors; where its vocabulary is not the whole one, the target's rows of it and the map d2t (offsets)."""
    found = {n: value.detach().to(request.dtype) for n, value in head.state_dict().items() if n not in _NATIVE}
    ids = head.draft_vocab
    if ids is None or len(ids) == target.vocab_size:
        return found
    rows = target.head.weight[ids].to(request.dtype)
    return {**found, LM_HEAD: rows, D2T: ids - torch.arange(len(ids), device=ids.device)}


def read_block_config(path: Path, target: Target) -> dict[str, Any]:
    """Return the configuration. Raises UserError for one of another target's sizes or of other layers."""
    config = read_config(path)
    if "speculators_model_type" in config:
        raise not_computed(path, "the format of speculators")
    check_sizes(path, config, target, shapes=True)
    section = config.get(SECTION)
    section = section if isinstance(section, dict) else {}
    with explain_config(path, "list of layer_types", "fetch the head again"):
        kinds = set(config.get("layer_types") or ["full_attention"])
    causal = config["is_causal"] if config.get("is_causal") is not None else section.get("causal")
    if causal or kinds != {"full_attention"} or section.get("use_swa") or config.get("attention_bias"):
        raise not_computed(path, "causal or sliding attention, or biases")
    if unknown := sorted(section.keys() - {"mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa"}):
        raise not_computed(path, f"{SECTION}.{unknown[0]}")
    if (path / "mask_embedding.pt").is_file():
        raise not_computed(path, "an embedding of its own for the mask")
    top = {key: config[key] for key in ("mask_token_id", "target_layer_ids", "block_size") if key in config}
    return {**config, **top, **section}


def block_options(path: Path, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return the options that both block drafters have, from a configuration that was read."""
    with explain_config(path, "block drafter", "fetch the head again"):
        layer_ids = [k + 1 for k in config["target_layer_ids"]]
        token, size = config["mask_token_id"], operator.index(config.get("block_size", 16))
    target.check_layer_ids(tuple(layer_ids))
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise UserError(
            f"{path / CONFIG} says mask_token_id {token!r}, but the target has tokens 0 to {target.vocab_size - 1}: write "
            "there the token that the head was trained with."
        )
    layers = config.get("num_hidden_layers", 1)
    return {"layer_ids": layer_ids, "mask_token_id": token, "block_size": size, "num_layers": layers}


def load_block(path: Path, config: Mapping[str, Any], target: Target, kind: type[Head], options: Any) -> Head:
    """Return the head of that kind with the tensors in the folder `path`."""
    check_block(options.block_size, target.context_length, target.path)
    file, found = read_weights(path, target.device)
    tensors = tidy(found, file, target)
    vocab = _draft_vocab(file, tensors.pop(D2T, None), target)
    tensors.pop("t2d", None)
    _check_projection(path, tensors.pop(LM_HEAD, None), vocab, target)
    with explain_config(path, "Qwen3 layer", "fetch the head again"), torch.device(target.device):
        head = kind(options, read_layer(config), options.layer_ids, target.embedding, target.head, vocab)
    kept = {name: value for name, value in head.state_dict().items() if name in _NATIVE}
    fill(head, {**tensors, **kept}, file, remedy="fetch or export it again")
    return head


def _draft_vocab(file: Path, d2t: Tensor | None, target: Target) -> Tensor | None:
    """Return the sorted target ids that `d2t` (offsets) stands for, None for the whole vocabulary."""
    if d2t is None:
        return None
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    inside = not ids.is_floating_point() and int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size
    if not inside or not bool((ids.diff() > 0).all()):
        raise UserError(f"{file}: d2t does not hold offsets of ascending target ids; fetch or export the head again.")
    return None if len(ids) == target.vocab_size else ids


def _check_projection(path: Path, held: Tensor | None, vocab: Tensor | None, target: Target) -> None:
    """The heads of draftsmith use the target's own output projection."""
    if held is None:
        return
    own = target.head.weight if vocab is None else target.head.weight[vocab]
    if held.shape != own.shape or not is_the_same(held, own):
        raise not_computed(path, "an output projection that was trained with it")


def not_computed(path: Path, what: str) -> UserError:
    """Return the sentence for a block drafter with something that draftsmith does not compute."""
    return UserError(
        f"{path} is a block drafter with {what}, which is not computed here: serve it with the engine that it was made for, or "
        "train one."
    )
