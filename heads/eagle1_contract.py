"""The contracts of the EAGLE-1 layouts: what vLLM serves as `eagle`, and what SGLang serves as `EAGLE`.

Both read EAGLE's own tensors; they differ in the name of the model class and in biases. vLLM adds none to `fc` and drops
a stored one in silence; SGLang always has one there, which it draws at random where the file holds none. vLLM finds the
biases of query, key and value under `qkv_bias`; SGLang knows only `attention_bias`, which asks for one of the output
projection too.

Symbols in shapes: H hidden (draft and target alike), V target vocab, I feed-forward width, N query heads, G key/value
heads, D head size.
"""

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

FC_BIAS, OUTPUT_BIAS = "fc.bias", "layers.0.self_attn.o_proj.bias"


def _sizes(config: Config) -> dict[str, int]:
    return {
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "I": config["intermediate_size"],
        "N": config["num_attention_heads"],
        "G": config["num_key_value_heads"],
        "D": config["head_dim"],
    }


def _check_heads(contract: Contract, files: ModelFiles) -> None:
    sizes = _sizes(files.config)
    if sizes["N"] % sizes["G"] or sizes["D"] % 2:
        expected = f"a divisor of num_attention_heads {sizes['N']}, and an even head_dim"
        raise broken(contract, "config key num_key_value_heads", expected, f"{sizes['G']} and {sizes['D']}")


def _check_rope(contract: Contract, files: ModelFiles) -> None:
    """Readers of both generations, those of rope_parameters and those of rope_theta and rope_scaling, see one RoPE."""
    rope = files.config["rope_parameters"]
    if files.config["rope_theta"] != rope.get("rope_theta"):
        raise broken(contract, "config key rope_theta", f"{rope.get('rope_theta')}", f"{files.config['rope_theta']}")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    expected = None if scaling.get("rope_type", "default") == "default" else scaling
    if files.config.get("rope_scaling") != expected:
        found = repr(files.config.get("rope_scaling"))
        raise broken(contract, "config key rope_scaling", f"{expected}, as in rope_parameters", found)


def _check_empty_output_bias(contract: Contract, files: ModelFiles) -> None:
    if OUTPUT_BIAS in files.tensors and bool(files.tensors[OUTPUT_BIAS].any()):
        raise broken(contract, f"tensor {OUTPUT_BIAS}", "zeros: heads have none", "others")


def _tensors(biased: str) -> tuple[TensorRule, ...]:
    """The tensors that both engines read; the key `biased` asks for the biases of query, key and value."""
    attention = "layers.0.self_attn."
    return (
        TensorRule("fc.weight", ("H", "2*H")),
        TensorRule(f"{attention}q_proj.weight", ("N*D", "H")),
        TensorRule(f"{attention}k_proj.weight", ("G*D", "H")),
        TensorRule(f"{attention}v_proj.weight", ("G*D", "H")),
        TensorRule(f"{attention}q_proj.bias", ("N*D",), when=lambda config: config[biased]),
        TensorRule(f"{attention}k_proj.bias", ("G*D",), when=lambda config: config[biased]),
        TensorRule(f"{attention}v_proj.bias", ("G*D",), when=lambda config: config[biased]),
        TensorRule(f"{attention}o_proj.weight", ("H", "N*D")),
        TensorRule("layers.0.mlp.gate_proj.weight", ("I", "H")),
        TensorRule("layers.0.mlp.up_proj.weight", ("I", "H")),
        TensorRule("layers.0.mlp.down_proj.weight", ("H", "I")),
        TensorRule("layers.0.post_attention_layernorm.weight", ("H",)),
        TensorRule("embed_tokens.weight", ("V", "H"), optional=True),
    )


_KEYS = (
    *LLAMA_KEYS,
    KeyRule("mlp_bias", bool, "the head has none there", False),
    KeyRule("tie_word_embeddings", bool, "SGLang binds the target's two matrices one by one", False),
    KeyRule("torch_dtype", str, "the dtype of every tensor"),
)
_FORBIDDEN = {
    "bias": "engines take it for biases of the attention",
    "draft_vocab_size": "readers take it for EAGLE-3",
    "quantization_config": "the weights are plain",
}
_CHECKS = (check_torch_dtype, _check_heads, _check_rope)

# vLLM makes EagleLlamaForCausalLM of the architecture, has no place for lm_head.weight (it raises) and shares the
# target's embeddings where the file holds none or the same.
EAGLE1 = Contract(
    name="eagle1",
    tensors=_tensors("qkv_bias"),
    keys=(
        KeyRule("architectures", list, "vLLM puts Eagle in front of it", ["LlamaForCausalLM"]),
        *_KEYS,
        KeyRule("attention_bias", bool, "it would add a bias to the output projection", False),
        KeyRule("qkv_bias", bool, "vLLM adds biases to query, key and value"),
        KeyRule("logit_scale", float, "vLLM multiplies the drafts' logits by it, as the target its own"),
    ),
    sizes=_sizes,
    ranges={},
    forbidden=_FORBIDDEN,
    checks=_CHECKS,
)

# SGLang binds the target's embeddings and projection whatever the file holds.
EAGLE1_SGLANG = Contract(
    name="eagle1_sglang",
    tensors=(
        *_tensors("attention_bias"),
        TensorRule(FC_BIAS, ("H",)),
        TensorRule(OUTPUT_BIAS, ("H",), when=lambda config: config["attention_bias"]),
    ),
    keys=(
        KeyRule("architectures", list, "the class that SGLang loads", ["LlamaForCausalLMEagle"]),
        *_KEYS,
        KeyRule("attention_bias", bool, "SGLang adds biases to all projections of the attention"),
    ),
    sizes=_sizes,
    ranges={},
    forbidden={**_FORBIDDEN, "hot_vocab_size": "SGLang would expect fewer rows in the projection"},
    checks=(*_CHECKS, _check_empty_output_bias),
)
