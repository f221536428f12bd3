"""The pass of a Llama-like decoder over a draft, written out: transformers' operations on the same numbers, without what it does
around them for every layer, which takes a fifth of a pass over one token of a small model on a CPU.

On a GPU, where starting kernels takes longer than they do, a layer is 14 of them in place of 41.

Shapes: B rows, n tokens, R = B * n, H hidden, N query heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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


Attend = Callable[[int, str | None, Any, Tensor, Tensor, Tensor], Tensor]
"""Writes new keys and values [B, n, G, D] of a layer, and returns what its queries [B, n, N, D] see, [R, N * D]: it is handed the
layer's number, type and module of attention, then queries, keys and values."""


class PlainPass:
    """Runs a decoder over tokens that are attended to in a given way, without hooks. Make it by `of`.

    On a GPU a layer takes 14 kernels, where transformers starts 41: its norms are one each, queries, keys and values come from one
    product, what enters the MLP from another, and products are added where they go. Numbers are rounded less often so.
    """

    def __init__(self, decoder: Any, layers: Sequence[Any]) -> None:
        self._decoder, self.config = decoder, decoder.config
        kinds = getattr(self.config, "layer_types", None) or [None] * len(layers)
        self._layers = [_Layer(kind, layer) for kind, layer in zip(kinds, layers, strict=True)]

    @classmethod
    def of(cls, decoder: Any, layers: Sequence[Any]) -> "PlainPass | None":
        """Return the pass of a decoder; None for one of another architecture, or that is quantized, split or has hooks."""
        layer_type = _DECODERS.get(type(decoder))
        if layer_type is None or decoder.config._attn_implementation not in ("sdpa", GROUPED):
            return None
        if decoder.rotary_emb.rope_type in ("dynamic", "longrope") and decoder.embed_tokens.weight.is_cuda:
            return None  # these ask the device for the longest position
        for module in decoder.modules():
            # Such as `device_map` and tensor parallelism put in.
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                return None
            if hasattr(getattr(module, "weight", None), "placements"):
                return None
        return cls(decoder, layers) if all(type(layer) is layer_type and _is_plain(layer) for layer in layers) else None

    def __call__(
        self, input_ids: Tensor, layer_ids: Sequence[int], position_ids: Tensor, attend: Attend
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return the streams [B, n, H] that enter the layers `layer_ids`, and the post-final-norm states [B, n, H]."""
        x = self._decoder.embed_tokens(input_ids)
        rotation = _turns(*self._decoder.rotary_emb(x, position_ids))
        shape, streams = x.shape, {}
        x = x.flatten(0, 1)
        for number, at in enumerate(self._layers):
            if number in layer_ids:
                # On a GPU the layers add to x in place.
                streams[number] = (x.clone() if x.is_cuda else x).view(shape)
            q, k, v = at.heads(_norm(x, at.layer.input_layernorm).view(shape), rotation)
            x = _plus(x, attend(number, at.kind, at.attention, q, k, v), at.attention.o_proj)
            h = _norm(x, at.layer.post_attention_layernorm)
            if at.gate_up is None:
                gate, up = _times(h, at.mlp.gate_proj), _times(h, at.mlp.up_proj)
            else:
                gate, up = F.linear(h, at.gate_up).chunk(2, -1)
            x = _plus(x, at.mlp.act_fn(gate) * up, at.mlp.down_proj)
        return streams, _norm(x, self._decoder.norm).view(shape)

    def masked(self, attention_mask: Tensor | dict[str, Tensor], cache: Any) -> Attend:
        """Return how transformers attends to what a cache of its protocol holds, under masks."""
        interface = AttentionInterface()[self.config._attn_implementation]

        def attend(number: int, kind: str | None, attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = attention_mask if isinstance(attention_mask, Tensor) else attention_mask[kind]  # type: ignore[index]
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), number)
            attended, _ = interface(attention, q.transpose(1, 2), keys, values, mask, scaling=attention.scaling)
            return attended.reshape(q.shape[0] * q.shape[1], -1)

        return attend


def _is_plain(layer: Any) -> bool:
    """Whether the parts of a layer are those of its architecture; quantized ones and adapters need not be linear layers at all, nor
    their weights plain tensors."""
    attention, mlp = layer.self_attn, layer.mlp
    products = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    kind = type(layer.input_layernorm.weight)  # nn.Parameter, unless all tensors are of another kind
    plain = all(
        type(part) is PackedLinear or (type(part) is nn.Linear and type(part.weight) is kind) for part in products
    )
    return plain and type(attention).__module__ == type(mlp).__module__ == type(layer).__module__


class _Layer:
    """A decoder layer with its parts at hand. qkv, gate_up: matrices whose rows are those of several, where these lie so."""

    def __init__(self, kind: str | None, layer: Any) -> None:
        self.kind, self.layer, self.attention, self.mlp = kind, layer, layer.self_attn, layer.mlp
        self.normed = type(self.attention) is qwen3.Qwen3Attention
        self.projections = (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        self.qkv = _joined(self.projections)
        self.gate_up = _joined((self.mlp.gate_proj, self.mlp.up_proj))

    def heads(self, h: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of [B, n, H], the first two rotated."""
        D = self.attention.head_dim
        if self.qkv is None:
            q, k, v = (_times(h, projection).unflatten(-1, (-1, D)) for projection in self.projections)
        else:
            heads = [projection.out_features // D for projection in self.projections]
            whole = F.linear(h, self.qkv).unflatten(-1, (-1, D))
            if not self.normed:
                both, v = whole.split((heads[0] + heads[1], heads[2]), 2)
                q, k = _rotated(both, rotation).split(heads[:2], 2)
                return q, k, v
            q, k, v = whole.split(heads, 2)
        if self.normed:
            q, k = _norm(q, self.attention.q_norm), _norm(k, self.attention.k_norm)
        q, k = _rotated(torch.cat((q, k), 2), rotation).split((q.shape[2], k.shape[2]), 2)
        return q, k, v


@torch.no_grad()
def join_projections(layers: Sequence[Any]) -> None:
    """Let the weights of products of the same states be parts of one matrix each, so that a pass can take them as one."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if (
                any(part.bias is not None for part in parts) or _joined(parts) is not None
            ):  # perhaps shared with another target
                continue
            whole = torch.cat([part.weight for part in parts])
            for part, rows in zip(parts, whole.split([part.out_features for part in parts]), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)


def _joined(parts: Sequence[nn.Linear]) -> Tensor | None:
    """Return the matrix that the weights of `parts` are the rows of, in order, on a GPU; None where they are not."""
    first, *rest = (part.weight for part in parts)
    if not first.is_cuda or not first.is_contiguous() or any(part.bias is not None for part in parts):
        return None
    end = first.data_ptr() + first.nbytes
    for weight in rest:
        if weight.data_ptr() != end or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += weight.nbytes
    rows = sum(part.out_features for part in parts)
    return first.detach().as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _times(x: Tensor, layer: nn.Module) -> Tensor:
    """Return a linear layer's output; its parameters are read without the search of an attribute that no module has."""
    parameters = layer._parameters
    return linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def _plus(x: Tensor, h: Tensor, layer: nn.Module) -> Tensor:
    """Return x [R, H] and a linear layer's output; on a GPU as one product, which x is overwritten by."""
    if x.is_cuda and layer.bias is None:
        return x.addmm_(h, layer.weight.t())  # type: ignore[operator, arg-type]
    return x + _times(h, layer)


def _norm(x: Tensor, module: Any) -> Tensor:
    """Return the RMS norm of x, on a GPU in one kernel, which rounds once."""
    if x.is_cuda:
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    return module.forward(x)  # type: ignore[no-any-return]


def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines [B, n, 1, D], and sines whose first half has the other sign."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return [B, n, N + G, D] rotated: queries and keys at once, in a third of the operations that each apart would take."""
    cos, sin = rotation
    turned, other = heads * cos, heads.roll(heads.shape[-1] // 2, -1)
    # One rounding less than on a CPU, where numbers are transformers'.
    return turned.addcmul_(other, sin) if heads.is_cuda else turned.add_(other.mul_(sin))
