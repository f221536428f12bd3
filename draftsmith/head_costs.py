"""What training a head costs, from its options and the target's dimensions: parameters, FLOPs, bytes.

Symbols: H hidden, I feed-forward width, N query heads, G key/value heads, D head size, A aux layers, V target vocab,
W draft vocab, K steps (or heads), L tokens of a text, P packed positions of a micro-batch, R_k rows supervised at step
k, R the rows of any step (= R_0: later steps lose rows at the ends of answers).

A product of [m, a] with [a, b] takes 2*m*a*b FLOPs forward. Backward it takes that twice, for the gradients of both
factors, and once where one factor needs none: the input of `fc` and of Medusa's first block, the target's projection.
The bytes are those of the tensors that autograd keeps for the backward pass under bf16 autocast (2 bytes per
activation, 4 inside norms and the loss), with the flash attention that GPUs run; tests count both on real heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftsmith.errors import UserError
from draftsmith.heads.eagle1_options import Eagle1Options
from draftsmith.heads.loss_spec import LossSpec
from draftsmith.heads.medusa_options import MedusaOptions
from draftsmith.heads.registry import METHODS, find_method
from draftsmith.target_shape import TargetShape


class HeadCost(Protocol):
    """The costs of one method."""

    @property
    def steps(self) -> int:
        """K: steps or heads that the loss sums over."""

    @property
    def aux_layers(self) -> int:
        """A: layers that the store holds besides the last hidden state."""

    @property
    def matrices(self) -> int:
        """Trained parameters that Muon would take."""

    @property
    def others(self) -> int:
        """Trained parameters that AdamW takes in any case."""

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """FLOPs of all products with weights, forward and backward, over P positions with R_k rows."""

    def attention_flops(self, positions: float, length: float) -> float:
        """FLOPs of the attention over P positions of texts of L tokens."""

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Bytes kept for the backward pass, the loss left out."""

    @property
    def draft_vocab(self) -> int:
        """W: columns of the draft logits."""

    @property
    def logit_bytes(self) -> int:
        """Bytes of one draft logit, which stay until the backward pass."""


@dataclass(frozen=True)
class EagleCost:
    """What EAGLE's drafters have in common: one layer, run K times over texts."""

    options: Any
    target: TargetShape

    @property
    def _inner(self) -> tuple[int, int, int]:
        """N*D, G*D and I (FF below) of the draft layer; what the options leave out is the target's."""
        o, t = self.options, self.target
        size = o.head_dim or t.head_dim
        heads, groups = o.num_attention_heads or t.heads, o.num_key_value_heads or t.groups
        return heads * size, groups * size, o.intermediate_size or t.feed_forward

    @property
    def steps(self) -> int:
        """K."""
        raise NotImplementedError

    def attention_flops(self, positions: float, length: float) -> float:
        """At every step a flash kernel takes the whole texts: per position and key before it, L/2 on average, two
        products of 2*N*D forward and five backward. A row's own keys, one per step, are left out."""
        return self.steps * 7 * 2 * self._inner[0] * positions * length / 2


