"""The contracts of the DFlash and DSpark layouts: that of the published code, which vLLM reads, and what of it llama.cpp
serves.

Symbols in shapes: H hidden, V target vocab, W draft vocab, A aux layers, I feed-forward width, N query heads, G key/value
heads, D head size, M decoder layers, r rank of DSpark's bias.
"""

from dataclasses import replace

import torch

from draftsmith.heads.formats.contracts import (
    LLAMA_KEYS,
    Config,
    Contract,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    check_torch_dtype,
)
from draftsmith.heads.formats.engine_rules import LLAMA_CPP_SILENT, more_than_a_matrix
from draftsmith.heads.formats.layout import Rule

SECTION = "dflash_config"
"""Where engines find the mask token and the layers; ids there are those of layer outputs, one lower than ours."""


def block_sizes(config: Config) -> dict[str, int]:
    """Return what the symbols of shapes stand for."""
    return {
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "W": config["draft_vocab_size"],
        "A": len(config[SECTION]["target_layer_ids"]),
        "I": config["intermediate_size"],
        "N": config["num_attention_heads"],
        "G": config["num_key_value_heads"],
        "D": config["head_dim"],
        "M": config["num_hidden_layers"],
        "r": config.get("markov_rank", 0),
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


def _check_draft_vocab(contract: Contract, files: ModelFiles) -> None:
    """d2t holds offsets (target id = i + d2t[i]) that name distinct ids, ascending."""
    if not _reduced(files.config):
        return
    ids = torch.arange(files.config["draft_vocab_size"]) + files.tensors["d2t"].cpu()
    inside = bool(((ids >= 0) & (ids < files.config["vocab_size"])).all())
    if not inside or not bool((ids.diff() > 0).all()):
        raise broken(
            contract, "tensor d2t", "offsets that name ascending ids", f"ids {int(ids.min())}..{int(ids.max())}"
        )


TENSORS = (
    TensorRule("fc.weight", ("H", "A*H")),
    TensorRule("hidden_norm.weight", ("H",)),
    TensorRule("layers.{m}.self_attn.q_proj.weight", ("N*D", "H")),
    TensorRule("layers.{m}.self_attn.k_proj.weight", ("G*D", "H")),
    TensorRule("layers.{m}.self_attn.v_proj.weight", ("G*D", "H")),
    TensorRule("layers.{m}.self_attn.o_proj.weight", ("H", "N*D")),
    TensorRule("layers.{m}.self_attn.q_norm.weight", ("D",)),
    TensorRule("layers.{m}.self_attn.k_norm.weight", ("D",)),
    TensorRule("layers.{m}.mlp.gate_proj.weight", ("I", "H")),
    TensorRule("layers.{m}.mlp.up_proj.weight", ("I", "H")),
    TensorRule("layers.{m}.mlp.down_proj.weight", ("H", "I")),
    TensorRule("layers.{m}.input_layernorm.weight", ("H",)),
    TensorRule("layers.{m}.post_attention_layernorm.weight", ("H",)),
    TensorRule("norm.weight", ("H",)),
    # With the whole vocabulary engines take the target's; a part of it they cannot cut out.
    TensorRule("lm_head.weight", ("W", "H"), when=_reduced),
    TensorRule("d2t", ("W",), torch.int64, when=_reduced),
    TensorRule("embed_tokens.weight", ("V", "H"), optional=True),
)
_OWN = {
    "model_type": ("qwen3", "the layers are Qwen3's, with norms of queries and keys"),
    "num_hidden_layers": (None, "M"),
}
KEYS = (
    *(
        replace(rule, only=_OWN[rule.name][0], why=_OWN[rule.name][1]) if rule.name in _OWN else rule
        for rule in LLAMA_KEYS
    ),
    KeyRule("draft_vocab_size", int, "W"),
    KeyRule("block_size", int, "S: engines draft no more"),
    KeyRule("attention_bias", bool, "there are no biases", False),
    KeyRule("tie_word_embeddings", bool, "the output projection is the target's", False),
    KeyRule("torch_dtype", str, "the dtype of every float tensor"),
    KeyRule(SECTION, dict, "mask token and layers"),
    KeyRule(f"{SECTION}.mask_token_id", int, "what fills a block"),
    KeyRule(f"{SECTION}.target_layer_ids", list, "layer outputs, one lower than ours"),
)
CHECKS = (check_torch_dtype, _check_section, _check_draft_vocab)
FORBIDDEN = {"quantization_config": "the weights are plain", "is_causal": "blocks see themselves whole"}


def without_tensors(contract: Contract, *names: str) -> tuple[TensorRule, ...]:
    """Return the rules of a contract less those of these tensors."""
    return tuple(rule for rule in contract.tensors if rule.name not in names)


BLOCK_LENGTH_VLLM = (
    "The number of tokens is that of the trained block: with another, vLLM fills in a block of another length, which accepts "
    "less."
)
BLOCK_LENGTH_LLAMA_CPP = (
    f"{LLAMA_CPP_SILENT} With fewer tokens than the trained block has it fills in a shorter one, which accepts less."
)
MEASURE_ALONE = "train it with draftsmith train and export.layout null, and measure it with draftsmith evaluate"


def scaled_rope(method: str, title: str) -> Rule:
    """Return the rule about RoPE scaling: llama.cpp's converter of block drafters writes few kinds."""
    return Rule(
        f"a target with another RoPE scaling than linear or YaRN, for {title}",
        "leaves the scaling out where it converts this draft, in silence",
        f"export the layout {method} for vLLM",
        lambda files, target, head: files.config["rope_parameters"]["rope_type"] not in ("default", "linear", "yarn"),
    )


def bare_matrix(title: str) -> Rule:
    """Return the rule of engines that draft with the bare matrix of the target's output projection."""
    return Rule(
        f"a target whose output projection has a bias, a scale or a softcap, for {title}",
        "takes the bare matrix for the drafts",
        MEASURE_ALONE,
        more_than_a_matrix,
    )
