"""What DFlash and DSpark have of the layouts of their published code, which vLLM reads: contract, and conversion both ways.

Symbols in shapes: those of a Llama layer (LLAMA_KEYS); W draft vocab, A aux layers, M decoder layers, r rank of DSpark's bias.
"""

import operator
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.block.base import BlockHead, Head
from draftsmith.heads.block.options import check_block
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.files import explain_config, read_config, read_weights
from draftsmith.heads.formats.contracts import (
    LLAMA_KEYS,
    Config,
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    layer_sizes,
    llama_layer,
    replace_keys,
)
from draftsmith.heads.formats.engines import LLAMA_CPP_SILENT, start_llama_cpp
from draftsmith.heads.formats.layout import Rule, Served, more_than_a_matrix
from draftsmith.heads.formats.published import (
    check_mask_token,
    check_sizes,
    is_the_same,
    layer_keys,
    read_layer,
    take_vocab,
    tidy,
    vocab_offsets,
)
from draftsmith.target.target import Target

SECTION = "dflash_config"
"""Where engines find the mask token and the layers; ids there are those of layer outputs, one lower than ours."""


LM_HEAD, D2T = "lm_head.weight", "d2t"
_NATIVE = ("draft_vocab", "temperatures")
"""Buffers that are no weights."""


def _sizes(config: Config) -> dict[str, int]:
    return {
        **layer_sizes(config),
        "A": len(config[SECTION]["target_layer_ids"]),
        "r": config.get("markov_rank", 0),
        "H+r": config["hidden_size"] + config.get("markov_rank", 0),
    }


def _reduced(config: Config) -> bool:
    return config["draft_vocab_size"] != config["vocab_size"]


def _check_section(contract: Contract, files: ModelFiles) -> None:
    section, V = files.config[SECTION], files.config["vocab_size"]
    token, layers = section["mask_token_id"], section["target_layer_ids"]
    if type(token) is not int or not 0 <= token < V:
        raise broken(contract, f"config key {SECTION}.mask_token_id", f"a token below {V}", repr(token))
    if not layers or layers != sorted(set(layers)) or layers[0] < -1:
        raise broken(contract, f"config key {SECTION}.target_layer_ids", "ascending layers from -1", repr(layers))


_TENSORS = (
    TensorRule("fc.weight", ("H", "A*H")),
    TensorRule("hidden_norm.weight", ("H",)),
    *llama_layer("layers.{m}."),
    TensorRule("layers.{m}.self_attn.q_norm.weight", ("D",)),
    TensorRule("layers.{m}.self_attn.k_norm.weight", ("D",)),
    TensorRule("norm.weight", ("H",)),
    # With the whole vocabulary engines take the target's; a part of it they cannot cut out.
    TensorRule(LM_HEAD, ("W", "H"), when=_reduced),
    TensorRule(D2T, ("W",), torch.int64, when=_reduced),
    TensorRule(EMBEDDING, ("V", "H"), optional=True),
)
_LAYER_KEYS = replace_keys(LLAMA_KEYS, "the layers are Qwen3's, with norms of queries and keys", model_type="qwen3")
_KEYS = (
    *replace_keys(_LAYER_KEYS, "M", num_hidden_layers=None),
    KeyRule("draft_vocab_size", int, "W"),
    KeyRule("block_size", int, "S: engines draft no more"),
    KeyRule("attention_bias", bool, "there are no biases", False),
    KeyRule("tie_word_embeddings", bool, "the output projection is the target's", False),
    KeyRule("torch_dtype", str, "the dtype of every float tensor"),
    KeyRule(SECTION, dict, "mask token and layers"),
    KeyRule(f"{SECTION}.mask_token_id", int, "what fills a block"),
    KeyRule(f"{SECTION}.target_layer_ids", list, "layer outputs, one lower than ours"),
)


