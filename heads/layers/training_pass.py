"""Run the steps of EAGLE's training pass through a head's decoder layers.

Every layer keeps the keys and values of step 0 (the context keys) of all tokens that a query row may see; they are
computed from the target's states, as those of the text's tokens are in decoding. Each query row adds its own keys of steps
1..k. Shapes: B batch rows, L tokens, R query rows (flat b*L+t), H draft hidden, N query heads, G key/value heads,
D head size, S steps so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.layers.compiled import compiled, is_compiling
from draftsmith.heads.layers.decoder_layer import EagleLayer, PlainLayer, Rotary
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.shared import Rows, SharedLinear, gated, turn
from draftsmith.heads.layers.ttt_attention import ttt_attention


@dataclass(frozen=True)
class LayerInput:
    """What a layer reads: x [..., X], the attention's input, and the residual [..., H].

    start: what queries, keys and values are without x, where that is known already; x then stands for the weights' `columns` alone.
    """

    x: Tensor
    residual: Tensor
    start: Rows | None = None
    columns: slice = field(default_factory=lambda: slice(None))

    def select(self, rows: Tensor) -> "LayerInput":
        """Return what some of the rows read."""
        start = None if self.start is None else Rows(self.start.table, self.start.index[rows])
        return LayerInput(self.x[rows], self.residual[rows], start, self.columns)


@dataclass(frozen=True)
class Keys:
    """One layer's keys and values: context_k, context_v [B, L, G, D] of step 0; own_k, own_v [1, R, G, D] of each later
    step."""

    context_k: Tensor
    context_v: Tensor
    own_k: tuple[Tensor, ...] = ()
    own_v: tuple[Tensor, ...] = ()

    def add(self, k_RGD: Tensor, v_RGD: Tensor) -> "Keys":
        """Return the keys with those of one more step."""
        return Keys(self.context_k, self.context_v, (*self.own_k, k_RGD[None]), (*self.own_v, v_RGD[None]))

    def narrow(self, kept: Tensor) -> "Keys":
        """Return the keys of some of the rows."""
        own_k, own_v = (tuple(x[:, kept] for x in own) for own in (self.own_k, self.own_v))
        return Keys(self.context_k, self.context_v, own_k, own_v)


class _Layer:
    """A decoder layer in one pass, whose weights all steps share."""

    def __init__(self, layer: EagleLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.activation = layer, mlp.act_fn
        self.heads = SharedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.gate_up = SharedLinear(attention.o_proj), SharedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = SharedLinear(mlp.down_proj)
        self.head_dim = attention.head_dim
        self.sizes = [n // attention.head_dim for n in self.heads.sizes]

    def attend(self, given: LayerInput, cos_sin: tuple[Tensor, Tensor], first: int, end: int) -> list[Tensor]:
        """Return queries (0), keys (1) and values (2) from the first of these to before the end, [R, heads, D],
        rotated, of as many rows as have cosines and sines."""
        places = [0, *accumulate(self.heads.sizes)]
        x = self.heads(given.x, slice(places[first], places[end]), given.columns, given.start)
        sizes = [n if first <= i < end else 0 for i, n in enumerate(self.sizes)]
        heads = self.layer.self_attn.normalise(x.unflatten(-1, (-1, self.head_dim)), sizes)
        heads = heads.expand(len(cos_sin[0]), -1, -1)
        return list(turn(heads, *cos_sin, sizes))[first:end]

    def output(self, attended_RND: Tensor, residual_RH: Tensor) -> Tensor:
        """Return the layer's output [R, H]."""
        norm, out_RH = self.layer.post_attention_layernorm, self.out(attended_RND.flatten(-2))
        if is_compiling():
            like = self.gate_up.parts[0].dtype
            residual_RH, normed_RH = _add_and_norm(residual_RH, out_RH, norm.weight, norm.variance_epsilon, like)
        else:
            residual_RH = residual_RH + out_RH
            normed_RH = norm(residual_RH)
        return residual_RH + self.down(gated(self.gate_up(normed_RH), self.activation))


