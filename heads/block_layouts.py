"""The contracts of the DFlash and DSpark layouts: that of the published code, which vLLM reads, and what of it llama.cpp
serves.

Symbols in shapes: H hidden, V target vocab, W draft vocab, A aux layers, I feed-forward width, N query heads, G key/value
heads, D head size, M decoder layers, r rank of DSpark's bias.
"""

from dataclasses import replace

import torch

from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.contracts import (
    LLAMA_KEYS,
    Config,
    Contract,
    KeyRule,
    ModelFiles,
    TensorRule,
    broken,
    check_torch_dtype,
)

SECTION = "dflash_config"
"""Where engines find the mask token and the layers; ids there are those of layer outputs, one lower than ours."""


def _sizes(config: Config) -> dict[str, int]:
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


def _confident(config: Config) -> bool:
    return bool(config["enable_confidence_head"])


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


_TENSORS = (
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
_KEYS = (
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
_CHECKS = (check_torch_dtype, _check_section, _check_draft_vocab)
_FORBIDDEN = {"quantization_config": "the weights are plain", "is_causal": "blocks see themselves whole"}

DFLASH = Contract(
    name="dflash",
    tensors=_TENSORS,
    keys=(KeyRule("architectures", list, "how engines find the model class", ["DFlashDraftModel"]), *_KEYS),
    sizes=_sizes,
    ranges={"m": "M"},
    forbidden=_FORBIDDEN,
    checks=_CHECKS,
)

DSPARK = Contract(
    name="dspark",
    tensors=(
        *_TENSORS,
        TensorRule("markov_head.markov_w1.weight", ("V", "r")),
        TensorRule("markov_head.markov_w2.weight", ("W", "r")),
        TensorRule("confidence_head.proj.weight", ("1", "H+r"), when=_confident),
        TensorRule("confidence_head.proj.bias", ("1",), when=_confident),
    ),
    keys=(
        KeyRule("architectures", list, "how engines find the model class", ["Qwen3DSparkModel"]),
        *_KEYS,
        KeyRule("markov_rank", int, "r"),
        KeyRule("markov_head_type", str, "engines know others", "vanilla"),
        KeyRule("enable_confidence_head", bool, "whether there is one"),
        KeyRule("confidence_head_with_markov", bool, "it reads the token before too", True),
        KeyRule("sample_from_anchor", bool, "every slot drafts", True),
        KeyRule("confidence_temperatures", list, "no engine reads them", optional=True),
    ),
    sizes=lambda config: {**_sizes(config), "H+r": config["hidden_size"] + config["markov_rank"]},
    ranges={"m": "M"},
    forbidden=_FORBIDDEN,
    checks=_CHECKS,
)


def _without(contract: Contract, *names: str) -> tuple[TensorRule, ...]:
    return tuple(rule for rule in contract.tensors if rule.name not in names)


# llama.cpp drafts through the embeddings of a draft that has them, where it has no projection of its own. Its converter
# knows no vocabulary of a DFlash head's own.
DFLASH_LLAMA_CPP = replace(
    DFLASH, name="dflash_llama_cpp", tensors=_without(DFLASH, EMBEDDING, "lm_head.weight", "d2t")
)
DSPARK_LLAMA_CPP = replace(DSPARK, name="dspark_llama_cpp", tensors=_without(DSPARK, EMBEDDING))
