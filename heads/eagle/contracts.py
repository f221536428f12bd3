"""The contracts of the EAGLE-3 layouts: the flat one, what of it llama.cpp serves, and that of speculators.

Symbols in shapes: H draft hidden, Ht target hidden, V target vocab, W draft vocab, A aux layers, I feed-forward
width, N query heads, G key/value heads, D head size, M decoder layers of the draft.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from draftsmith.heads.formats.contracts import (
    LAYER_SECTION,
    LLAMA_KEYS,
    Config,
    Contract,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    check_torch_dtype,
    flatten,
    lookup,
)

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _sizes(config: Config) -> dict[str, int]:
    flat = flatten(config)
    return {
        "H": flat["hidden_size"],
        "Ht": flat["target_hidden_size"],
        "V": flat["vocab_size"],
        "W": flat["draft_vocab_size"],
        "A": len(flat["eagle_aux_hidden_state_layer_ids"]),
        "I": flat["intermediate_size"],
        "N": flat["num_attention_heads"],
        "G": flat["num_key_value_heads"],
        "D": flat["head_dim"],
        "M": flat["num_hidden_layers"],
    }


def _has_vocab_map(config: Config) -> bool:
    """vLLM refuses d2t beside a whole vocabulary; every engine takes a missing one as the identity."""
    sizes = _sizes(config)
    return sizes["W"] != sizes["V"]


def _check_draft_vocab(contract: Contract, files: ModelFiles) -> None:
    """d2t holds offsets (target id = i + d2t[i]) that name distinct ids, ascending, the same as t2d."""
    if not _has_vocab_map(files.config):
        return
    sizes = _sizes(files.config)
    target_ids = torch.arange(sizes["W"]) + files.tensors["d2t"].cpu()
    inside = bool(((target_ids >= 0) & (target_ids < sizes["V"])).all())
    if not inside or not bool((target_ids.diff() > 0).all()):
        raise broken(
            contract,
            "tensor d2t",
            f"offsets such that i + d2t[i] are ascending ids below {sizes['V']}",
            f"ids {int(target_ids.min())}..{int(target_ids.max())} (are they absolute ids?)",
        )
    marked = files.tensors["t2d"].cpu().nonzero().flatten()
    if not torch.equal(marked, target_ids):
        raise broken(contract, "tensor t2d", "true exactly at i + d2t[i]", f"{len(marked)} other true entries")


def _check_aux_layers(contract: Contract, files: ModelFiles, section: str = "") -> None:
    """Engines assume three aux layers unless num_aux_hidden_states says otherwise."""
    key, count = f"{section}num_aux_hidden_states", _sizes(files.config)["A"]
    found = lookup(files.config, key)
    if (found if isinstance(found, int) else 3) != count:
        said = repr(found) if isinstance(found, int) else "nothing"
        raise broken(contract, f"config key {key}", f"{count}, the number of aux layers", said)


def nested_config(config: Config) -> dict[str, Any]:
    """Return `eagle_config`, where SGLang and TensorRT-LLM look for some keys, made from the flat ones.

    SGLang counts layer outputs, so its ids are one lower; the others take theirs from the top level.
    """
    return {
        "eagle_aux_hidden_state_layer_ids": [k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]],
        "use_aux_hidden_state": True,
        "norm_before_fc": config["norm_before_fc"],
    }


def _check_nested(contract: Contract, files: ModelFiles) -> None:
    found, expected = files.config["eagle_config"], nested_config(files.config)
    if found != expected:
        raise broken(contract, "config key eagle_config", f"{expected}, the flat keys again", repr(found))


def _check_three_aux_layers(contract: Contract, files: ModelFiles) -> None:
    layer_ids = files.config["eagle_aux_hidden_state_layer_ids"]
    if len(layer_ids) != 3:
        raise broken(contract, "config key eagle_aux_hidden_state_layer_ids", "exactly three layers", repr(layer_ids))


def _check_proposal(contract: Contract, files: ModelFiles) -> None:
    """vLLM drafts as many tokens as the first proposal method says."""
    methods = files.config["speculators_config"]["proposal_methods"]
    count = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    plain = [proposal_method(count)] if type(count) is int and count >= 1 else None
    if methods != plain:
        expected = "one greedy method, speculative_tokens at least 1, verifier_accept_k 1, accept_tolerance 0.0"
        raise broken(contract, "config key speculators_config.proposal_methods", expected, repr(methods))


def proposal_method(num_speculative_tokens: int) -> dict[str, Any]:
    """Return the description of a chain of that many tokens, accepted without loss."""
    return {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }


def _tensors(layer: str, *, embedding_optional: bool) -> tuple[TensorRule, ...]:
    """The tensors, those of the decoder layer under the prefix `layer`."""
    return (
        TensorRule("fc.weight", ("H", "A*Ht")),
        TensorRule("fc_norm.{i}.weight", ("Ht",), when=lambda config: config["fc_norm"]),
        TensorRule("input_norm.weight", ("A*Ht",), when=lambda config: config["norm_before_fc"]),
        TensorRule(f"{layer}self_attn.q_proj.weight", ("N*D", "2*H")),
        TensorRule(f"{layer}self_attn.k_proj.weight", ("G*D", "2*H")),
        TensorRule(f"{layer}self_attn.v_proj.weight", ("G*D", "2*H")),
        TensorRule(f"{layer}self_attn.o_proj.weight", ("H", "N*D")),
        TensorRule(f"{layer}mlp.gate_proj.weight", ("I", "H")),
        TensorRule(f"{layer}mlp.up_proj.weight", ("I", "H")),
        TensorRule(f"{layer}mlp.down_proj.weight", ("H", "I")),
        TensorRule(f"{layer}input_layernorm.weight", ("H",)),
        TensorRule(f"{layer}hidden_norm.weight", ("H",)),
        TensorRule(f"{layer}post_attention_layernorm.weight", ("H",)),
        *_plain_layers(),
        TensorRule("norm.weight", ("H",)),
        TensorRule("lm_head.weight", ("W", "H")),
        TensorRule("d2t", ("W",), torch.int64, when=_has_vocab_map),
        TensorRule("t2d", ("V",), torch.bool, when=_has_vocab_map),
        TensorRule("embed_tokens.weight", ("V", "H"), optional=embedding_optional),
    )


def _plain_layers() -> tuple[TensorRule, ...]:
    """The tensors of the layers above the first, which every engine that takes them calls by their number."""
    return (
        TensorRule("layers.{m}.self_attn.q_proj.weight", ("N*D", "H")),
        TensorRule("layers.{m}.self_attn.k_proj.weight", ("G*D", "H")),
        TensorRule("layers.{m}.self_attn.v_proj.weight", ("G*D", "H")),
        TensorRule("layers.{m}.self_attn.o_proj.weight", ("H", "N*D")),
        TensorRule("layers.{m}.mlp.gate_proj.weight", ("I", "H")),
        TensorRule("layers.{m}.mlp.up_proj.weight", ("I", "H")),
        TensorRule("layers.{m}.mlp.down_proj.weight", ("H", "I")),
        TensorRule("layers.{m}.input_layernorm.weight", ("H",)),
        TensorRule("layers.{m}.post_attention_layernorm.weight", ("H",)),
    )


def _check_window(contract: Contract, files: ModelFiles) -> None:
    """vLLM and speculators take the window in the layers that layer_types names, and in no others."""
    flat = flatten(files.config)
    expected = ["sliding_attention"] * flat["num_hidden_layers"] if "sliding_window" in flat else None
    if flat.get("layer_types") != expected:
        raise broken(contract, "config key layer_types", repr(expected), repr(flat.get("layer_types")))


_ONE_LAYER = "num_hidden_layers"
_LAYER_KEYS = (
    *(
        replace(k, only=None, why="the first reads tokens, the others are plain") if k.name == _ONE_LAYER else k
        for k in LLAMA_KEYS
    ),
    KeyRule("sliding_window", int, "how many tokens a row sees", optional=True),
    KeyRule("layer_types", list, "in which layers", optional=True),
    KeyRule("attention_bias", bool, "biases do not load in llama.cpp", False),
    KeyRule("mlp_bias", bool, "biases do not load in llama.cpp", False),
    KeyRule("tie_word_embeddings", bool, "lm_head has rows of its own", False),
    KeyRule("torch_dtype", str, "the dtype of every float tensor"),
    KeyRule("num_aux_hidden_states", int, "A; engines assume 3", optional=True),
)
_HEAD_KEYS = (
    KeyRule("draft_vocab_size", int, "W; without it engines expect V rows in lm_head"),
    KeyRule("target_hidden_size", int, "Ht"),
    KeyRule("eagle_aux_hidden_state_layer_ids", list, "top level; llama.cpp reads it nowhere else"),
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
    tensors=_tensors("midlayer.", embedding_optional=True),
    keys=(
        KeyRule("architectures", list, "how engines find the model class", ["LlamaForCausalLMEagle3"]),
        *_LAYER_KEYS,
        *_HEAD_KEYS,
        KeyRule("eagle_config", dict, "SGLang finds its layers there alone, TensorRT-LLM norm_before_fc"),
    ),
    sizes=_sizes,
    ranges={"i": "A", "m": "1:M"},
    forbidden=_FORBIDDEN,
    checks=(check_torch_dtype, _check_draft_vocab, _check_aux_layers, _check_nested, _check_window),
)

_LLAMA_CPP_TAKES = {"fc_norm": False, "norm_output": False, _ONE_LAYER: 1}
# llama.cpp takes one decoder layer and three aux layers, cannot convert fc_norm, and ignores norm_output without a word.
EAGLE3_LLAMA_CPP = replace(
    EAGLE3,
    name="eagle3_llama_cpp",
    keys=tuple(
        replace(k, only=_LLAMA_CPP_TAKES[k.name], why="llama.cpp serves no other") if k.name in _LLAMA_CPP_TAKES else k
        for k in EAGLE3.keys
    ),
    checks=(*EAGLE3.checks, _check_three_aux_layers),
)

# speculators: the package and vLLM, which starts the target that the directory names. The package knows only
# "layers.0." and leaves what it does not find uninitialised, the embeddings too (it looks for NaN there, and memory
# seldom holds any); vLLM knows both prefixes, and shares the target's embeddings where those in the file are the same.
EAGLE3_SPECULATORS = Contract(
    name="eagle3_speculators",
    tensors=_tensors("layers.0.", embedding_optional=False),
    keys=(
        KeyRule("speculators_model_type", str, "how vLLM and speculators find the algorithm", "eagle3"),
        KeyRule("speculators_version", str, "the version of the format"),
        KeyRule("architectures", list, "the class that speculators loads", ["Eagle3DraftModel"]),
        *(
            replace(k, why="vLLM takes a missing one for true, speculators for false")
            if k.name == "norm_before_residual"
            else k
            for k in _HEAD_KEYS
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
    ranges={"i": "A", "m": "1:M"},
    forbidden={
        **_FORBIDDEN,
        "model_type": "vLLM reads the layout as another one where it is there",
        "num_aux_hidden_states": f"vLLM reads it in {LAYER_SECTION} alone",
    },
    checks=(
        partial(check_torch_dtype, key=f"{LAYER_SECTION}.torch_dtype"),
        _check_draft_vocab,
        partial(_check_aux_layers, section=f"{LAYER_SECTION}."),
        _check_proposal,
        _check_window,
    ),
)
