"""The Llama configuration of a draft layer, derived from its target so that no dimension is written twice."""

from typing import Any

from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.target.target import Target

# The keys that define a draft layer; the rest of a LlamaConfig is at its defaults.
LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
DEFAULT_ROPE_THETA = 10_000.0
LONGEST_CONTEXT = 1 << 20


def derive_layer_config(options: Any, target: Target) -> LlamaConfig:
    """Return the configuration of one Llama layer that matches `target`, its RoPE and norm epsilon included.

    options: of a head, whose fields set the sizes; None (or no such field) stands for the target's.
    The activation is SiLU whatever the target's, because serving engines run draft layers as Llama layers.
    Raises UserError where the sizes do not fit together or the target does not say them.
    """
    config, V = target.config, target.vocab_size
    if target.embedding.shape != (V, target.hidden_size):
        raise UserError(
            f"The target {target.path} has input embeddings of shape {list(target.embedding.shape)}, "
            f"but {V} output tokens and hidden size {target.hidden_size}: a draft layer needs the same; choose another "
            "target."
        )
    H = getattr(options, "hidden_size", None) or target.hidden_size
    heads = options.num_attention_heads or config.num_attention_heads
    groups = options.num_key_value_heads or getattr(config, "num_key_value_heads", None) or heads
    head_dim = options.head_dim or getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    width = options.intermediate_size or getattr(config, "intermediate_size", None)
    if not isinstance(width, int):
        raise UserError(f"The target {target.path} names no intermediate_size: set head.intermediate_size.")
    check_heads(heads, groups, head_dim, H)
    return LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=min(target.context_length, LONGEST_CONTEXT),
        rms_norm_eps=_norm_epsilon(config),
        rope_parameters=rope_parameters(config),
    )


def check_heads(heads: int, groups: int, head_dim: int, hidden_size: int) -> None:
    """Raise UserError where the sizes of an attention do not fit together."""
    if heads % groups or head_dim % 2 or hidden_size % heads:
        raise UserError(
            f"{heads} heads, {groups} key/value heads and head_dim {head_dim} do not fit a hidden size of {hidden_size}: set "
            "head.num_attention_heads to a divisor of it, head.num_key_value_heads to a divisor of that, and "
            "head.head_dim to an even number."
        )


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of a target's text config for a layer with full attention.

    Targets with one set per layer type (Gemma 3) give that of "full_attention". Partial and multimodal rotation
    have no counterpart in a Llama layer: it turns whole heads, by text positions, with the same base. Frequencies that change
    with the length of a text are those up to where they change, which is where the target's context ends.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    partial = (rope.pop("partial_rotary_factor", None) or 1.0) != 1.0
    multimodal = len(rope.keys() & {"mrope_section", "mrope_interleaved"}) > 0
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or DEFAULT_ROPE_THETA)
    kind = rope.get("rope_type")
    if multimodal or kind == "dynamic" or (partial and kind == "longrope"):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if kind == "longrope":
        rope["long_factor"] = rope["short_factor"]
    return {"rope_type": "default", **rope}


def _norm_epsilon(config: Any) -> float:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    return 1e-6
