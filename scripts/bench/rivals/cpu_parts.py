"""Replace the parts of speculators' EAGLE-3 training that need a GPU, with the same results on a CPU.

Imported by the package's own Python beside `speculators_eagle3.py`, so it needs nothing but torch.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def document_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention of a training-time-test step under the package's dense mask, a document at a time.

    query [1, A, L, D]; key and value [1, G, T*L, D] of T steps, of which a row sees its document up to itself in the first and
    itself alone in the others; attention_mask [1, 1, L, T*L], True where a row sees. Returns the outputs [1, L, A, D]. No
    other weight than the mask's zeros is left out; a block-sparse kernel skips them too.
    """
    rows, groups = query.shape[2], query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1).unflatten(2, (-1, rows))
    values = value.repeat_interleave(groups, 1).unflatten(2, (-1, rows))
    query = query * scaling
    own = (query.unsqueeze(2) * keys[:, :, 1:]).sum(-1).transpose(2, 3)  # [1, A, L, T - 1]
    parts = []
    for start, end in blocks(attention_mask[0, 0, :, :rows]):
        here = slice(start, end)
        scores = query[:, :, here] @ keys[:, :, 0, here].transpose(2, 3)
        scores = scores.masked_fill(~attention_mask[:, :, here, here], float("-inf"))
        weights = torch.cat([scores, own[:, :, here]], -1).softmax(-1)
        seen, alone = weights.split([end - start, own.shape[3]], -1)
        later = (alone.transpose(2, 3).unsqueeze(-1) * values[:, :, 1:, here]).sum(2)
        parts.append(seen @ values[:, :, 0, here] + later)
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def blocks(mask: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows that see nothing outside of them, by a causal mask [L, L]: documents, and runs of padding, where every
    row sees itself alone."""
    rows = len(mask)
    begins = mask.byte().argmax(-1) == torch.arange(rows)
    alone = begins & torch.cat([begins[1:], torch.ones(1, dtype=torch.bool)])
    joined = alone & torch.cat([torch.zeros(1, dtype=torch.bool), alone[:-1]])
    cuts = [*(begins & ~joined).nonzero().flatten().tolist(), rows]
    yield from pairwise(cuts)


class Supervision:
    """What of a packed row is supervised, so that logits and losses are computed there alone: the package drops the others.

    At step k (0, 1, ...) the logits of place i stand for the label of place i + k, as the package aligns them.
    """

    def __init__(self) -> None:
        self.mask = torch.zeros(1, 0, dtype=torch.bool)
        self.step = 0

    def begin(self, mask: Tensor) -> None:
        """Go on with a row of the mask [1, L], at its first step."""
        self.mask, self.step = mask, 0

    def places(self, step: int) -> Tensor:
        """The places whose logits count at a step."""
        return self.mask[0, step:].nonzero().flatten()

    def project(self, linear: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
        """A forward pass of the output projection, [1, L, H] -> [1, L, W], once a step; zero where nothing counts."""

        def forward(states: Tensor) -> Tensor:
            places = self.places(self.step)
            self.step += 1
            found = torch.nn.functional.linear(states.index_select(1, places), linear.weight, linear.bias)
            return found.new_zeros(*states.shape[:2], found.shape[-1]).index_copy_(1, places, found)

        return forward

    def loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """A loss [1, N] of logits and targets [1, N, W], N = L less the step; zero where nothing counts."""

        def forward(logits: Tensor, targets: Tensor) -> Tensor:
            count = logits.shape[1]
            places = self.places(self.mask.shape[1] - count)
            found = loss(logits.index_select(1, places), targets.index_select(1, places))
            return found.new_zeros(1, count).index_copy_(1, places, found)

        return forward


def orthogonalise(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """torch's own iteration for Muon over a matrix [m, n], rounded to bf16 where that rounds, multiplied in fp32."""
    (a, b, c), tall = ns_coefficients, grad.shape[0] > grad.shape[1]
    x = grad.bfloat16().T if tall else grad.bfloat16()
    x = (x / x.norm().clamp(min=eps)).float()
    for _ in range(ns_steps):
        gram = (x @ x.T).bfloat16().float()
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c).bfloat16().float()
        x = torch.addmm(x, gram, x, beta=a).bfloat16().float()
    return (x.T if tall else x).bfloat16()
