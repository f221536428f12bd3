"""Tell whether samples follow a distribution: chi-square over bins, total variation with an interval, and the samples that a power needs.

A test sums over prompts, each with bins of its own. Bins hold equal parts of the mass as far as tokens allow, those of the most likely
texts first. They are made of the target's exact probabilities, or of both samples together: under equality the two are exchangeable, so
such bins favour neither.

Shapes: n, m samples of a prompt, k its bins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, pi, sqrt

import numpy as np
import torch

from draftsmith.eval.results.intervals import Interval

_FEWEST = 10
"""A bin has at least so many samples, of both sides together; of one side it is expected to have half of them."""
_OUTSIDE = 0.01
"""The probability that total variation lies outside of its interval."""


@dataclass(frozen=True)
class Check:
    """One test over all prompts.

    what: which tokens, against what. samples: ours. reference: the target's own, 0 for exact probabilities. chi_square, freedom, p: of
    the test. distance: mean total variation over the prompts' bins, as counted. chance: what it would be on average if there were no
    difference. interval: holds the true one with 99%, whatever the distributions (McDiarmid 1989). power: to see the wanted distance.
    """

    what: str
    samples: int
    reference: int
    chi_square: float
    freedom: int
    p: float
    distance: float
    chance: float
    interval: Interval
    power: float


@dataclass(frozen=True)
class Counts:
    """The bins of one prompt. ours_k: samples. reference_k: the target's own, or with `exact` its probabilities."""

    ours_k: np.ndarray
    reference_k: np.ndarray
    exact: bool = False


def group(mass: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each outcome, for at most `bins` of about equal mass; the heaviest outcomes come first, equals in their order."""
    order = np.argsort(-mass, kind="stable")
    middle = np.cumsum(mass[order]) - mass[order] / 2
    labels = np.empty(len(mass), np.int64)
    labels[order] = np.minimum(middle / mass.sum() * bins, bins - 1).astype(np.int64)
    return labels


def count_two(ours: np.ndarray, theirs: np.ndarray, bins: int) -> Counts:
    """Count two samples of one prompt, whole numbers that name what came out [n] and [m], in bins of both together."""
    _, place = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    label = group(np.bincount(place).astype(float), bins)[place]
    pair = [np.bincount(part, minlength=bins) for part in (label[: len(ours)], label[len(ours) :])]
    return Counts(*_merge(pair[0], pair[1], pair[0] + pair[1], _FEWEST))


def count_exact(ours: np.ndarray, mass_k: np.ndarray) -> Counts:
    """Count the samples of one prompt, the bin [n] of each, where the bins' exact probabilities are `mass_k`."""
    counted_k = np.bincount(ours, minlength=len(mass_k))
    return Counts(*_merge(counted_k, mass_k, mass_k * len(ours), _FEWEST / 2), exact=True)


def _merge(ours: np.ndarray, theirs: np.ndarray, weight: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Merge the lightest bins until each has the least weight, also what should not have come at all: rounding may decide what a filter
    leaves."""
    filled = ([w, a, b] for w, a, b in zip(weight, ours, theirs, strict=True) if w > 0 or a > 0)
    rows = sorted(filled, key=lambda row: row[0])
    while len(rows) > 1 and rows[0][0] < least:
        light = rows.pop(0)
        rows[0] = [x + y for x, y in zip(rows[0], light, strict=True)]
        rows.sort(key=lambda row: row[0])
    return np.array([row[1] for row in rows]), np.array([row[2] for row in rows])


def check(what: str, prompts: Sequence[Counts], level: float, distance: float) -> Check:
    """Test all prompts together. level: the test's own. distance: the total variation whose power is told."""
    chi_square, freedom, distances, chances = 0.0, 0, [], []
    for one in prompts:
        n, m = one.ours_k.sum(), np.inf if one.exact else one.reference_k.sum()
        ours_k, theirs_k = one.ours_k / n, one.reference_k / one.reference_k.sum()
        # The share of a bin as both know it, and the variance that a difference of shares has.
        share_k = theirs_k if one.exact else (one.ours_k + one.reference_k) / (n + m)
        scale = 1 / n + 1 / m
        chi_square += float(((ours_k - theirs_k) ** 2 / (share_k * scale)).sum())
        freedom += len(share_k) - 1
        distances.append(float(abs(ours_k - theirs_k).sum() / 2))
        chances.append(float(np.sqrt(2 / pi * share_k * (1 - share_k) * scale).sum() / 2))
    samples = int(sum(one.ours_k.sum() for one in prompts))
    reference = 0 if prompts[0].exact else int(sum(one.reference_k.sum() for one in prompts))
    scale = 1 / samples + (1 / reference if reference else 0)
    mean, chance, width = float(np.mean(distances)), float(np.mean(chances)), sqrt(log(2 / _OUTSIDE) / 2 * scale)
    # The mean of what is counted lies between the true distance and that plus what chance adds.
    ends = max(0.0, mean - chance - width), min(1.0, mean + width)
    power = power_of(least_noncentrality(distance, scale), freedom, level) if freedom else 0.0
    p = tail(chi_square, freedom) if freedom else 1.0
    return Check(what, samples, reference, chi_square, freedom, p, mean, chance, ends, power)


def tail(value: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return P(X > value) for X of the chi-square distribution, the noncentral one as a mixture of central ones by Poisson weights
    (Fisher 1928)."""
    half, j = noncentrality / 2, torch.arange(2 * int(noncentrality) + 200, dtype=torch.float64)
    weights = torch.exp(torch.special.xlogy(j, half) - half - torch.lgamma(j + 1))
    above = torch.special.gammaincc(freedom / 2 + j, torch.tensor(value / 2, dtype=torch.float64))
    return min(1.0, float((weights * above).sum()))


def _bisect(rises: Callable[[float], float], wanted: float, most: float) -> float:
    """Return where a function that rises reaches a value, between 0 and `most`."""
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < wanted else (low, middle)
    return high


@lru_cache(maxsize=256)
def _critical(freedom: int, level: float) -> float:
    """Return the value that chi-square exceeds with probability `level`."""
    return _bisect(lambda value: -tail(value, freedom), -level, 10 * freedom + 200.0)


def power_of(noncentrality: float, freedom: int, level: float) -> float:
    """Return the probability that a test of this level finds a difference of this noncentrality."""
    return tail(_critical(freedom, level), freedom, noncentrality)


def least_noncentrality(distance: float, scale: float) -> float:
    """Return the least noncentrality of two distributions that are `distance` apart in total variation.

    scale: 1 / n + 1 / m. By Cauchy and Schwarz sum (p - q)^2 / share is at least (sum |p - q|)^2 / sum share = 4 distance^2; and by
    Jensen prompts which are `distance` apart on average have at least what they would have with the same distance each.
    """
    return 4 * distance**2 / scale


def samples_needed(freedom: int, level: float, power: float, distance: float, *, exact: bool = False) -> int:
    """Return how many samples of each side, over all prompts, find a total variation of `distance` with this power.

    exact: one side is known exactly. Some distributions of that distance are found with fewer.
    """
    needed = _bisect(lambda value: power_of(value, freedom, level), power, 10 * freedom + 400.0)
    return ceil(needed / least_noncentrality(distance, 1.0 if exact else 2.0))
