"""Forecast held-out tau from the evaluations so far: where a training will end, and what more data would bring.

Tau over the tokens n that training has read follows a power law, in its logit between 1 (nothing is accepted) and K + 1
(everything is):

    y = log((tau - 1) / (K + 1 - tau))        y(n) = a - b * ((n / N)^-c - 1) / c

a is y at the N tokens that are forecast for, b its slope there per e-fold of the data, c how fast the slope falls. The learning
rate's decay lifts every curve towards its end, and is a part of what b and c describe. A grid over b, c and the noise, with a
integrated out, gives the distribution of tau at N: its median and an interval.

How far this holds is measured: tests/eval/training/test_forecast.py forecasts every curve in docs/results from its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.9
"""The share of forecasts whose interval is to hold what comes."""
FEWEST = 2
"""Evaluations that a forecast takes. The start, tau 1 before the first token, is a third point: every curve passes through it."""
DRIFT = 0.4
"""How far a curve strays from one power law, as a share of its slope, per e-fold of data between a point and the last one:
the least with which the forecasts of test_forecast.py hold."""

_MOST_POINTS = 100
_SLOPES = np.geomspace(0.01, 3.0, 40)
_CURVATURES = np.geomspace(0.03, 3.0, 20)
_NOISES = np.geomspace(0.004, 0.064, 5)
_ROUNDING = 0.005
"""Noise of tau itself, which counts near 1, where its logit is steep."""
# Priors, wide enough for every curve that is known: mean and deviation of log b and of log c; deviation of a around 0.
_LOG_SLOPE, _LOG_CURVATURE, _END = (np.log(0.2), 1.0), (np.log(0.3), 1.0), 2.0
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 40) for i in range(40)])


@dataclass(frozen=True)
class Point:
    """An evaluation of a training. tokens: that it had read by then, prompts included. tau: on the held-out answers."""

    step: int
    tokens: int
    tau: float


@dataclass(frozen=True)
class Forecast:
    """Tau when training has read so many `tokens`: the median, and the interval that holds it with `LEVEL`."""

    tokens: int
    tau: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.tau:.2f} [{self.low:.2f}, {self.high:.2f}]"


def forecast(points: Sequence[Point], tokens: int, num_speculative_tokens: int) -> Forecast | None:
    """Forecast tau at `tokens` from the evaluations in `points`; None where these are fewer than `FEWEST`.

    tokens: of a training with the same recipe, which ends there. num_speculative_tokens: K of the held-out tau. An evaluation
    before the first step, as a warm start has it, says nothing of how fast the head learns and is left out.
    """
    read = [point for point in points if point.tokens > 0]
    if len(read) < FEWEST:
        return None
    read = read[-1 :: -max(1, -(-len(read) // _MOST_POINTS))][::-1]
    highest = 1.0 + num_speculative_tokens
    tau = np.clip([point.tau for point in read], 1.002, highest - 0.002)
    share = np.array([point.tokens / tokens for point in read])
    weight, mean, variance = _posterior(share, tau, highest)
    values = (mean[:, None] + np.sqrt(variance)[:, None] * _NORMAL).ravel()
    order = values.argsort()
    cumulated = np.repeat(weight / len(_NORMAL), len(_NORMAL))[order].cumsum()
    quantiles = np.interp([(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], cumulated, values[order])
    low, median, high = (1.0 + (highest - 1.0) / (1.0 + np.exp(-quantiles))).tolist()
    return Forecast(tokens, median, low, high)


def _posterior(share: np.ndarray, tau: np.ndarray, highest: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weight, mean and variance of y at N for every likely (noise, b, c).

    Axes: noise, b, c, points. share: n / N of the points [P]; tau [P].
    """
    y, steepness = np.log((tau - 1.0) / (highest - tau)), 1.0 / (tau - 1.0) + 1.0 / (highest - tau)
    slope, curvature, noise = _SLOPES[:, None, None], _CURVATURES[:, None], _NOISES[:, None, None, None]
    ends = y + slope * (share**-curvature - 1.0) / curvature  # what a would be by each point alone
    drift = (DRIFT * slope) ** 2
    variance = noise**2 + (_ROUNDING * steepness) ** 2 + drift * np.log(share[-1] / share) ** 2
    weight = 1.0 / variance
    total = weight.sum(-1) + _END**-2.0
    end = (weight * ends).sum(-1) / total
    misfit = (weight * (ends - end[..., None]) ** 2).sum(-1) + (end / _END) ** 2
    prior = sum(
        ((np.log(grid) - mean) / deviation) ** 2
        for grid, (mean, deviation) in ((_SLOPES[:, None], _LOG_SLOPE), (_CURVATURES, _LOG_CURVATURE))
    )
    log_weight = -0.5 * (misfit + np.log(variance).sum(-1) + np.log(total) + prior)
    ahead = 1.0 / total + noise[..., 0] ** 2 + drift[..., 0] * np.log(share[-1]) ** 2
    likelihood = np.exp(log_weight - log_weight.max())
    likely = likelihood > 1e-4
    return likelihood[likely] / likelihood[likely].sum(), end[likely], np.broadcast_to(ahead, end.shape)[likely]
