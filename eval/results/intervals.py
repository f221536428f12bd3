"""Means and intervals over prompts, and percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

Interval = tuple[float, float]
FEWEST_PROMPTS = 10
"""No interval over prompts is given of fewer: resampling them says little about prompts that are not among them."""
WITHIN = 0.02
"""The half-width of an interval, as a share of the number, that is worth asking for."""


@dataclass(frozen=True)
class Percentiles:
    """Seconds: the median and the 95th percentile, over requests or tokens."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """Return those of some values, None of none."""
        return cls(*map(float, np.percentile(values, (50, 95)))) if values else None


def mean_tau(prompts: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean of the prompts' own tau, each prompt weighing the same; prompts: see `bootstrap_tau`."""
    ratios = [tokens / rounds for tokens, rounds in prompts if rounds]
    return sum(ratios) / len(ratios) if ratios else None


def bootstrap_tau(
    prompts: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]] | None = None, draws: int = 1000
) -> Interval | None:
    """Return the 95% interval of tau, all tokens over all rounds, by resampling prompts; None where there are fewer than
    FEWEST_PROMPTS with a round.

    prompts: tokens and rounds of each, all answers to it together. before: those of the same prompts in the same order with another
    drafter; the interval is then of tau minus the other one's tau, on the same resampled prompts.
    """
    both = [prompts] if before is None else [prompts, before]
    sides = np.array(both).reshape(len(both), -1, 2)
    # A prompt counts in both taus where one drafter alone had rounds for it.
    sides = sides[:, (sides[..., 1] > 0).any(0)]
    if (sides[..., 1] > 0).sum(1).min() < FEWEST_PROMPTS:
        return None
    picks = np.random.default_rng(0).integers(0, sides.shape[1], (draws, sides.shape[1]))
    sums = sides[:, picks].sum(2)
    sums = sums[:, (sums[..., 1] > 0).all(0)]
    taus = sums[..., 0] / sums[..., 1]
    low, high = np.percentile(taus[0] if before is None else taus[0] - taus[1], [2.5, 97.5])
    return float(low), float(high)


def prompts_needed(value: float, interval: Interval, prompts: int) -> int:
    """Return how many prompts of the same kind would bring an interval to +-WITHIN of the value: its width falls with their root."""
    half = (interval[1] - interval[0]) / 2 / value
    return max(1, ceil(round(prompts * (half / WITHIN) ** 2, 6)))


def wilson(share: float, count: int) -> Interval:
    """Return Wilson's 95% interval of a share of `count` (Journal of the American Statistical Association 22, 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return middle - half, middle + half
