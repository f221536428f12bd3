"""What chooses a step's token among its likeliest.

Shapes: R rows, H hidden, V target vocab, W draft vocab, r rank, C candidates, m nodes of a tree's last level.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.decoder.growth import Beam


class Selector(nn.Module):
    """Chooses a step's token among its `top_k` likeliest by scores of pairs of tokens (DFlash2). Parameters are named as in the published
    files: predecessor_codebook [V, r]; successor_codebook [W, r] starts at zero, so that the first drafts are DFlash's."""

    def __init__(self, top_k: int, vocab_size: int, draft_vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=rank**-0.5)

    def queries(self, states: Tensor, before: Tensor) -> Tensor:
        """A step's states [..., H] and the tokens before [...] -> what the successors are compared with, [..., r]."""
        return F.embedding(before, self.predecessor_codebook) * self.hidden_projection(states)

    def rescore(self, candidates: Tensor, logits: Tensor, query: Tensor) -> Tensor:
        """Candidates [..., C] with their logits, and queries [..., r] -> scores [..., C] in fp32."""
        successors = F.embedding(candidates, self.successor_codebook)
        return logits.float() + torch.einsum("...cr,...r->...c", successors.float(), query.float())

    def candidates(self, logits: Tensor) -> Tensor:
        """Logits [R, W] -> the indices [R, C] of the likeliest, these first."""
        return logits.topk(min(self.top_k, logits.shape[-1]), -1).indices

    def chosen(self, logits: Tensor, states: Tensor, query: Tensor) -> Tensor:
        """Return the scores [R, W] that a token is drafted by, from a step's logits and inputs: -inf at all but the candidates."""
        among = self.candidates(logits)
        scores = self.rescore(among, logits.gather(-1, among), query)
        return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, among, scores)

    def extend(self, beam: Beam, logits: Tensor, states: Tensor, target_ids: Callable[[Tensor], Tensor]) -> Beam:
        """Add a level to trees that grow, from a step's logits [R, W] and states [R, H]: every node's children are chosen by its own
        token."""
        among = self.candidates(logits)[:, None]
        query = self.queries(states[:, None], beam.tokens_Bm)
        scores_RmC = self.rescore(among, logits[:, None].gather(-1, among), query)
        every = among.expand(scores_RmC.shape)
        return beam.extend(scores_RmC, lambda chosen: target_ids(every.gather(-1, chosen)))
