"""The one decoder layer of EAGLE-3: a Llama layer whose attention reads [embedding, hidden].

Shapes: H hidden, N query heads, G key/value heads, D head size; "..." is [B, n] or [R].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half


class Rotary(LlamaRotaryEmbedding):
    """Llama's rotary embedding; its frequencies stay fp32 when the head is cast.

    In bf16 they are off by up to 0.4%, which at position 1000 is a turn of radians.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.to(fn(buffer).device))
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, D] by cos, sin [..., D], as `apply_rotary_pos_emb` does for a query and a key together."""
    return x * cos.unsqueeze(-2) + rotate_half(x) * sin.unsqueeze(-2)


class Eagle3Attention(nn.Module):
    """Projections of an attention over [embedding, hidden]; who holds the keys is the caller's affair."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        width, inner = 2 * config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def query(self, x: Tensor) -> Tensor:
        """[..., 2H] -> [..., N, D], not yet rotated."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2H] -> two of [..., G, D], the keys not yet rotated."""
        return self.k_proj(x).unflatten(-1, (-1, self.head_dim)), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Eagle3Layer(nn.Module):
    """The decoder layer, in two halves around the attention."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input [..., 2H] and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return x, normed if self.norm_before_residual else hidden

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output [..., N, D] and residual [..., H] -> the layer's output [..., H], before the final norm."""
        residual = residual + self.self_attn.o_proj(attended.flatten(-2))
        return residual + self.mlp(self.post_attention_layernorm(residual))
