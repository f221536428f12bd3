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
from draftsmith.heads.block_base import BlockHead, Head
from draftsmith.heads.block_layouts import SECTION
from draftsmith.heads.block_options import check_block
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.contracts import ExportRequest, ModelFiles
from draftsmith.heads.dflash import DFlashHead, DFlashOptions
from draftsmith.heads.dspark import DSparkHead, DSparkOptions
from draftsmith.heads.eagle3_export import layer_keys
from draftsmith.heads.head_files import CONFIG, explain_config, read_config, read_weights
from draftsmith.heads.published import check_sizes, is_the_same, read_layer, tidy
from draftsmith.heads.target import Target

LM_HEAD, D2T = "lm_head.weight", "d2t"
_MARKOV = "markov_head.markov_w1.weight"
_NATIVE = ("draft_vocab", "temperatures")
"""Buffers that are no weights."""


def to_dflash(head: DFlashHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout of the published DFlash, the embeddings included."""
    config = {"architectures": ["DFlashDraftModel"], **_config(head, target, request)}
    return ModelFiles(config, _tensors(head, target, request), request.dtype)


def to_dspark(head: DSparkHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to the layout of the published DSpark, the embeddings included. The temperatures stand in the configuration,
    where no engine looks."""
    config: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], **_config(head, target, request)}
    config |= {
        "markov_rank": head.options.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": head.options.confidence_head,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    if head.options.confidence_head:
        config["confidence_temperatures"] = head.temperatures.tolist()
    return ModelFiles(config, _tensors(head, target, request), request.dtype)


def load_dflash_directory(path: Path | str, target: Target) -> DFlashHead:
    """Return the head in a directory of the DFlash layout, ours or another's, fp32, on the target's device.

    Raises UserError for anything missing or misshapen, for a head of another target, and for what is not computed here:
    causal or sliding attention, biases, a trained output projection or mask embedding.
    """
    path = Path(path)
    config = _read(path, target)
    if config.get("sample_from_anchor"):
        raise _other(path, "sample_from_anchor true, with which the first slot drafts too")
    return _load(path, config, target, DFlashHead, DFlashOptions(**_options(path, config, target)))


def load_dspark_directory(path: Path | str, target: Target) -> DSparkHead:
    """Return the head in a directory of the DSpark layout; otherwise as `load_dflash_directory`."""
    path = Path(path)
    config = _read(path, target)
    if config.get("sample_from_anchor") is False or config.get("markov_head_type", "vanilla") != "vanilla":
        raise _other(path, "a block whose first slot drafts nothing, or another Markov head than the vanilla one")
    confident = bool(config.get("enable_confidence_head", False))
    if confident and not config.get("confidence_head_with_markov", False):
        raise _other(path, "a confidence that does not read the token before")
    with explain_config(path, "DSpark head", "fetch the head again"):
        rank = int(config["markov_rank"])
    options = DSparkOptions(**_options(path, config, target), markov_rank=rank, confidence_head=confident)
    head = _load(path, config, target, DSparkHead, options)
    if confident and (found := config.get("confidence_temperatures")) is not None:
        with explain_config(path, "list of temperatures", "fetch the head again"):
            temperatures = torch.tensor(found, dtype=torch.float32)
            if temperatures.shape != head.temperatures.shape or not bool((temperatures > 0).all()):
                raise ValueError(f"{len(head.temperatures)} numbers above 0 are needed, one for each slot")
            head.temperatures.copy_(temperatures)
    return head


def _config(head: BlockHead, target: Target, request: ExportRequest) -> dict[str, Any]:
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
            "target_layer_ids": [k - 1 for k in head.layer_ids],
        },
    }


def _tensors(head: BlockHead, target: Target, request: ExportRequest) -> dict[str, Tensor]:
    """The head's tensors; where its vocabulary is not the whole one, the target's rows of it and the map d2t (offsets)."""
    found = {n: value.detach().to(request.dtype) for n, value in head.state_dict().items() if n not in _NATIVE}
    ids = head.draft_vocab
    if ids is None or len(ids) == target.vocab_size:
        return found
    rows = target.head.weight[ids].to(request.dtype)
    return {**found, LM_HEAD: rows, D2T: ids - torch.arange(len(ids), device=ids.device)}


def _read(path: Path, target: Target) -> dict[str, Any]:
    """Return the configuration. Raises UserError for one of another target's sizes or of other layers."""
    config = read_config(path)
    if "speculators_model_type" in config:
        raise _other(path, "the format of speculators")
    check_sizes(path, config, target, shapes=True)
    section = config.get(SECTION)
    section = section if isinstance(section, dict) else {}
    with explain_config(path, "list of layer_types", "fetch the head again"):
        kinds = set(config.get("layer_types") or ["full_attention"])
    causal = config["is_causal"] if config.get("is_causal") is not None else section.get("causal")
    if causal or kinds != {"full_attention"} or section.get("use_swa") or config.get("attention_bias"):
        raise _other(path, "causal or sliding attention, or biases")
    if unknown := sorted(section.keys() - {"mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa"}):
        raise _other(path, f"{SECTION}.{unknown[0]}")
    if (path / "mask_embedding.pt").is_file():
        raise _other(path, "an embedding of its own for the mask")
    top = {key: config[key] for key in ("mask_token_id", "target_layer_ids", "block_size") if key in config}
    return {**config, **top, **section}


def _options(path: Path, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
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


def _load(path: Path, config: Mapping[str, Any], target: Target, kind: type[Head], options: Any) -> Head:
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
        raise _other(path, "an output projection that was trained with it")


def _other(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is a block drafter with {what}, which is not computed here: serve it with the engine that it was made for, or "
        "train one."
    )
