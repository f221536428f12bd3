"""What block drafters have of the layouts of their published code, which vLLM reads: schema and reading."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.block.base import Head
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.files import explain_config, read_config, read_weights
from draftsmith.heads.formats.layout import Rule, Served, biased_target, changed_embedding, more_than_a_matrix
from draftsmith.heads.formats.llama_cpp import LLAMA_CPP_SILENT, llama_cpp_yarn, start_llama_cpp
from draftsmith.heads.formats.published import (
    check_mask_token,
    check_sizes,
    is_the_same,
    read_layer,
    take_vocab,
    tidy,
    vocab_offsets,
)
from draftsmith.heads.formats.schema import (
    LLAMA_KEYS,
    Config,
    Export,
    ModelFiles,
    Schema,
    TensorRow,
    draft_vocab_size,
    llama_layer,
)
from draftsmith.target.target import Target

SECTION = "dflash_config"
"""Where engines find the mask token and the layers; ids there are those of layer outputs, one lower than ours."""


_NEUTRAL = {
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
    "input_embedding_scale": 1.0,
    "add_swa_attention_sink_bias": False,
}
"""Keys by which an engine computes published drafters otherwise, with the value that changes nothing."""
LM_HEAD, D2T, CAUSAL = "lm_head.weight", "d2t", "causal_head"
_NATIVE = ("draft_vocab", "temperatures")
"""Buffers that are no weights."""


class BlockSchema(Schema):
    """A layout of a block drafter. Where the vocabulary of the head is not the whole one, it has the target's rows of it and the map d2t
    (offsets): with the whole vocabulary engines take the target's projection, a part of it they cannot cut out."""

    def head_tensors(self, export: Export) -> dict[str, Tensor]:
        tensors = {name: value for name, value in export.head.state_dict().items() if name not in _NATIVE}
        ids = export.head.draft_vocab
        if ids is None or len(ids) == export.target.vocab_size:
            return tensors
        return {**tensors, LM_HEAD: export.target.head.weight[ids], D2T: vocab_offsets(ids)}


def _reduced(config: Config) -> bool:
    return config["draft_vocab_size"] != config["vocab_size"]


_TENSORS = (
    TensorRow("fc.weight"),
    TensorRow("hidden_norm.weight"),
    *llama_layer("layers.{m}."),
    TensorRow("layers.{m}.self_attn.q_norm.weight"),
    TensorRow("layers.{m}.self_attn.k_norm.weight"),
    TensorRow("norm.weight"),
    TensorRow(LM_HEAD, when=_reduced),
    TensorRow(D2T, dtype=torch.int64, when=_reduced),
    TensorRow(EMBEDDING, optional=True),
)
_SECTION_KEYS = {
    "mask_token_id": attrgetter("head.options.mask_token_id"),
    "target_layer_ids": lambda export: [k - 1 for k in export.head.reads.layer_ids],
}
_KEYS = {
    **{key: value for key, value in LLAMA_KEYS.items() if key != "mlp_bias"},
    "model_type": "qwen3",  # the layers are Qwen3's, with norms of queries and keys
    "num_hidden_layers": attrgetter("head.options.num_layers"),
    "block_size": attrgetter("head.options.block_size"),  # engines draft no more
    "draft_vocab_size": draft_vocab_size,
}


def option_keys(*names: str) -> dict[str, Any]:
    """Return keys of a configuration that are options of the head."""
    return {name: attrgetter(f"head.options.{name}") for name in names}


def block_schema(
    name: str,
    architecture: str,
    tensors: Iterable[str | TensorRow] = (),
    keys: Mapping[str, Any] | None = None,
    section: Mapping[str, Any] | None = None,
) -> BlockSchema:
    """Return the schema of a published layout. architecture: what it calls the model class; tensors, keys: its further ones; section:
    further keys of `SECTION`."""
    rows = (TensorRow(one) if isinstance(one, str) else one for one in tensors)
    own = {"architectures": [architecture], **_KEYS, SECTION: {**_SECTION_KEYS, **(section or {})}, **(keys or {})}
    return BlockSchema(name, (*_TENSORS, *rows), own)


