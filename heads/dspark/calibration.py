"""Making confidences mean what they say: sequential temperature scaling, and how far off they are.

The slots of a block are fitted one after the other: the chance that a draft survives slot k is the product of the slots'
calibrated confidences up to k, and with those before it fixed, slot k's temperature is the one that makes this product
the best prediction of whether the draft survived (Guo et al., "On Calibration of Modern Neural Networks" (2017), for one
slot). Shapes: M rows, S slots; NaN where a row has no such slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BINS = 15
_RANGE = (0.05, 20.0)
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Calibrated:
    """temperatures: one per slot. before, after: the expected calibration error of the survival at each slot, without them
    and with them; `after` is that of halves of the texts fitted on the other half. rows: that each slot was fitted on."""

    temperatures: list[float]
    before: list[float]
    after: list[float]
    rows: list[int]


def calibrate(log_odds_MS: Tensor, accepted_MS: Tensor, half_M: Tensor) -> Calibrated:
    """Fit the temperatures. log_odds: of each slot's token being accepted, those before it being so. accepted: the chance
    that it was, given the text. half: bool, which half of the texts a row is of."""
    log_odds_MS, accepted_MS = log_odds_MS.double().cpu(), accepted_MS.double().cpu()
    half_M, ones = half_M.cpu(), torch.ones(log_odds_MS.shape[1], dtype=torch.float64)
    halves = [
        (fit_temperatures(log_odds_MS[half_M == fitted], accepted_MS[half_M == fitted]), half_M != fitted)
        for fitted in (True, False)
    ]
    survived_MS = accepted_MS.cumprod(1)
    heldout_MS = torch.full_like(log_odds_MS, torch.nan)
    for temperatures_S, other_M in halves:
        heldout_MS[other_M] = survival(log_odds_MS[other_M], temperatures_S)
    return Calibrated(
        fit_temperatures(log_odds_MS, accepted_MS).tolist(),
        _errors(survival(log_odds_MS, ones), survived_MS),
        _errors(heldout_MS, survived_MS),
        (~(log_odds_MS + accepted_MS).isnan()).sum(0).tolist(),
    )


def survival(log_odds_MS: Tensor, temperatures_S: Tensor) -> Tensor:
    """Return [M, S]: the chance that the draft reaches and passes each slot."""
    return torch.sigmoid(log_odds_MS / temperatures_S).cumprod(1)


def fit_temperatures(log_odds_MS: Tensor, accepted_MS: Tensor) -> Tensor:
    """Return [S]: the temperature of each slot, those of the slots before it being fixed. A slot without rows keeps 1."""
    survived_MS = accepted_MS.cumprod(1)
    found_S = torch.ones(log_odds_MS.shape[1], dtype=torch.float64)
    reached_M = torch.ones(len(log_odds_MS), dtype=torch.float64)
    for k in range(len(found_S)):
        here_M = ~(log_odds_MS[:, k] + survived_MS[:, k]).isnan()
        if bool(here_M.any()):
            found_S[k] = _fit(log_odds_MS[here_M, k], reached_M[here_M], survived_MS[here_M, k])
        reached_M = reached_M * torch.sigmoid(log_odds_MS[:, k] / found_S[k])
    return found_S


def expected_calibration_error(chance_n: Tensor, outcome_n: Tensor) -> float:
    """Return the mean distance, over bins of equal width and by their sizes, between chances and what happened."""
    bin_n = (chance_n * _BINS).long().clamp(max=_BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bin_n, chance_n - outcome_n)
    return float(gap.abs().sum() / max(len(chance_n), 1))


def _errors(chance_MS: Tensor, survived_MS: Tensor) -> list[float]:
    found = []
    for chance_M, survived_M in zip(chance_MS.T, survived_MS.T, strict=True):
        here_M = ~(chance_M + survived_M).isnan()
        found.append(expected_calibration_error(chance_M[here_M], survived_M[here_M]))
    return found


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