def block_contract(
    name: str, architecture: str, tensors: tuple[TensorRule, ...] = (), keys: tuple[KeyRule, ...] = ()
) -> Contract:
    """Return the contract of a published layout. architecture: what it calls the model class; tensors, keys: its further ones."""
    return Contract(
        name=name,
        tensors=(*_TENSORS, *tensors),
        keys=(KeyRule("architectures", list, "how engines find the model class", [architecture]), *_KEYS, *keys),
        sizes=_sizes,
        ranges={"m": "M"},
        forbidden={"quantization_config": "the weights are plain", "is_causal": "blocks see themselves whole"},
        checks=(_check_section,),
    )


def for_llama_cpp(contract: Contract, *without: str) -> Contract:
    """Return what of a contract llama.cpp takes. It drafts through the embeddings of a draft that has them, where that has no
    projection of its own. without: further tensors that it does not know."""
    tensors = tuple(rule for rule in contract.tensors if rule.name not in (EMBEDDING, *without))
    return replace(contract, name=f"{contract.name}_llama_cpp", tensors=tensors)


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
    return {**found, LM_HEAD: rows, D2T: vocab_offsets(ids)}


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
    check_mask_token(path, token, target)
    layers = config.get("num_hidden_layers", 1)
    return {"layer_ids": layer_ids, "mask_token_id": token, "block_size": size, "num_layers": layers}


def load_block(path: Path, config: Mapping[str, Any], target: Target, kind: type[Head], options: Any) -> Head:
    """Return the head of that kind with the tensors in the folder `path`."""
    check_block(options.block_size, target.context_length, target.path)
    file, found = read_weights(path, target.device)
    tensors = tidy(found, file, target)
    vocab = take_vocab(tensors, config.get("draft_vocab_size"), file, target)
    held, own = tensors.pop(LM_HEAD, None), target.head.weight if vocab is None else target.head.weight[vocab]
    if held is not None and (held.shape != own.shape or not is_the_same(held, own)):
        raise not_computed(path, "an output projection that was trained with it")
    with explain_config(path, "Qwen3 layer", "fetch the head again"), torch.device(target.device):
        head = kind(options, read_layer(config), options.layer_ids, target.embedding, target.head, vocab)
    kept = {name: value for name, value in head.state_dict().items() if name in _NATIVE}
    fill(head, {**tensors, **kept}, file, remedy="fetch or export it again")
    return head


def not_computed(path: Path, what: str) -> UserError:
    """Return the sentence for a block drafter with something that draftsmith does not compute."""
    return UserError(
        f"{path} is a block drafter with {what}, which is not computed here: serve it with the engine that it was made for, or "
        "train one."
    )


BLOCK_LENGTH_VLLM = (
    "The number of tokens is that of the trained block: with another, vLLM fills in a block of another length, which accepts "
    "less."
)
MEASURE_ALONE = "train it with draftsmith train and export.layout null, and measure it with draftsmith evaluate"


def bare_matrix(title: str) -> Rule:
    """Return the rule of engines that draft with the bare matrix of the target's output projection."""
    return Rule(
        f"a target whose output projection has a bias, a scale or a softcap, for {title}",
        "takes the bare matrix for the drafts",
        MEASURE_ALONE,
        more_than_a_matrix,
    )


def served_by_llama_cpp(method: str, title: str, rules: tuple[Rule, ...], caveats: tuple[str, ...]) -> Served:
    """Return how llama.cpp takes block drafters, with further rules and caveats for heads of that method."""
    # Its converter of block drafters writes few kinds.
    scaled = Rule(
        f"a target with another RoPE scaling than linear or YaRN, for {title}",
        "leaves the scaling out where it converts this draft, in silence",
        f"export the layout {method} for vLLM",
        lambda files, target, head: files.config["rope_parameters"]["rope_type"] not in ("default", "linear", "yarn"),
    )
    length = f"{LLAMA_CPP_SILENT} With fewer tokens than the trained block has it fills in a shorter one, which accepts less."
    return Served(
        start_llama_cpp(f"draft-{method}"),
        rules=(*rules, scaled, bare_matrix(title)),
        caveats=(length, *caveats),
        needs="states",
    )
