"""What a new draft takes over from its target: the configuration of its layers, so that no dimension is written twice, the scale
that it reads embeddings at, and the weights of its final norm.

Shapes: B rows, n tokens, Ht target hidden.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.target.parts import SharedTarget, TargetParts
from draftsmith.target.pretrained import is_close, probe_ids
from draftsmith.target.target import Target, TargetOutput

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


class OwnLayerConfig(LlamaConfig):
    """The sizes of a layer of the target's own, whose state need not split into heads, as GLM-4.5's 5,120 into 96."""

    def validate_architecture(self) -> None:
        """In place of LlamaConfig's: the target was loaded with these."""


def derive_layer_config(options: Any, target: Target) -> LlamaConfig:
    """Return the configuration of one Llama layer that matches `target`, its RoPE and norm epsilon included.

    options: of a head, whose fields set the sizes; None (or no such field) stands for the target's. Where its `layer` is the target's own the
    sizes are those of that.
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
    own = getattr(options, "layer", None) == "target"
    if not own:
        check_heads(heads, groups, head_dim, H)
    epsilons = (
        getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    )
    return (OwnLayerConfig if own else LlamaConfig)(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=min(target.context_length, LONGEST_CONTEXT),
        rms_norm_eps=float(next((value for value in epsilons if value is not None), 1e-6)),
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


def embedding_scale(target: Target) -> float:
    """Return what EAGLE-1 and Hydra multiply embeddings by to bring them to the size of the target's last states: a power of two, so
    that exports, which multiply it into the matrix (`fold`), hold the same numbers.

    Embeddings have a tenth of the states' size or less. Where one matrix reads both as they are, an optimizer step changes the
    response to the state far more than that to the token, which is then learned late.
    """
    state, token = sizes(target)
    return float(2 ** (state / token.clamp_min(1e-9)).log2().round())


@torch.no_grad()
def sizes(target: Target) -> tuple[Tensor, Tensor]:
    """Return the root mean squares of the target's last states and of its embeddings: medians over random tokens, since
    the states of single tokens can be a thousand times larger."""
    ids = probe_ids(target)
    state, token = (
        x.float().square().mean(-1).sqrt().median() for x in (target.forward(ids).last, target.embedding[ids])
    )
    return state, token


def fold(weight: Tensor, tokens: slice, scale: float) -> Tensor:
    """Return the matrix that reads embeddings as they are, from one that reads scaled ones in the columns `tokens`."""
    folded = weight.clone()
    folded[:, tokens] *= scale
    return folded


@torch.no_grad()
def start_norm(norm: nn.Module, target: Target, scale: float = 1.0) -> float:
    """Copy the weight [Ht] of the target's final norm into the draft's, so that its logits start with the target's proportions.

    Nothing is copied where the widths differ or the target's norm is of another kind. Weights above the size of the target's last
    states are scaled down to it, to a power of two: Gemma's are largest where its states are next to nothing, which a draft's are
    not yet.

    Args:
        norm: the draft's final norm, which feeds the target's output projection or a copy of it.
        target: the target.
        scale: of the target's logits, where the draft's projection has none of its own.

    Returns:
        The factor that the projection still needs: 1 where the norm has taken `scale`.
    """
    weight = norm.weight
    target_weight = final_norm_weight(target)
    if target_weight is None or not isinstance(weight, Tensor) or weight.shape != target_weight.shape:
        return scale
    size = float(2 ** (sizes(target)[0] / target_weight.square().mean().sqrt()).log2().round())
    weight.copy_(target_weight * scale * min(size, 1.0))
    return 1.0


@torch.no_grad()
def final_norm_weight(target: Target) -> Tensor | None:
    """Return w [Ht] in fp32 where the target's final norm is x / rms(x) * w, None where it is of another kind (one that
    subtracts the mean, or has a bias), or is not a module beside the layers.

    It is measured and not looked up, as some architectures store w - 1: a run over a few tokens shows what the norm was
    given and what it made of it.
    """
    if isinstance(target, TargetParts | SharedTarget):
        return target.final_norm
    output, made = pass_with_norm(target, probe_ids(target))
    last_BnH = output.last
    if len(made) != 1 or made[0].shape != last_BnH.shape:
        return None
    x_BnH, y_BnH = made[0].to(last_BnH.device).float(), last_BnH.float()  # of the GPU of the last layer
    unit_BnH = x_BnH * x_BnH.square().mean(-1, keepdim=True).rsqrt()
    # Least squares per entry: the dtype of the target rounds every single quotient.
    weight_H = (y_BnH * unit_BnH).sum((0, 1)) / unit_BnH.square().sum((0, 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return weight_H if is_close((unit_BnH * weight_H).to(target.dtype), last_BnH) else None


def pass_with_norm(target: Target, ids: Tensor, layer_ids: tuple[int, ...] = ()) -> tuple[TargetOutput, list[Tensor]]:
    """Return `Target.forward` of ids [B, n], and what the modules beside the layers were given [B, n, Ht] of which the last states are
    the output: the final norm, where it is such a module."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(_module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(output, Tensor):
            seen.append((given[0], output))

    with ExitStack() as hooks:
        for child in target.decoder.children():
            hooks.enter_context(child.register_forward_hook(note))
        output = target.forward(ids, layer_ids=layer_ids)
    return output, [given for given, made in seen if made is output.last]