@compiled
def _add_and_norm(
    residual_RH: Tensor, out_RH: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum, and its RMS norm in the dtype of the product that reads it."""
    sum_RH = residual_RH + out_RH
    wide = torch.promote_types(sum_RH.dtype, weight_H.dtype)
    return sum_RH, F.rms_norm(sum_RH.to(wide), weight_H.shape, weight_H.to(wide), eps).to(dtype)


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
        self.above, self.layers = above, [_Layer(layer) for layer in (first, *above)]
        self.rotary, self.position_BL = rotary, position_BL
        self.plan, self.window, self.steps = plan, window, steps
        self._keys: list[Keys] = []
        self._rotations: tuple[Tensor, Tensor]
        self._like = self.layers[0].heads.parts[0]

    def context_keys(self, given: LayerInput) -> Tensor | None:
        """Compute the keys of step 0 from the first layer's input of all tokens, [B*L, ...]. Return the input of the last layer, [B*L, H],
        zeros at tokens that no query row sees; None where there is one layer alone."""
        shape = (*self.position_BL.shape, self.layers[0].sizes[1], self.layers[0].head_dim)
        cos_TD, sin_TD = (x.flatten(0, 1) for x in self.rotary(self._like, self.position_BL))
        steps_S1 = torch.arange(self.steps, device=cos_TD.device)[:, None]
        # Of all steps together, since each call is ten kernels.
        self._rotations = self.rotary(self._like, self.position_BL.flatten()[self.plan.rows] + steps_S1)
        k, v = self.layers[0].attend(given, (cos_TD, sin_TD), 1, 3)
        self._keys = [Keys(k.view(shape), v.view(shape))]
        if not self.above:
            return None
        plan = self.plan.context.within(self.window)
        cos_sin, inner = (cos_TD[plan.rows], sin_TD[plan.rows]), given.select(plan.rows)
        for number, (layer, following) in enumerate(zip(self.layers, self.layers[1:], strict=False)):
            hidden_TH = self._run(layer, inner, cos_sin, self._keys[-1], plan)
            inner = LayerInput(*self.above[number].layer_input(hidden_TH))
            k_TGD, v_TGD = following.attend(inner, cos_sin, 1, 3)
            self._keys.append(Keys(_spread(k_TGD, plan.rows, shape), _spread(v_TGD, plan.rows, shape)))
        return _spread(hidden_TH, plan.rows, (*shape[:2], hidden_TH.shape[-1])).flatten(0, 1)

    def first(self, given: LayerInput) -> Tensor:
        """Return the last layer's output [R, H] of step 0 from that layer's input."""
        plan = self.plan.within(self.window)
        return self._run(self.layers[-1], given, self._at(0), self._keys[-1], plan)

    def step(self, step: int, given: LayerInput) -> Tensor:
        """Return the last layer's output [R, H] of step 1, 2, ... from the first layer's input ([1, ...] where every row has
        the same)."""
        cos_sin = self._at(step)
        out_RH = self._step(0, given, cos_sin, step)
        for number, layer in enumerate(self.above, 1):
            out_RH = self._step(number, LayerInput(*layer.layer_input(out_RH)), cos_sin, step)
        return out_RH

    def _step(self, number: int, given: LayerInput, cos_sin: tuple[Tensor, Tensor], step: int) -> Tensor:
        layer, plan = self.layers[number], self.plan.within(None if self.window is None else self.window - step)
        q, k, v = layer.attend(given, cos_sin, 0, 3)
        self._keys[number] = self._keys[number].add(k, v)
        return self._attended(layer, q, given.residual, self._keys[number], plan)

    def _run(
        self, layer: _Layer, given: LayerInput, cos_sin: tuple[Tensor, Tensor], keys: Keys, plan: RowPlan
    ) -> Tensor:
        """Return the output of one layer for the rows of `plan`, which see these keys."""
        (q_RND,) = layer.attend(given, cos_sin, 0, 1)
        return self._attended(layer, q_RND, given.residual, keys, plan)

    def _attended(self, layer: _Layer, q_RND: Tensor, residual_RH: Tensor, keys: Keys, plan: RowPlan) -> Tensor:
        scale = layer.head_dim**-0.5
        attended = ttt_attention(q_RND, keys.context_k, keys.context_v, keys.own_k, keys.own_v, plan, scale)
        return layer.output(attended, residual_RH)

    def narrow(self, plan: RowPlan, kept: Tensor) -> None:
        """Continue with the query rows of `plan` alone, which stand at `kept` among those so far."""
        self.plan = plan
        self._keys = [keys.narrow(kept) for keys in self._keys]
        cos, sin = self._rotations
        self._rotations = (cos[:, kept], sin[:, kept])

    def _at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return RoPE cosines and sines [R, D] of the query rows' positions at a step, in the dtype of the keys."""
        cos, sin = self._rotations
        return cos[step], sin[step]


def _spread(x_T: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return [B, L, ...] from the rows' [T, ...], zeros elsewhere."""
    return x_T.new_zeros(shape[0] * shape[1], *shape[2:]).index_copy(0, rows, x_T).view(tuple(shape))
