"""The one decoder layer of EAGLE-3: a Llama layer whose attention reads [embedding, hidden].

Shapes: H hidden; "..." is [B, n] or [R].
"""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.heads.eagle_layer import EagleAttention, EagleLayer, RMSNorm


class Eagle3Layer(EagleLayer):
    """The decoder layer, in two halves around the attention."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = EagleAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input [..., 2H] and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return x, normed if self.norm_before_residual else hidden
