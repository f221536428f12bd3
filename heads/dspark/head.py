"""DSpark: a block filled in at once, then a cheap pass from left to right that lets each token know the one before.

DeepSeek, "DSpark" (2026); served by vLLM's `qwen3_dspark.py` and llama.cpp's draft-dspark.

Shapes: R_k rows of step k, B rows and K tokens of a draft, H hidden, W draft vocab, r rank, S slots. Slot k of row t's block is at the position of
x_{t+1+k} and predicts x_{t+2+k}: slot 0 holds the root, so a block of S slots drafts S tokens. The token before adds a
bias W2 E1[x_{t+1+k}] of low rank to the slot's logits: in training the text's, in drafting the one just drafted.

A draft survives slot k if its tokens up to k are all accepted. The head predicts that chance as a product: the calibrated
confidences of slots 0 to k. Slots are fitted in order: slot k's temperature is the one for which the product predicts best
whether drafts survived. For one slot this is temperature scaling (Guo et al., "On Calibration of Modern Neural Networks",
2017). There M are rows, n those that have a slot; NaN stands where a row has no such slot.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.base import HeadOutput, Passes, StepOutput, accepted
from draftsmith.heads.block.base import BlockDrafter, BlockHead, tokens_before
from draftsmith.heads.dspark import DSparkOptions

_BINS = 15
_RANGE = (0.05, 20.0)
_GOLDEN = (5**0.5 - 1) / 2


class MarkovHead(nn.Module):
    """The token before a slot -> a bias of the slot's logits. Parameters are named as in the published files."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.01)


class ConfidenceHead(nn.Module):
    """State and embedding of the token before -> log-odds; the name `proj` is that of the published files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkHead(BlockHead):
    """The DSpark drafter. temperatures: [S], what the slots' log-odds are divided by, fitted after training."""

    method: ClassVar[str] = "dspark"
    options_class = DSparkOptions
    first_slot = 0
    options: DSparkOptions
    temperatures: Tensor

    def __init__(self, options: DSparkOptions, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        super().__init__(options, config, *others)
        H, r = config.hidden_size, options.markov_rank
        self.markov_head = MarkovHead(config.vocab_size, self.width, r)
        outputs = frozenset({"confidence"} if options.confidence_head else ())
        self.trains = replace(self.trains, outputs=outputs, no_muon=("markov_head", "confidence_head"))
        self.confidence_head = ConfidenceHead(H + r) if options.confidence_head else None
        self.register_buffer("temperatures", torch.ones(options.block_size) if options.confidence_head else None)

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> logits and confidence."""
        sizes, every = [len(at) for at in rows], torch.cat([*states])
        before = self.markov_head.markov_w1(torch.cat(tokens_before(batch, rows))).to(every.dtype)
        sources = list(zip(states, before.split(sizes), strict=True))
        if self.confidence_head is None:
            return [StepOutput(k, at, sources[k], self._biased) for k, at in enumerate(rows)]
        odds = self.log_odds(every, before).split(sizes)
        return [
            StepOutput(k, at, sources[k], self._biased, confidence=odds[k], temperature=self.temperatures[k])
            for k, at in enumerate(rows)
        ]

    def _biased(self, states: Tensor, before: Tensor) -> Tensor:
        """States [R, H] and embeddings of the tokens before [R, r] -> logits [R, W]."""
        return self.logits(states) + self.markov_head.markov_w2(before)

    def log_odds(self, states: Tensor, before: Tensor) -> Tensor:
        """States [..., H] and embeddings of the tokens before [..., r] -> the log-odds of being accepted [...], as the
        training makes them."""
        assert self.confidence_head is not None
        return self.confidence_head.proj(torch.cat([states, before.to(states.dtype)], -1))[..., 0]

    @torch.no_grad()
    def calibrate(self, passes: Passes) -> dict[str, Any]:
        """Fit the slots' temperatures to what became of drafts along answers; return them with the errors before and after."""

        def look(index: int, batch: TrainBatch, output: HeadOutput, c_BLK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            steps = output.steps
            rows = steps[0].rows
            odds = torch.full((batch.ids.numel(), len(steps)), torch.nan, dtype=torch.float64, device=rows.device)
            for step in steps:
                assert step.confidence is not None
                odds[step.rows, step.offset] = step.confidence.double()
            number = batch.document + index + torch.arange(len(batch.ids), device=rows.device)[:, None]
            half = (number.flatten()[rows] % 2).bool()
            return odds[rows].cpu(), c_BLK.flatten(0, 1)[rows].cpu(), half.cpu()

        fitted = calibrate(*(torch.cat(parts) for parts in zip(*passes(look), strict=True)))
        self.temperatures.copy_(torch.tensor(fitted["temperatures"]))
        return fitted


class DSparkDrafter(BlockDrafter):
    """Drafts a chain from left to right; a rule ends it by the head's own confidences."""

    head: DSparkHead

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain."""
        head, depth = self.head, states_BKH.shape[1]
        base_BKW = head.logits(states_BKH)

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            return base_BKW[:, k] + head.markov_head.markov_w2(head.markov_head.markov_w1(before_B))

        def chance(k: int, before_B: Tensor) -> Tensor:
            return accepted(head.log_odds(states_BKH[:, k], head.markov_head.markov_w1(before_B)), head.temperatures[k])

        return self.chain(state, depth, next_logits, None if head.confidence_head is None else chance)


def calibrate(log_odds_MS: Tensor, accepted_MS: Tensor, half_M: Tensor) -> dict[str, list[Any]]:
    """Fit the temperatures and measure the errors; return what the fit gave, a number per slot.

    temperatures: what log-odds are divided by. before, after: the expected calibration error of the survival, uncalibrated and
    calibrated; for `after` each half of the texts has the temperatures fitted on the other half. rows: how many rows were fitted.

    log_odds_MS: that a slot's token is accepted, given that those before it are. accepted_MS: the chance that it was, on the text.
    half_M: bool, which half of the texts a row belongs to.
    """
    log_odds_MS, accepted_MS = log_odds_MS.double(), accepted_MS.double()
    ones = torch.ones(log_odds_MS.shape[1], dtype=torch.float64)
    survived_MS = accepted_MS.cumprod(1)
    heldout_MS = torch.full_like(log_odds_MS, torch.nan)
    for fitted_M in (half_M, ~half_M):
        temperatures_S = fit_temperatures(log_odds_MS[fitted_M], accepted_MS[fitted_M])
        heldout_MS[~fitted_M] = survival(log_odds_MS[~fitted_M], temperatures_S)
    return {
        "temperatures": fit_temperatures(log_odds_MS, accepted_MS).tolist(),
        "before": _errors(survival(log_odds_MS, ones), survived_MS),
        "after": _errors(heldout_MS, survived_MS),
        "rows": (~(log_odds_MS + accepted_MS).isnan()).sum(0).tolist(),
    }


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


build, load = DSparkHead.build, DSparkHead.load
