"""End a chain before the token that would not pay, without looking at that token.

What is estimated is known before the token is drawn: the distribution that it will be drawn from, and the tokens before it. So a
drafted token is a sample of the distribution that it names, and the text stays the target's at every temperature. A rule that looked
at the token would keep those that it likes, which have another distribution than the one that acceptance divides by.

Shapes: B rows, K drafted tokens, R rows, W draft vocab.
"""

from dataclasses import dataclass

from torch import Tensor

from draftsmith.decoder.draft import listed


@dataclass(frozen=True)
class LengthRule:
    """A chain ends before the first token whose chance to be reached and accepted is below its floor.

    floors: of the first token, the second, ...; one above 1 ends every draft there. The chance is the product of the largest
    probabilities of the distributions so far, or of a head's own confidences.
    """

    floors: tuple[float, ...]

    @property
    def name(self) -> str:
        """The rule in a drafter's name."""
        alike = len(set(self.floors)) == 1 and 0 < self.floors[0] < 1
        return f" until {self.floors[0]:g}" if alike else " adaptive"

    def chance(self, logits_RW: Tensor) -> Tensor:
        """Return [R]: the chance that a token is accepted, by the logits that it will be drawn by, before any sampling setting."""
        logits_RW = logits_RW.float()
        return (logits_RW.amax(-1) - logits_RW.logsumexp(-1)).exp()

    def length(self, logits_BKW: Tensor) -> Tensor:
        """Return [B]: how many of K tokens are drafted whose distributions are known at once."""
        floors_K = listed(self.floors[: logits_BKW.shape[1]], logits_BKW.device)
        return (self.chance(logits_BKW).cumprod(1) >= floors_K).long().cumprod(1).sum(1)
