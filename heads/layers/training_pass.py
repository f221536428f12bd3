"""Run the steps of EAGLE's training pass through a head's decoder layers.

Every layer keeps the keys and values of step 0 (the context keys) of all tokens that a query row may see; they are
computed from the target's states, as those of the text's tokens are in decoding. Each query row adds its own keys of steps
1..k. Shapes: B batch rows, L tokens, R query rows (flat b*L+t), H draft hidden, N query heads, G key/value heads,
D head size, S steps so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.layers.decoder_layer import EagleLayer, PlainLayer, Rotary, rotate
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.ttt_attention import ttt_attention


@dataclass(frozen=True)
class _Keys:
    """One layer's keys and values: context_k, context_v [B, L, G, D] of step 0; own_k, own_v [S, R, G, D] of later
    steps."""

    context_k: Tensor
    context_v: Tensor
    own_k: Tensor
    own_v: Tensor

    @classmethod
    def context(cls, k_BLGD: Tensor, v_BLGD: Tensor, rows: int) -> "_Keys":
        """Return the keys of step 0 alone, for so many rows."""
        return cls(k_BLGD, v_BLGD, *(x.new_empty(0, rows, *x.shape[2:]) for x in (k_BLGD, v_BLGD)))

    def add(self, k_RGD: Tensor, v_RGD: Tensor) -> "_Keys":
        """Return the keys with those of one more step."""
        own_k, own_v = torch.cat([self.own_k, k_RGD[None]]), torch.cat([self.own_v, v_RGD[None]])
        return _Keys(self.context_k, self.context_v, own_k, own_v)

    def narrow(self, kept: Tensor) -> "_Keys":
        """Return the keys of some of the rows."""
        return _Keys(self.context_k, self.context_v, self.own_k[:, kept], self.own_v[:, kept])


class TrainingPass:
    """The training pass of one batch, called in this order: `context_keys`, `first`, `step` 1, `step` 2, ...

    window: how many tokens a row sees, its own the last of them; None for all. Raises UserError where more `steps` are
    asked for than fit into it.
    """

    def __init__(
        self,
        first: EagleLayer,
        above: Sequence[PlainLayer],
        rotary: Rotary,
        position_BL: Tensor,
        plan: RowPlan,
        steps: int,
        window: int | None = None,
    ) -> None:
        if window is not None and steps > window:
            raise UserError(f"Drafts of {steps} tokens do not fit into head.sliding_window {window}: draft fewer.")
        self.first_layer, self.above = first, above
        self.rotary, self.position_BL = rotary, position_BL
        self.plan, self.window = plan, window
        self._keys: list[_Keys] = []
        self._like = torch.empty(0)

    def context_keys(self, x_BLX: Tensor, residual_BLH: Tensor) -> Tensor | None:
        """Compute the keys of step 0 from the first layer's input of all tokens. Return the input of the last layer, [B*L, H],
        zeros at tokens that no query row sees; None where there is one layer alone."""
        k_BLGD, v_BLGD = self.first_layer.self_attn.key_value(x_BLX)
        k_BLGD, shape, rows = rotate(k_BLGD, *self.rotary(k_BLGD, self.position_BL)), k_BLGD.shape, len(self.plan.rows)
        self._like, self._keys = k_BLGD, [_Keys.context(k_BLGD, v_BLGD, rows)]
        if not self.above:
            return None
        plan = self.plan.context.within(self.window)
        x, residual = (y.flatten(0, 1)[plan.rows] for y in (x_BLX, residual_BLH))
        cos_sin, layer = self._cos_sin(plan.rows), self.first_layer
        for following in self.above:
            seen = _Keys.context(self._keys[-1].context_k, self._keys[-1].context_v, len(plan.rows))
            hidden_TH = _run(layer, x, residual, cos_sin, seen, plan)
            x, residual = following.layer_input(hidden_TH)
            k_TGD, v_TGD = following.self_attn.key_value(x)
            k_BLGD = _spread(rotate(k_TGD, *cos_sin), plan.rows, shape)
            self._keys.append(_Keys.context(k_BLGD, _spread(v_TGD, plan.rows, shape), rows))
            layer = following
        return _spread(hidden_TH, plan.rows, (*shape[:2], hidden_TH.shape[-1])).flatten(0, 1)

    def first(self, x_RX: Tensor, residual_RH: Tensor) -> Tensor:
        """Return the last layer's output [R, H] of step 0 from that layer's input."""
        cos_sin, plan = self._cos_sin(self.plan.rows), self.plan.within(self.window)
        return _run(
            self.above[-1] if self.above else self.first_layer, x_RX, residual_RH, cos_sin, self._keys[-1], plan
        )

    def step(self, step: int, x_RX: Tensor, residual_RH: Tensor) -> Tensor:
        """Return the last layer's output [R, H] of step 1, 2, ... from the first layer's input ([1, ...] where every row has
        the same)."""
        cos_sin = self._cos_sin(self.plan.rows, step)
        out_RH = self._step(0, self.first_layer, x_RX, residual_RH, cos_sin, step)
        for number, layer in enumerate(self.above, 1):
            out_RH = self._step(number, layer, *layer.layer_input(out_RH), cos_sin, step)
        return out_RH

    def _step(
        self, number: int, layer: EagleLayer, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], step: int
    ) -> Tensor:
        k, v = layer.self_attn.key_value(x)
        k_RGD = rotate(k, *cos_sin)
        self._keys[number] = self._keys[number].add(k_RGD, v.expand_as(k_RGD))
        plan = self.plan.within(None if self.window is None else self.window - step)
        return _run(layer, x, residual, cos_sin, self._keys[number], plan)

    def narrow(self, plan: RowPlan, kept: Tensor) -> None:
        """Continue with the query rows of `plan` alone, which stand at `kept` among those so far."""
        self.plan = plan
        self._keys = [keys.narrow(kept) for keys in self._keys]

    def _cos_sin(self, rows: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return RoPE cosines and sines [R, D] of the rows' positions at a step, in the dtype of the keys."""
        cos, sin = self.rotary(self._like, self.position_BL.flatten()[rows][None] + step)
        return cos[0], sin[0]


def _run(
    layer: EagleLayer, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], keys: _Keys, plan: RowPlan
) -> Tensor:
    """Return the output of one layer for the rows of `plan`, which see these keys."""
    q_RND, scale = rotate(layer.self_attn.query(x), *cos_sin), layer.self_attn.head_dim**-0.5
    attended = ttt_attention(q_RND, keys.context_k, keys.context_v, keys.own_k, keys.own_v, plan, scale)
    return layer.layer_output(attended, residual)


def _spread(x_T: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return [B, L, ...] from the rows' [T, ...], zeros elsewhere."""
    return x_T.new_zeros(shape[0] * shape[1], *shape[2:]).index_copy(0, rows, x_T).view(tuple(shape))