def for_llama_cpp(schema: BlockSchema, *without: str) -> BlockSchema:
    """Return what of a layout llama.cpp takes. It drafts through the embeddings of a draft that has them, where that has no
    projection of its own. without: further tensors that it does not know."""
    tensors = tuple(row for row in schema.tensors if row.name not in (EMBEDDING, *without))
    return replace(schema, name=f"{schema.name}_llama_cpp", tensors=tensors)


def read_block_config(
    path: Path, target: Target, *more: str, sliding: bool = False, causal: bool = False, from_anchor: bool = False
) -> dict[str, Any]:
    """Return the configuration. more: further keys that its section may have. sliding: whether layers may see a window; with one,
    `sliding_window` is its length. causal: whether a slot sees no slot behind it. from_anchor: whether the first slot may draft. Raises UserError for a configuration of another target's sizes or of other layers."""
    config = read_config(path)
    if "speculators_model_type" in config:
        raise not_computed(path, "the format of speculators")
    check_sizes(path, config, target, shapes=True)
    section = config.get(SECTION)
    section = section if isinstance(section, dict) else {}
    with explain_config(path, "list of layer_types", "fetch the head again"):
        kinds, length = _attention(config)
    said = config["is_causal"] if config.get("is_causal") is not None else section.get("causal", section.get(CAUSAL))
    windowed = bool(section.get("use_swa")) or kinds == {"sliding_attention"}
    if windowed and said is None:
        said = True  # engines take a window alone for causal
    full = kinds == {"full_attention"} and not windowed
    if windowed and (len(kinds) > 1 or config.get("use_sliding_window") is False):
        raise not_computed(path, "layers some of which see a window, which engines take in different ways")
    if bool(said) != causal or not (full or (windowed and sliding)) or config.get("attention_bias"):
        kind = "bidirectional or sliding" if causal else "causal or sliding"
        raise not_computed(path, f"{kind} attention, or biases")
    known = {"mask_token_id", "target_layer_ids", "block_size", "causal", CAUSAL, "use_swa", *more}
    if unknown := sorted(section.keys() - known):
        raise not_computed(path, f"{SECTION}.{unknown[0]}")
    if config.get("sample_from_anchor") and not from_anchor:
        raise not_computed(path, "sample_from_anchor true, with which the first slot drafts too")
    if (path / "mask_embedding.pt").is_file():
        raise not_computed(path, "an embedding of its own for the mask")
    for key, neutral in _NEUTRAL.items():
        if config.get(key, neutral) != neutral:
            raise not_computed(path, f"{key} {config[key]!r}")
    top = {key: config[key] for key in ("mask_token_id", "target_layer_ids", "block_size") if key in config}
    window = section.get("swa_window_size", length) if windowed else None
    if windowed and window is None:
        raise not_computed(path, "a sliding attention without a length")
    return {**config, **top, **section, "sliding_window": window}


def _attention(config: Mapping[str, Any]) -> tuple[set[str], Any]:
    """Return the kinds of attention that the layers have and the length of a window; what layer_types leaves out is what Qwen3's
    configuration makes of the other keys, as engines read drafters by it."""
    if config.get("layer_types") or not config.get("use_sliding_window"):
        return set(config.get("layer_types") or ["full_attention"]), config.get("sliding_window")
    keys = ("num_hidden_layers", "use_sliding_window", "sliding_window", "max_window_layers")
    derived = Qwen3Config(**{key: config[key] for key in keys if key in config})
    return set(derived.layer_types or ()), derived.sliding_window


def read_sizes(path: Path, config: Mapping[str, Any], title: str, *keys: str) -> dict[str, Any]:
    """Return whole numbers of a configuration. Raises UserError where one of them is none. title: of the method."""
    with explain_config(path, f"{title} head", "fetch the head again"):
        return {key: operator.index(config[key]) for key in keys}


