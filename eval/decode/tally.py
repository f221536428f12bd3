"""Counts of accepted drafts, from which every acceptance figure is computed.

Counts are whole numbers when decoded and expectations when simulated. K is num_speculative_tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from draftsmith.eval.decode.decode import Generation


@dataclass(frozen=True)
class Tally:
    """Sums over answers.

    answers: how many. tokens: emitted after each answer's first. rounds: target passes. drafted:
    tokens proposed that could still be emitted, all nodes of a tree. accepted_K / reached_K: rounds in which position i
    was accepted / in which every position before it was accepted and a token was drafted there.
    """

    answers: int
    tokens: float
    rounds: float
    drafted: float
    accepted_K: np.ndarray
    reached_K: np.ndarray

    @classmethod
    def empty(cls, num_speculative_tokens: int) -> "Tally":
        """A tally of nothing."""
        return cls(0, 0.0, 0.0, 0.0, np.zeros(num_speculative_tokens), np.zeros(num_speculative_tokens))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.answers + other.answers,
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted_K + other.accepted_K,
            self.reached_K + other.reached_K,
        )

    @property
    def tau(self) -> float | None:
        """Tokens emitted per round, the bonus included (sums, never a mean of ratios)."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return float(self.accepted_K.sum() / self.drafted) if self.drafted else None

    @property
    def acceptance_at(self) -> list[float]:
        """P(position i accepted), unconditional."""
        return [float(x / self.rounds) for x in self.accepted_K] if self.rounds else []

    @property
    def alpha_at(self) -> list[float | None]:
        """P(position i accepted, given that all before it were); None where no round came that far."""
        pairs = zip(self.accepted_K, self.reached_K, strict=True)
        return [float(accepted / reached) if reached else None for accepted, reached in pairs]


def total(tallies: Iterable[Tally], num_speculative_tokens: int) -> Tally:
    """Add up tallies."""
    return sum(tallies, Tally.empty(num_speculative_tokens))


def tally_generation(generation: Generation, num_speculative_tokens: int) -> Tally:
    """Count the rounds of one decoded answer."""
    accepted_K = np.zeros(num_speculative_tokens)
    reached_K = np.zeros(num_speculative_tokens)
    drafted = 0
    for round_ in generation.rounds:
        left = len(generation.output_ids) - 1 - round_.root
        depth = min(len(round_.levels) or round_.drafted, left)
        accepted_K[: round_.accepted] += 1
        reached_K[: min(round_.accepted + 1, depth)] += 1
        drafted += sum(round_.levels[:left]) if round_.levels else depth
    tokens = len(generation.output_ids) - 1
    return Tally(1, tokens, len(generation.rounds), drafted, accepted_K, reached_K)
