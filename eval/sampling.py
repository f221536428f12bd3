"""From logits to the law that tokens are drawn from.

Shapes: B rows, V vocabulary (of target or draft).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}: it must be 0 (greedy) or larger.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (no limit) or larger.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1 (no limit).")

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the float32 law [..., V] of `logits` [..., V] after temperature, top-k and top-p, in this order.

    Ties at the k-th place are all kept; top-p keeps the smallest set of most likely tokens whose
    mass reaches top_p. Needs temperature > 0: a greedy choice is an argmax, not a law.
    """
    assert not sampling.greedy
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if the mass before it has not reached top_p yet.
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        ordered = ordered.masked_fill(beyond, 0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw one index per row in proportion to `weights_BV` (any positive sum) by inverting the CDF with `uniform_B`."""
    cdf_BV = weights_BV.double().cumsum(-1)
    point_B1 = (uniform_B.double() * cdf_BV[:, -1])[:, None]
    return torch.searchsorted(cdf_BV, point_B1, right=True)[:, 0].clamp_(max=weights_BV.shape[-1] - 1)
