"""The decoder layer that transformers builds of a target's configuration, as the block of an MTP head: with compressed keys and
values (MLA), experts, or a part of each head turned by position.

transformers keeps the layer; its interfaces for caches and attention are handed the keys of decoding, and those of a training pass.

Shapes: B batch rows, L tokens, n tokens of a call, R query rows, T = B*L, H hidden, N query heads, G key/value heads, D head size, S
slots; MLA caches other shapes than it attends to.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface

from draftsmith.decoder.cache import LayerShape, TensorShape
from draftsmith.errors import UserError
from draftsmith.heads.layers.decoder_layer import CacheUpdate, Rotary, attend
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.training_pass import Keys, LayerInput, TrainingPass
from draftsmith.heads.layers.ttt_attention import ttt_attention
from draftsmith.target.target import Target

ROUTING_BIAS = "e_score_correction_bias"
"""What routers add to their scores to choose experts; in fp32 whatever the weights are."""
_NAME = "draftsmith_mtp"
_OTHER = ("sliding_window", "softcap", "s_aux")
"""What attention of some architectures is told besides, and ours does not compute."""
Rotation = tuple[Tensor, Tensor]
Attending = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(rotated queries [B, N, n, D], keys and values [B, G, n or S, D], scale of the scores) -> [B, n, N, D of the values]."""


def target_layer(target: Target) -> nn.Module:
    """Return a layer like the target's last one, its weights not set. Raises UserError where transformers has none that can be handed
    keys."""
    config = deepcopy(target.config)
    model = MODEL_MAPPING.get(type(config), None)
    layer = (getattr(model, "_can_record_outputs", None) or {}).get("hidden_states")
    if not isinstance(layer, type) or not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"head.layer is 'target', but the decoder layers of {target.path} ({target.model_type}) take no attention from outside: "
            "leave it out, or train the method eagle3."
        )
    config._attn_implementation = _NAME
    # The others take weights of one dtype alone, or compute differently by how many tokens there are.
    config._experts_implementation = "eager"
    built: nn.Module = layer(config, target.num_layers - 1)
    return built


def _interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    if (other := next((name for name in _OTHER if told.get(name) is not None), None)) is not None:
        raise UserError(
            f"The attention of {type(module).__name__} has {other}, which is not computed here: leave head.layer out."
        )
    attending: Attending = told["attending"]
    # Under autocast norms and rotations leave fp32.
    return attending(query.to(value.dtype), key.to(value.dtype), value, told["scaling"]), None


AttentionInterface.register(_NAME, _interface)


class _Writer:
    """What a layer takes for a cache."""

    def __init__(self, update: CacheUpdate) -> None:
        self._update = update

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return self._update(0, keys, values)


def decode(layer: nn.Module, x_BnH: Tensor, rotation: Rotation, update: CacheUpdate, mask: Tensor | None) -> Tensor:
    """Return a decoding call's output [B, n, H]; see `EagleLayer.decode`."""

    def attending(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return attend(q, k, v, mask, scale).transpose(1, 2)

    out: Tensor = layer(
        x_BnH, position_embeddings=rotation, past_key_values=_Writer(update), attention_mask=None, attending=attending
    )
    return out


def _like(layer: nn.Module) -> Tensor:
    """Return a tensor [H] of the layer's dtype and device; in a view of a head it is no parameter."""
    return cast(Tensor, layer.get_submodule("input_layernorm").weight)


@torch.no_grad()
def cached_shapes(layer: nn.Module, rotary: Rotary) -> tuple[LayerShape, ...]:
    """Return what the layer hands a cache, which its attention to one token shows. Raises UserError for attention that is not computed
    here."""
    found: list[LayerShape] = []

    def update(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found.append(LayerShape(*(TensorShape(x.shape[1], x.shape[3], x.dtype) for x in (keys, values))))
        return keys, values

    def attending(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
        return q.new_zeros(1, 1, q.shape[1], v.shape[-1])

    like = _like(layer)
    rotation = rotary(like, torch.zeros(1, 1, dtype=torch.long, device=like.device))
    _attention(layer, like[None, None], rotation, attending, _Writer(update))
    return tuple(found)


def _attention(
    layer: nn.Module, x_BnH: Tensor, rotation: Rotation, attending: Attending, writer: _Writer | None = None
) -> None:
    """Run the layer's attention alone, for what it hands over."""
    layer.get_submodule("self_attn")(
        x_BnH,
        position_embeddings=rotation,
        past_key_values=writer,
        attention_mask=None,
        attending=attending,
    )


class TargetLayerPass(TrainingPass):
    """As `TrainingPass`, of a single layer that reads its input alone."""

    def __init__(self, layer: nn.Module, rotary: Rotary, position_BL: Tensor, plan: RowPlan) -> None:
        self.layer, self.rotary, self.position_BL, self.plan, self.window = layer, rotary, position_BL, plan, None
        self._like = _like(layer)

    def context_keys(self, given: LayerInput) -> None:
        """Compute the keys of step 0 from the layer's input of all tokens, [B*L, H]."""

        def keep(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
            keys, values = (x[0].transpose(0, 1).unflatten(0, self.position_BL.shape) for x in _as_wide(q, k, v)[1:])
            self._keys = [Keys(keys, values)]
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])

        cos, sin = (x.flatten(0, 1)[None] for x in self.rotary(self._like, self.position_BL))
        _attention(self.layer, self.layer.get_submodule("input_layernorm")(given.x[None]), (cos, sin), keep)

    def first(self, given: LayerInput) -> Tensor:
        """Return the output [R, H] of step 0 for the rows of the plan."""
        return self.step(0, given)

    def step(self, step: int, given: LayerInput) -> Tensor:
        """Return the output [R, H] of step 0, 1, 2, ..."""

        def attending(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            q_RND, k_RGD, v_RGD = (x[0].transpose(0, 1) for x in _as_wide(q, k, v))
            if step:
                self._keys = [self._keys[0].add(k_RGD, v_RGD)]
            (keys,) = self._keys
            out = ttt_attention(q_RND, keys.context_k, keys.context_v, keys.own_k, keys.own_v, self.plan, scale)
            return out[None, ..., : v.shape[-1]]

        rotation = self.rotary(self._like, self.position_BL.flatten()[self.plan.rows][None] + step)
        out: Tensor = self.layer(given.x[None], position_embeddings=rotation, attention_mask=None, attending=attending)
        return out[0]


def _as_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three as wide as the widest, with zeros, which change no score: kernels take one width."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v
