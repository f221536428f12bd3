"""What speculators' EAGLE-3 training is made of on a CPU, in place of parts of it that want a GPU: the same results, cheaper.

Imported by the package's own Python beside `speculators_eagle3.py`, so it needs nothing but torch.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def document_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
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


class SupervisedLoss:
    """A loss per position of the package, computed for the supervised positions alone: of the others it drops what it gets.

    `mask` [1, L] is that of the row at hand; later steps lose the first positions, as the package aligns them.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss
        self.mask = torch.zeros(1, 0, dtype=torch.bool)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses [1, N] of logits and targets [1, N, W], zero where there is no supervision."""
        count = logits.shape[1]
        places = self.mask[0, self.mask.shape[1] - count :].nonzero().flatten()
        found = self.loss(logits.index_select(1, places), targets.index_select(1, places))
        return found.new_zeros(1, count).index_copy(1, places, found)


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
