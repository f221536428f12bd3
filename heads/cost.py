"""The cost of training a head, computed from its options and the target's dimensions: parameters, FLOPs, bytes.

Symbols: H hidden, I feed-forward width, N query heads, G key/value heads, D head size, A aux layers, V target vocab,
W draft vocab, K steps (or heads), L tokens of a text, P packed positions of a micro-batch, R_k rows supervised at step
k, R the rows of any step (= R_0: later steps lose rows at the ends of answers).

A product of [m, a] with [a, b] takes 2*m*a*b FLOPs forward. The backward pass takes as many for the gradient of each factor
that needs one; the input of `fc` and of Medusa's first block and the target's projection need none. Bytes are those of the
tensors that autograd keeps for the backward pass under bf16 autocast (2 bytes per activation, 4 inside norms and the loss),
with the flash attention that GPUs run. Tests count both on real heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.registry import find_method, methods
from draftsmith.target.shape import TargetShape


@dataclass(frozen=True)
class HeadCost(ABC):
    """The costs of one method, for a head's options and its target's dimensions."""

    options: Any
    target: TargetShape

    @property
    @abstractmethod
    def steps(self) -> int:
        """K: steps or heads that the loss sums over."""

    @property
    @abstractmethod
    def matrices(self) -> int:
        """Trained parameters that Muon would take."""

    @property
    @abstractmethod
    def others(self) -> int:
        """Trained parameters that AdamW takes in any case."""

    @abstractmethod
    def product_flops(self, positions: float, rows: Sequence[float]) -> float:
        """FLOPs of all products with weights, forward and backward, over P positions with R_k rows."""

    @abstractmethod
    def attention_flops(self, positions: float, length: float) -> float:
        """FLOPs of the attention over P positions of texts of L tokens."""

    @abstractmethod
    def saved_bytes(self, positions: float, rows: Sequence[float]) -> float:
        """Bytes kept for the backward pass, the loss left out."""

    @property
    def aux_layers(self) -> int:
        """A: layers that the store holds besides the last hidden state."""
        layer_ids = getattr(self.options, "layer_ids", ())
        return 3 if layer_ids is None else len(layer_ids)

    @property
    def draft_vocab(self) -> int:
        """W: columns of the draft logits."""
        return min(getattr(self.options, "draft_vocab_size", None) or self.target.vocab, self.target.vocab)

    @property
    def logit_bytes(self) -> int:
        """Bytes of one draft logit, which stay until the backward pass: 2 with a projection of the head's own under autocast, 4
        with the target's, whose logits are fp32."""
        return 4 if getattr(self.options, "original_lm_head", False) else 2

    @property
    def head_size(self) -> int:
        """D of the draft's layers. This and the sizes below are the target's where the options leave them out."""
        return self.options.head_dim or self.target.head_dim

    @property
    def query_heads(self) -> int:
        """N of the draft's layers."""
        return self.options.num_attention_heads or self.target.heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """N*D, G*D and I (called FF) of the draft's layers."""
        groups, width = self.options.num_key_value_heads or self.target.groups, self.options.intermediate_size
        return self.query_heads * self.head_size, groups * self.head_size, width or self.target.feed_forward


def flash_flops(inner: int, positions: float, length: float) -> float:
    """Return the FLOPs of one layer's flash kernel, N*D being `inner`, over whole texts: per position and key before it, L/2 on
    average, two products of 2*N*D forward and five backward."""
    return 7 * 2 * inner * positions * length / 2


def head_cost(method: str, options: Any, target: TargetShape) -> HeadCost:
    """Return the costs of a method. Raises UserError for a method without formulas."""
    cost = find_method(method).make_cost
    if cost is None:
        known = ", ".join(name for name, one in methods().items() if one.cost)
        raise UserError(f"There is no formula for the method {method!r} yet: a plan can be made for {known}.")
    return cost(options, target)