def _options(path: Path, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return the options that both block drafters have, from a configuration that was read."""
    with explain_config(path, "block drafter", "fetch the head again"):
        layer_ids = [k + 1 for k in config["target_layer_ids"]]
        token, size = config["mask_token_id"], operator.index(config.get("block_size", 16))
    target.check_layer_ids(tuple(layer_ids))
    check_mask_token(path, token, target)
    layers = config.get("num_hidden_layers", 1)
    return {"layer_ids": layer_ids, "mask_token_id": token, "block_size": size, "num_layers": layers}


def load_block(path: Path, config: Mapping[str, Any], target: Target, kind: type[Head], **more: Any) -> Head:
    """Return the head of that kind with the tensors in the folder `path`. more: options that not all block drafters have."""
    options = kind.options_class(**_options(path, config, target), **more)
    file, stored = read_weights(path, target.device)
    tensors = tidy(stored, file, target)
    vocab = take_vocab(tensors, config.get("draft_vocab_size"), file, target)
    kind.check(options, target, target.vocab_size if vocab is None else len(vocab))
    held, own = tensors.pop(LM_HEAD, None), target.head.weight if vocab is None else target.head.weight[vocab]
    if held is not None and not is_the_same(held, own):
        raise not_computed(path, "an output projection that was trained with it")
    with explain_config(path, "Qwen3 layer", "fetch the head again"), torch.device(target.device):
        head = kind(options, read_layer(config), target, options.layer_ids or (), vocab)
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
_BIASED, _BARE = "a target whose output projection has a bias", "takes the bare matrix for the drafts"
MEASURE_ALONE = "train it with draftsmith train and export.layout null, and measure it with draftsmith evaluate"


def has_own_vocabulary(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the head drafts among fewer tokens than the target's."""
    return _reduced(files.config)


def whole_vocabulary(title: str, why: str) -> Rule:
    """Return the rule of engines that draft among all of the target's tokens."""
    instead = "train with the whole vocabulary (head.draft_vocab_size null)"
    return Rule(f"a draft vocabulary of its own, for {title}", why, instead, has_own_vocabulary)


def biased_projection(title: str) -> Rule:
    """Return the rule of engines that draft with the bare matrix too, but take no more of the logits than which token is likeliest,
    unless they are told to sample: a scale or a softcap changes nothing of that."""
    return Rule(f"{_BIASED}, for {title}", _BARE, MEASURE_ALONE, biased_target)


def no_embeddings(title: str) -> Rule:
    """Return the rule of SGLang, which does not start with the embeddings among the layers."""
    return Rule(
        f"layer 0 among head.layer_ids, for {title}",
        "counts layer outputs, and the embeddings are none",
        "train with other layers",
        lambda files, target, head: 0 in head.reads.layer_ids,
    )


def own_embeddings(title: str, instead: str) -> Rule:
    """Return the rule of engines that draft through the target's input embeddings, whatever the head has."""
    why = "takes the target's in silence"
    return Rule(f"input embeddings of its own, for {title}", why, instead, changed_embedding)


def bare_matrix(title: str) -> Rule:
    """Return the rule of engines that draft with the bare matrix of the target's output projection."""
    return Rule(f"{_BIASED}, a scale or a softcap, for {title}", _BARE, MEASURE_ALONE, more_than_a_matrix)


_SHORTER = "With fewer tokens than the trained block has it fills in a shorter one, which accepts less."


def served_by_llama_cpp(
    method: str,
    title: str,
    rules: tuple[Rule, ...] = (),
    caveats: tuple[str, ...] = (),
    *,
    kind: str = "",
    shorter: str = _SHORTER,
    ends: Rule | None = None,
) -> Served:
    """Return how llama.cpp takes block drafters, with further rules and caveats for heads of that method. kind: what it calls the
    method, where that differs. shorter: the caveat on shorter blocks. ends: the rule on output projections, in place of `bare_matrix`."""
    # Its converter of block drafters writes few kinds.
    scaled = Rule(
        f"a target with another RoPE scaling than linear or YaRN, for {title}",
        "leaves the scaling out where it converts this draft, in silence",
        f"export the layout {method} for vLLM",
        lambda files, target, head: files.config["rope_parameters"]["rope_type"] not in ("default", "linear", "yarn"),
    )
    return Served(
        start_llama_cpp(f"draft-{kind or method}"),
        rules=(
            *rules,
            scaled,
            llama_cpp_yarn(title, f"export the layout {method} for vLLM"),
            own_embeddings(title, f"export the layout {method} for vLLM, which keeps them"),
            ends or bare_matrix(title),
        ),
        caveats=(f"{LLAMA_CPP_SILENT} {shorter}", *caveats),
        needs="states",
    )
