"""Parts of the decoder layers of drafters: rotary embedding, attention projections, and the layer around its attention.

Shapes: H hidden, N query heads, G key/value heads, D head size; "..." is [B, n] or [R].
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from draftsmith.heads.layers.compiled import compiled
from draftsmith.target.kernels import RMSNorm, linear
from draftsmith.target.target import Derived, Weights


class Rotary(LlamaRotaryEmbedding):
    """Llama's rotary embedding whose frequencies stay fp32 when the head is cast.

    In bf16 they are off by up to 0.4%, an angle of radians at position 1000.
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [..., D] of positions [...], in the dtype of `x`."""
        if not position_ids.numel():
            # Where frequencies depend on the longest position, there is none to ask for.
            none = x.new_empty(*position_ids.shape, 2 * len(self.inv_freq))
            return none, none
        return super().forward(x, position_ids)

    def table(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines [positions, D] in the dtype of `like`; None where they depend on the longest position
        of a call."""
        if self.rope_type in ("dynamic", "longrope"):
            return None
        cos, sin = self(like, torch.arange(positions, device=like.device)[None])
        return cos[0], sin[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.to(fn(buffer).device))
        return self


@compiled
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, D] by cos, sin [..., D] in the dtype of x, as `apply_rotary_pos_emb` does for queries and keys."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return x * cos.unsqueeze(-2) + rotate_half(x) * sin.unsqueeze(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return the attention of queries [B, N, n, D] over keys and values [B, G, slots, D], G a divisor of N. mask: bool
    [B, 1, n, slots], True where a row sees a key; None: everywhere. scale: of the scores; None: D^-0.5."""
    if mask is not None and _repeats(q):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _repeats(q: Tensor) -> bool:
    """Whether keys are repeated for every query head: on a GPU no kernel takes both a mask and fewer key heads, and what is
    left would hold all scores [B, N, n, slots] in fp32."""
    return q.device.type == "cuda"


CacheUpdate = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The number of a layer, and its new keys and values [B, G, n, D], which it stores -> all of them, [B, G, slots, D] each."""


class EagleAttention(nn.Module):
    """The projections of an attention over states of `width` numbers; the caller keeps the keys.

    qkv_bias: query, key and value projections have biases (never the output's).
    """

    def __init__(self, config: LlamaConfig, width: int, *, qkv_bias: bool = False) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        inner, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=qkv_bias)
        self.k_proj = nn.Linear(width, shared, bias=qkv_bias)
        self.v_proj = nn.Linear(width, shared, bias=qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self._joint = Derived()

    def query(self, x: Tensor) -> Tensor:
        """Return queries [..., N, D] of x [..., width], not yet rotated."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def together(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [..., N + G, D], not yet rotated, and values [..., G, D] of x [..., width], in one product."""
        groups = self.k_proj.out_features // self.head_dim
        heads = linear(x, *self._joined()).unflatten(-1, (-1, self.head_dim))
        return heads[..., :-groups, :], heads[..., -groups:, :]

    def _joined(self) -> Weights:
        """Return the three projections joined, computed again when any of them has changed; without gradients."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        assert not torch.is_grad_enabled(), "joined projections have no gradients"
        weights: list[Tensor] = [part.weight for part in parts]
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        return self._joint.get((*weights, *biases), lambda: (torch.cat(weights), torch.cat(biases) if biases else None))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, not yet rotated, and values of x [..., width], each [..., G, D]."""
        return self.k_proj(x).unflatten(-1, (-1, self.head_dim)), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def normalise(self, heads: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return heads [R, n, D], so many queries, keys and values, as they are rotated: with their norms, if there are any."""
        return heads


class NormedAttention(EagleAttention):
    """Projections whose queries and keys are normalised per head, as in Qwen3's layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def query(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., N, D], normalised, not yet rotated."""
        return _normalise(self.q_norm, super().query(x))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> two of [..., G, D], the keys normalised, not yet rotated."""
        keys, values = super().key_value(x)
        return _normalise(self.k_norm, keys), values

    def together(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> queries and keys, [..., N + G, D], and values [..., G, D], in one product."""
        qk, values = super().together(x)
        queries, keys = qk.split((qk.shape[-2] - values.shape[-2], values.shape[-2]), -2)
        return torch.cat([self.q_norm(queries), self.k_norm(keys)], -2), values

    def normalise(self, heads: Tensor, sizes: Sequence[int]) -> Tensor:
        """As `EagleAttention.normalise`."""
        queries, keys, values = heads.split(list(sizes), -2)
        return torch.cat([_normalise(self.q_norm, queries), _normalise(self.k_norm, keys), values], -2)


def _normalise(norm: RMSNorm, x: Tensor) -> Tensor:
    """The norm in the dtype of the projection: under autocast its fp32 weights would make the states fp32 again, which a
    GPU's attention kernel does not take."""
    return norm(x).to(x.dtype) if x.shape[-2] else x


class EagleLayer(nn.Module):
    """A Llama layer whose attention runs elsewhere in training; subclasses create the modules in the order of their published
    layout."""

    self_attn: EagleAttention
    mlp: LlamaMLP
    post_attention_layernorm: RMSNorm

    def layer_output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output [..., H] from the attention's output [..., N, D] and the residual [..., H], before any
        final norm."""
        residual = residual + self.self_attn.o_proj(attended.flatten(-2))
        return residual + self.mlp(self.post_attention_layernorm(residual))

    def decode(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        update: CacheUpdate,
        mask: Tensor | None,
        number: int = 0,
    ) -> Tensor:
        """Run a decoding call: the attention's input [B, n, width] and the residual [B, n, H] -> the layer's output [B, n, H].

        rotation: cosines and sines [B, n, D] of the positions. mask: bool [B, 1, n, slots], True where a row may look, None for
        everywhere. number: the layer's.
        """
        qk, v = self.self_attn.together(x)
        qk, v = rotate(qk, *rotation).transpose(1, 2), v.transpose(1, 2)
        q, k = qk.split((qk.shape[1] - v.shape[1], v.shape[1]), 1)
        return self.layer_output(attend(q, *update(number, k, v), mask).transpose(1, 2), residual)


class PlainLayer(EagleLayer):
    """A complete Llama layer, as those above a head's first one are. attention: in place of one like Llama's."""

    def __init__(self, config: LlamaConfig, attention: EagleAttention | None = None) -> None:
        super().__init__()
        self.self_attn = attention or EagleAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_input(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input and the residual, each [..., H], from the output of the layer below [..., H]."""
        return self.input_layernorm(hidden), hidden
