"""End a chain before the token that would not pay, without looking at that token.

What is estimated is known before the token is drawn: the distribution that it will be drawn from, and the tokens before it. So a
drafted token is a sample of the distribution that it names, and the text stays the target's at every temperature. A rule that looked
at the token would keep those that it likes, which have another distribution than the one that acceptance divides by.

Shapes: B rows, K drafted tokens, R rows, W draft vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoder.draft import listed

BINS = 10
"""Parts of equal width of the top probability, each with a chance of its own."""


@dataclass(frozen=True)
class LengthRule:
    """A chain ends before the first token whose chance to be reached and accepted is below its floor.

    floors: of the first token, the second, ... chances: for each of these the chance that it is accepted, given that those before it are,
    by the part of [0, 1] that the largest probability of its distribution lies in; empty: that probability itself. made_from: in words.
    """

    floors: tuple[float, ...]
    chances: tuple[tuple[float, ...], ...] = ()
    made_from: str = ""

    def chance(self, k: int, logits_RW: Tensor) -> Tensor:
        """Return [R]: the chance that the k-th token is accepted, by the logits that it will be drawn by, before any sampling setting."""
        logits_RW = logits_RW.float()
        top_R = (logits_RW.amax(-1) - logits_RW.logsumexp(-1)).exp()
        if not self.chances:
            return top_R
        return listed(self.chances[k], top_R.device)[(BINS * top_R).long().clamp(max=BINS - 1)]

    def length(self, logits_BKW: Tensor) -> Tensor:
        """Return [B]: how many of K tokens are drafted whose distributions are known at once."""
        chance_BK = torch.stack([self.chance(k, logits_BW) for k, logits_BW in enumerate(logits_BKW.unbind(1))], 1)
        floors_K = listed(self.floors[: chance_BK.shape[1]], chance_BK.device)
        return (chance_BK.cumprod(1) >= floors_K).long().cumprod(1).sum(1)
