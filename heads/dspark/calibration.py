"""Calibrate the confidences of a block drafter: one temperature per slot, and the error before and after.

A draft survives slot k if its tokens up to k are all accepted. The head predicts that chance as a product: the calibrated
confidences of slots 0 to k. Slots are fitted in order. Slot k's temperature is the one for which the product predicts best
whether drafts survived; the temperatures of earlier slots are fixed by then. For one slot this is temperature scaling (Guo
et al., "On Calibration of Modern Neural Networks", 2017).

Shapes: M rows, S slots, n rows that have a slot; NaN where a row has no such slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BINS = 15
_RANGE = (0.05, 20.0)
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Calibrated:
    """What the fit gave, a number per slot.

    temperatures: what log-odds are divided by. before, after: the expected calibration error of the survival, uncalibrated and
    calibrated; for `after` each half of the texts has the temperatures fitted on the other half. rows: how many rows were fitted.
    """

    temperatures: list[float]
    before: list[float]
    after: list[float]
    rows: list[int]


def calibrate(log_odds_MS: Tensor, accepted_MS: Tensor, half_M: Tensor) -> Calibrated:
    """Fit the temperatures and measure the errors.

    log_odds_MS: that a slot's token is accepted, given that those before it are. accepted_MS: the chance that it was, on the text.
    half_M: bool, which half of the texts a row belongs to.
    """
    log_odds_MS, accepted_MS = log_odds_MS.double().cpu(), accepted_MS.double().cpu()
    half_M, ones = half_M.cpu(), torch.ones(log_odds_MS.shape[1], dtype=torch.float64)
    survived_MS = accepted_MS.cumprod(1)
    heldout_MS = torch.full_like(log_odds_MS, torch.nan)
    for fitted_M in (half_M, ~half_M):
        temperatures_S = fit_temperatures(log_odds_MS[fitted_M], accepted_MS[fitted_M])
        heldout_MS[~fitted_M] = survival(log_odds_MS[~fitted_M], temperatures_S)
    return Calibrated(
        fit_temperatures(log_odds_MS, accepted_MS).tolist(),
        _errors(survival(log_odds_MS, ones), survived_MS),
        _errors(heldout_MS, survived_MS),
        (~(log_odds_MS + accepted_MS).isnan()).sum(0).tolist(),
    )


def survival(log_odds_MS: Tensor, temperatures_S: Tensor) -> Tensor:
    """Return [M, S]: the predicted chance that the draft survives each slot."""
    return torch.sigmoid(log_odds_MS / temperatures_S).cumprod(1)


def fit_temperatures(log_odds_MS: Tensor, accepted_MS: Tensor) -> Tensor:
    """Return the temperatures [S], fitted in order. A slot without rows keeps 1."""
    survived_MS = accepted_MS.cumprod(1)
    temperatures_S = torch.ones(log_odds_MS.shape[1], dtype=torch.float64)
    reached_M = torch.ones(len(log_odds_MS), dtype=torch.float64)
    for k in range(len(temperatures_S)):
        here_M = ~(log_odds_MS[:, k] + survived_MS[:, k]).isnan()
        if bool(here_M.any()):
            temperatures_S[k] = _fit(log_odds_MS[here_M, k], reached_M[here_M], survived_MS[here_M, k])
        reached_M = reached_M * torch.sigmoid(log_odds_MS[:, k] / temperatures_S[k])
    return temperatures_S


def expected_calibration_error(chance_n: Tensor, outcome_n: Tensor) -> float:
    """Return how far predicted chances are from outcomes: the mean over bins of equal width, weighted by their sizes."""
    bin_n = (chance_n * _BINS).long().clamp(max=_BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bin_n, chance_n - outcome_n)
    return float(gap.abs().sum() / max(len(chance_n), 1))


def _errors(chance_MS: Tensor, survived_MS: Tensor) -> list[float]:
    errors = []
    for chance_M, survived_M in zip(chance_MS.T, survived_MS.T, strict=True):
        here_M = ~(chance_M + survived_M).isnan()
        errors.append(expected_calibration_error(chance_M[here_M], survived_M[here_M]))
    return errors


def _fit(log_odds_n: Tensor, reached_n: Tensor, survived_n: Tensor) -> float:
    """Return the temperature with the least cross-entropy, by golden-section search over its logarithm."""

    def loss(log_temperature: Tensor) -> float:
        chance_n = (reached_n * torch.sigmoid(log_odds_n / log_temperature.exp())).clamp(1e-12, 1 - 1e-12)
        return float(-(survived_n * chance_n.log() + (1 - survived_n) * (1 - chance_n).log()).mean())

    low, high = torch.tensor(_RANGE, dtype=torch.float64).log()
    while float(high - low) > 1e-4:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return float(((low + high) / 2).exp())
