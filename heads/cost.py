"""The cost of training a head, computed from its options and the target's dimensions: parameters, FLOPs, bytes.

Symbols: H hidden, I feed-forward width, N query heads, G key/value heads, D head size, A aux layers, V target vocab,
W draft vocab, K steps (or heads), L tokens of a text, P packed positions of a micro-batch, R_k rows supervised at step
k, R the rows of any step (= R_0: later steps lose rows at the ends of answers).

A product of [m, a] with [a, b] takes 2*m*a*b FLOPs forward. The backward pass takes as many for the gradient of each factor
that needs one; the input of `fc` and of Medusa's first block and the target's projection need none. Bytes are those of the
tensors that autograd keeps for the backward pass under bf16 autocast (2 bytes per activation, 4 inside norms and the loss),
with the flash attention that GPUs run. Tests count both on real heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftsmith.errors import UserError
from draftsmith.heads.registry import find_method, methods
from draftsmith.heads.target.shape import TargetShape


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
class HeadsCost:
    """Costs that drafters of several heads on the last hidden state share."""

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
        """4 with the target's projection, whose logits are fp32; 2 with the heads' own."""
        return 4 if self.options.original_lm_head else 2


def head_cost(method: str, options: Any, target: TargetShape) -> HeadCost:
    """Return the costs of a method. Raises UserError for a method without formulas."""
    cost = find_method(method).make_cost
    if cost is None:
        known = ", ".join(name for name, one in methods().items() if one.cost)
        raise UserError(f"There is no formula for the method {method!r} yet: a plan can be made for {known}.")
    return cost(options, target)
