"""What chooses a step's token among its likeliest.

Shapes: R rows, W draft vocab, C candidates, m nodes of a tree's last level.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoder.growth import Beam


@dataclass(frozen=True)
class Selector:
    """Chooses a step's token among its likeliest (DFlash2).

    Attributes:
        top_k: how many.
        rescore: their indices [R, C], their logits, and what of a step's `inputs` is not its states -> their scores [R, C].
        query: a step's states, and the tokens before -> what `rescore` takes of it.
    """

    top_k: int
    rescore: Callable[..., Tensor]
    query: Callable[[Tensor, Tensor], Tensor]

    def candidates(self, logits: Tensor) -> Tensor:
        """Logits [R, W] -> the indices [R, C] of the likeliest, these first."""
        return logits.topk(min(self.top_k, logits.shape[-1]), -1).indices

    def chosen(self, logits: Tensor, states: Tensor, *more: Tensor) -> Tensor:
        """Return the scores [R, W] that a token is drafted by, from a step's logits and inputs: -inf at all but the candidates."""
        among = self.candidates(logits)
        scores = self.rescore(among, logits.gather(-1, among), *more)
        return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, among, scores)

    def extend(self, beam: Beam, logits: Tensor, states: Tensor, target_ids: Callable[[Tensor], Tensor]) -> Beam:
        """Add a level to trees that grow, from a step's logits [R, W] and states [R, H]: every node's children are chosen by its own
        token."""
        among = self.candidates(logits)[:, None]
        scores_RmC = self.rescore(among, logits[:, None].gather(-1, among), self.query(states[:, None], beam.tokens_Bm))
        every = among.expand(scores_RmC.shape)
        return beam.extend(scores_RmC, lambda chosen: target_ids(every.gather(-1, chosen)))
