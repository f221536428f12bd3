"""A decoder layer of a block drafter: Qwen3's, with norms of queries and keys, whose keys come from two places.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026); as vLLM's `qwen3_dflash.py` computes it.

Shapes: H hidden, N query heads, G key/value heads, D head size; "..." is [B, n] or [R, S].
"""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.heads.eagle_layer import EagleAttention, EagleLayer, RMSNorm


class BlockAttention(EagleAttention):
    """Projections of a block's states, and of the context's, which have keys and values alone."""

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
        turning, values = super().together(x)
        queries, keys = turning.split((turning.shape[-2] - values.shape[-2], values.shape[-2]), -2)
        return torch.cat([self.q_norm(queries), self.k_norm(keys)], -2), values


def _normalise(norm: RMSNorm, x: Tensor) -> Tensor:
    """The norm in the dtype of the projection: under autocast its fp32 weights would make the states fp32 again, which a
    GPU's attention kernel does not take."""
    return norm(x).to(x.dtype)


class BlockLayer(EagleLayer):
    """What it has in common with EAGLE's layers is everything behind the attention."""

    self_attn: BlockAttention

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
