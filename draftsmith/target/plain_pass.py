"""The pass of a Llama-like decoder over a draft, written out: transformers' operations on the same numbers, without what it does
around them for every layer, which takes a fifth of a pass over one token of a small model on a CPU.

Shapes: B rows, n tokens, R = B * n, H hidden, N query heads, G key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from draftsmith.target.kernels import GROUPED, PackedLinear, linear

_DECODERS = {
    llama.LlamaModel: llama.LlamaDecoderLayer,
    mistral.MistralModel: mistral.MistralDecoderLayer,
    qwen2.Qwen2Model: qwen2.Qwen2DecoderLayer,
    qwen3.Qwen3Model: qwen3.Qwen3DecoderLayer,
}
"""Decoders whose layers are alike, and these; Qwen3's norm queries and keys."""


class PlainPass:
    """Runs a decoder over tokens that a mask is given for, without hooks. Make it by `of`."""

    def __init__(self, decoder: Any, layers: Sequence[Any]) -> None:
        self._decoder, self._config = decoder, decoder.config
        kinds = getattr(self._config, "layer_types", None) or [None] * len(layers)
        self._layers = [(kind, layer, layer.self_attn, layer.mlp) for kind, layer in zip(kinds, layers, strict=True)]

    @classmethod
    def of(cls, decoder: Any, layers: Sequence[Any]) -> "PlainPass | None":
        """Return the pass of a decoder; None for one of another architecture, or that is quantized, split or has hooks."""
        layer_type = _DECODERS.get(type(decoder))
        if layer_type is None or decoder.config._attn_implementation not in ("sdpa", GROUPED):
            return None
        for module in decoder.modules():
            # Such as `device_map` and tensor parallelism put in.
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                return None
            if isinstance(module, nn.Linear) and type(module) not in (nn.Linear, PackedLinear):
                return None
        return cls(decoder, layers) if all(type(layer) is layer_type for layer in layers) else None

    def __call__(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        attention_mask: Tensor | dict[str, Tensor],
        position_ids: Tensor,
        past_key_values: Any,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return the streams [B, n, H] that enter the layers `layer_ids`, and the post-final-norm states [B, n, H]."""
        x = self._decoder.embed_tokens(input_ids)
        rotation = _turns(*self._decoder.rotary_emb(x, position_ids))
        attend = AttentionInterface()[self._config._attn_implementation]
        shape, streams = x.shape, {}
        x = x.flatten(0, 1)
        for number, (kind, layer, attention, mlp) in enumerate(self._layers):
            if number in layer_ids:
                streams[number] = x.view(shape)
            mask = attention_mask if isinstance(attention_mask, Tensor) else attention_mask[kind]
            h = layer.input_layernorm.forward(x)
            heads = (*shape[:2], -1, attention.head_dim)
            q, k, v = (_times(h, m).view(heads) for m in (attention.q_proj, attention.k_proj, attention.v_proj))
            if type(attention) is qwen3.Qwen3Attention:
                q, k = attention.q_norm.forward(q), attention.k_norm.forward(k)
            q, k = _rotated(q, k, rotation)
            keys, values = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), number)
            attended, _ = attend(attention, q.transpose(1, 2), keys, values, mask, scaling=attention.scaling)
            x = x + _times(attended.reshape(len(x), -1), attention.o_proj)
            h = layer.post_attention_layernorm.forward(x)
            x = x + _times(mlp.act_fn(_times(h, mlp.gate_proj)) * _times(h, mlp.up_proj), mlp.down_proj)
        return streams, self._decoder.norm.forward(x).view(shape)


def _times(x: Tensor, layer: nn.Module) -> Tensor:
    """Return a linear layer's output; its parameters are read without the search of an attribute that no module has."""
    parameters = layer._parameters
    return linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines [B, n, 1, D], and sines whose first half has the other sign."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def _rotated(q: Tensor, k: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return q [B, n, N, D] and k [B, n, G, D] rotated, in a third of the operations that each apart would take."""
    cos, sin = rotation
    both = torch.cat((q, k), 2)
    turned = (both * cos).add_(both.roll(both.shape[-1] // 2, -1).mul_(sin))
    turned_q, turned_k = turned.split((q.shape[2], k.shape[2]), 2)
    return turned_q, turned_k
