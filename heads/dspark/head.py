"""DSpark: a block filled in at once, then a cheap pass from left to right that lets each token know the one before.

DeepSeek, "DSpark" (2026); served by vLLM's `qwen3_dspark.py` and llama.cpp's draft-dspark.

Shapes: R_k rows of step k, H hidden, W draft vocab, r rank, S slots. Slot k of row t's block is at the position of
x_{t+1+k} and predicts x_{t+2+k}: slot 0 holds the root, so a block of S slots drafts S tokens. The token before adds a
bias W2 E1[x_{t+1+k}] of low rank to the slot's logits: in training the text's, in drafting the one just drafted.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import HeadOutput, StepOutput, shift_left
from draftsmith.heads.block.base import BlockHead
from draftsmith.heads.dspark import DSparkOptions
from draftsmith.heads.dspark.calibration import calibrate


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
    """The DSpark drafter. temperatures: [S], what the slots' log-odds are divided by, fitted after training. threshold: a draft ends
    before the first slot that it survives with a smaller chance; None: it never ends early."""

    method: ClassVar[str] = "dspark"
    options_class = DSparkOptions
    first_slot = 0
    options: DSparkOptions
    temperatures: Tensor
    threshold: float | None = None

    def __init__(self, options: DSparkOptions, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        super().__init__(options, config, *others)
        V, H, r = config.vocab_size, config.hidden_size, options.markov_rank
        self.markov_head = MarkovHead(V, V if self.draft_vocab is None else len(self.draft_vocab), r)
        outputs = frozenset({"confidence"} if options.confidence_head else ())
        self.trains = replace(self.trains, outputs=outputs, no_muon=("markov_head", "confidence_head"))
        self.confidence_head = ConfidenceHead(H + r) if options.confidence_head else None
        self.register_buffer("temperatures", torch.ones(options.block_size) if options.confidence_head else None)

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> logits, confidence, and where the head would draft no more."""
        tokens = [shift_left(batch.ids, 1 + k, 0).flatten()[at] for k, at in enumerate(rows)]
        sizes, every = [len(at) for at in rows], torch.cat([*states])
        before = self.markov_head.markov_w1(torch.cat(tokens)).to(every.dtype)
        sources: Sequence[Any]
        if torch.is_grad_enabled():
            sources = self._biased(every, before).split(sizes)
        else:
            pairs = zip(states, before.split(sizes), strict=True)
            sources = [self.late(self._biased, state, own) for state, own in pairs]
        if self.confidence_head is None:
            return [StepOutput(k, at, source) for k, (at, source) in enumerate(zip(rows, sources, strict=True))]
        odds = self.log_odds(every, before).split(sizes)
        survival = every.new_ones(batch.ids.numel(), dtype=torch.float32)
        steps = []
        for k, at in enumerate(rows):
            stops = None
            if self.threshold is not None:
                survival[at] = survival[at] * self.calibrated(k, odds[k].detach())
                stops = survival[at] < self.threshold
            steps.append(StepOutput(k, at, sources[k], confidence=odds[k], stops=stops))
        return steps

    def _biased(self, states: Tensor, before: Tensor) -> Tensor:
        """States [R, H] and embeddings of the tokens before [R, r] -> logits [R, W]."""
        return self.logits(states) + self.bias(before)

    def bias(self, before: Tensor) -> Tensor:
        """Embeddings of the tokens before [..., r] -> what they add to the logits, [..., W]."""
        return self.markov_head.markov_w2(before)

    def log_odds(self, states: Tensor, before: Tensor) -> Tensor:
        """States [..., H] and embeddings of the tokens before [..., r] -> the log-odds of being accepted [...], as the
        training makes them."""
        assert self.confidence_head is not None
        return self.confidence_head.proj(torch.cat([states, before.to(states.dtype)], -1))[..., 0]

    def calibrated(self, slot: int, log_odds: Tensor) -> Tensor:
        """Log-odds of a slot -> the chance that its token is accepted, given that those before it are."""
        return torch.sigmoid(log_odds.float() / self.temperatures[slot])

    def with_confidence_threshold(self, threshold: float) -> "DSparkHead":
        """Return the head, of the same weights, with drafts that end early. Raises UserError without a confidence head."""
        if self.confidence_head is None:
            super().with_confidence_threshold(threshold)
        other = copy(self)
        other.threshold, other.drafts = threshold, replace(self.drafts, fixed_length=False)
        return other

    @torch.no_grad()
    def calibrate(self, passes: Iterable[tuple[TrainBatch, HeadOutput, Tensor]]) -> dict[str, Any]:
        """Fit the slots' temperatures to what became of drafts along answers; return them with the errors before and after."""
        log_odds, accepted, halves = [], [], []
        for index, (batch, output, c_BLK) in enumerate(passes):
            steps = output.steps
            rows = steps[0].rows
            odds = torch.full((batch.ids.numel(), len(steps)), torch.nan, dtype=torch.float64, device=rows.device)
            for step in steps:
                assert step.confidence is not None
                odds[step.rows, step.offset] = step.confidence.double()
            number = batch.document + index + torch.arange(len(batch.ids), device=rows.device)[:, None]
            log_odds.append(odds[rows])
            accepted.append(c_BLK.flatten(0, 1)[rows])
            halves.append((number.flatten()[rows] % 2).bool())
        fitted = calibrate(torch.cat(log_odds), torch.cat(accepted), torch.cat(halves))
        self.temperatures.copy_(torch.tensor(fitted.temperatures))
        return asdict(fitted)


build, load = DSparkHead.build, DSparkHead.load
