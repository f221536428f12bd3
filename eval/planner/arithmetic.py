"""The arithmetic of speculation: from tokens per round and costs to a speedup.

A round drafts K tokens and is verified by one target pass. Its accepted length tau counts the bonus token, so the target alone
has tau 1 (Leviathan et al. 2023, section 3.3).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCost:
    """What a round costs, in milliseconds, or in any other unit that all four share.

    alone: a token of the target alone, with all that its decoding loop does. verify: the target's pass over a draft. draft:
    proposing it. overhead: accepting, committing, and everything else between two rounds. Where a round was timed as a whole, verify
    and draft are None and overhead is all of it.
    """

    alone: float
    verify: float | None
    draft: float | None
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """The whole round."""
        return (self.verify or 0) + (self.draft or 0) + self.overhead

    @property
    def tau_needed(self) -> float:
        """The accepted length at which the round is as fast as the target alone."""
        return self.total / self.alone

    def speedup(self, tau: float) -> float:
        """Return decoding speed over that of the target alone."""
        return tau / self.tau_needed

    def total_at_most(self, tau: float, speedup: float = 1.0) -> float:
        """Return what the whole round may cost for that speedup."""
        return tau * self.alone / speedup

    def draft_at_most(self, tau: float, speedup: float = 1.0) -> float:
        """Return what proposing may cost for that speedup; negative where the target's pass alone costs more."""
        return self.total_at_most(tau, speedup) - (self.total - (self.draft or 0))

    def verify_at_most(self, tau: float, speedup: float = 1.0) -> float:
        """Return what the target's pass may cost for that speedup; negative where drafting alone costs more."""
        return self.total_at_most(tau, speedup) - (self.total - (self.verify or 0))