@dataclass(frozen=True)
class Eagle1Cost(EagleCost):
    """EAGLE-1: the projection of [embedding, state], one layer run K times (aligned passes), the target's projection."""

    options: Eagle1Options

    aux_layers = 0
    logit_bytes = 4

    @property
    def steps(self) -> int:
        return self.options.aligned_passes

    @property
    def draft_vocab(self) -> int:
        return self.target.vocab

    @property
    def matrices(self) -> int:
        """fc [H, 2H]; q [N*D, H], k and v [G*D, H], o [H, N*D]; gate and up [I, H], down [H, I]."""
        H, (ND, GD, FF) = self.target.hidden, self._inner
        return 2 * H * H + H * (ND + 2 * GD) + ND * H + 3 * FF * H

    @property
    def others(self) -> int:
        """The layer's one norm [H]; biases of fc [H] and of q, k and v."""
        H, (ND, GD, _) = self.target.hidden, self._inner
        return H + self.options.fc_bias * H + self.options.qkv_bias * (ND + 2 * GD)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On all P positions: fc (forward and its weights' gradient), keys and values of step 0. On R rows, K times: fc,
        q, o and the feed-forward layer; the row's own keys and values from step 1 on. An output that is no given of the
        next step takes fc's other gradient, too. Logits on R_k rows, without gradients of weights; the teacher's, once
        on R rows, without a backward pass."""
        H, (ND, GD, FF), V, K = self.target.hidden, self._inner, self.target.vocab, self.steps
        R, flowing = max(rows), 0 if self.options.detach_passes else 4 * H * H
        fused = (8 * H * H + 12 * H * GD) * positions
        layer = K * R * (8 * H * H + 6 * (2 * ND * H + 3 * FF * H)) + (K - 1) * R * (12 * H * GD + flowing)
        return fused + layer + 4 * H * V * sum(rows) + 2 * H * V * R

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per row and step: gate, up, their activation and product (8I), the inputs of fc, the layer, the norm and the
        projections (16H), feature and state of the feature loss in fp32 (8H), the attention's query and output (4*N*D) and
        log-sum-exp (4N), and the row's own keys and values, gathered anew at each step. Per position once: the inputs of
        fc and of the layer (6H), keys and values (8*G*D)."""
        H, (ND, GD, FF), K = self.target.hidden, self._inner, self.steps
        N = self.options.num_attention_heads or self.target.heads
        per_row = sum(8 * FF + 24 * H + 4 * ND + 4 * N + 4 * GD * (k + 1) for k in range(K))
        return max(rows) * per_row + positions * (6 * H + 8 * GD)


@dataclass(frozen=True)
class HeadsCost:
    """What drafters of several heads on the last hidden state have in common."""

    options: Any
    target: TargetShape

    aux_layers = 0

    @property
    def steps(self) -> int:
        return self.options.num_heads

    @property
    def draft_vocab(self) -> int:
        return self.target.vocab

    @property
    def logit_bytes(self) -> int:
        """The target's projection gives fp32 logits, the heads' own bf16 ones."""
        return 4 if self.options.original_lm_head else 2


@dataclass(frozen=True)
class MedusaCost(HeadsCost):
    """Medusa: residual blocks on the last hidden state, and a projection onto the whole vocabulary."""

    options: MedusaOptions

    @property
    def matrices(self) -> int:
        """A block's weight is [H, H]."""
        return self.options.num_heads * self.options.num_layers * self.target.hidden**2

    @property
    def others(self) -> int:
        """A block's bias [H], and with projections of their own [V, H] per head."""
        own = 0 if self.options.original_lm_head else self.target.vocab * self.target.hidden
        return self.options.num_heads * (self.options.num_layers * self.target.hidden + own)

    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """On R_k rows of head k: blocks of 2*H*H (the first one's input needs no gradient) and logits of 2*H*V, whose
        backward pass leaves the weights out where they are the target's; the teacher's logits once on R rows."""
        H, V, blocks = self.target.hidden, self.target.vocab, self.options.num_layers
        per_row = (6 * blocks - 2) * H * H + (4 if self.options.original_lm_head else 6) * H * V
        return sum(rows) * per_row + 2 * H * V * max(rows)

    def attention_flops(self, positions: float, length: float) -> float:
        """There is none."""
        return 0.0

    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Per row, head and block the input and what SiLU takes, in bf16; a projection of its own keeps its input."""
        own = 0 if self.options.original_lm_head else 2
        return sum(rows) * self.target.hidden * (4 * self.options.num_layers + own)


def tuned_parameters(cost: HeadCost) -> int:
    """Return how many weights a target that is tuned with the head has of its own, by `tuned_parameters` of its costs."""
    return int(getattr(cost, "tuned_parameters", 0))


def learned_rows(cost: HeadCost, rows: Sequence[float]) -> Sequence[float]:
    """Return how many of a text's rows supervised at each step a head learns from: all, unless its costs say otherwise by
    a method of this name, since it is trained on a sample."""
    sampled = getattr(cost, "learned_rows", None)
    return rows if sampled is None else sampled(rows)


def head_cost(method: str, options: Any, target: TargetShape) -> HeadCost:
    """Return the costs of a method. Raises UserError where nobody wrote its formulas down."""
    cost = find_method(method).cost
    if cost is None:
        known = ", ".join(name for name, one in METHODS.items() if one.cost_path)
        raise UserError(f"There is no formula for the method {method!r} yet: a plan can be made for {known}.")
    return cost(options, target)


# Counted in [R, W] of fp32: the teacher's law, a copy of it for the step at hand, and what the loss makes of the two laws.
_WORKING = {"kl": 2, "soft_ce": 2, "hard_ce": 3, "tv": 3, "lk_alpha": 3, "lk_hybrid": 4, "reverse_kl": 4, "jsd": 7}


def activation_bytes(cost: HeadCost, positions: float, rows: Sequence[float], loss: LossSpec) -> float:
    """Bytes at the end of the loss, where a training pass takes most.

    What the head keeps; and per row and step the draft logits, their fp32 log-softmax, and, but for hard
    cross-entropy, the teacher's fp32 law. Then the teacher's law on all R rows, and what the loss of one step works with.
    """
    kinds = {loss.kind, *loss.also}
    hard = kinds == {"hard_ce"}
    logits = cost.draft_vocab * (cost.logit_bytes + (4 if hard else 8)) * sum(rows)
    working = cost.draft_vocab * 4 * max(_WORKING[kind] for kind in kinds) * max(rows)
    return cost.saved_bytes(positions, rows) + logits + working


def parameter_bytes(cost: HeadCost, optimizer: str, gpus: int) -> float:
    """Weights, gradients, optimizer state and copies of all trained parameters, per GPU.

    Per parameter: fp32 weight 4, gradient 4, AdamW's two moments 8 (Muon's one 4, for the matrices inside the head),
    autocast's bf16 copy 2; with several processes DDP's gradient buckets, 4 more.
    """
    inner = 4 if optimizer == "muon" else 8
    shared = 4 + 4 + 2 + (4 if gpus > 1 else 0)
    return cost.matrices * (shared + inner) + cost.others * (shared + 8)
