"""The losses of a row by their definitions, one oracle per entry of LOSSES: no row, step or chunk is shared with the product; and
what the tests of losses are made with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import HeadOutput, StepOutput, supervised_rows
from draftsmith.heads.losses.spec import LossSpec

TINY = 1e-30


@dataclass(frozen=True)
class Row:
    """p_V: the target's distribution over its whole vocabulary. q_V: the draft's, 0 outside the draft vocabulary. vocab: [W] the
    draft vocabulary. token: the text's own."""

    spec: LossSpec
    p_V: Tensor
    q_V: Tensor
    vocab: Tensor
    token: int

    @property
    def p(self) -> Tensor:
        """[W] renormalised over the draft vocabulary."""
        return self.p_V[self.vocab] / self.p_V[self.vocab].sum()

    @property
    def q(self) -> Tensor:
        return self.q_V[self.vocab]

    @property
    def accepted(self) -> Tensor:
        return torch.minimum(self.p_V, self.q_V).sum()


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b), where a is not 0."""
    seen = a > 0
    return (a[seen] * (a[seen] / b[seen]).log()).sum()


def soften(p: Tensor, temperature: float) -> Tensor:
    return p ** (1 / temperature) / (p ** (1 / temperature)).sum()


def kl(row: Row) -> Tensor:
    T = row.spec.temperature
    return T * T * divergence(soften(row.p, T), soften(row.q, T))


def jsd(row: Row) -> Tensor:
    beta, middle = row.spec.beta, row.spec.beta * row.p + (1 - row.spec.beta) * row.q
    return beta * divergence(row.p, middle) + (1 - beta) * divergence(row.q, middle)


def lk_hybrid(row: Row) -> Tensor:
    share = row.spec.lk_scale * torch.exp(-row.spec.lk_decay * row.accepted.detach())
    return share * divergence(row.p, row.q) + (1 - share) * (1 - row.accepted)


def ce(row: Row, token: int) -> Tensor:
    return -row.q_V[token].log() if token in row.vocab.tolist() else torch.zeros(())


ORACLES: dict[str, Callable[[Row], Tensor]] = {
    "kl": kl,
    "reverse_kl": lambda row: divergence(row.q, row.p.clamp_min(TINY)),  # else infinite
    "jsd": jsd,
    "soft_ce": lambda row: -(row.p * row.q.log()).sum(),
    "tv": lambda row: 0.5 * (row.p_V - row.q_V).abs().sum(),
    "lk_alpha": lambda row: -row.accepted.log(),
    "lk_hybrid": lk_hybrid,
    "hard_ce": lambda row: ce(row, row.token),
    "argmax_ce": lambda row: ce(row, int(row.p_V.argmax())),
}


def random_output(batch: TrainBatch, W: int = 160, steps: int = 3, *, confident: bool = False) -> HeadOutput:
    """Draft logits that have nothing to do with the teacher's, on the rows of docs/algorithms.md, rule 1."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for k in range(steps):
        rows = supervised_rows(batch, k).flatten().nonzero().flatten()
        logits = (2 * torch.randn(len(rows), W, generator=generator)).requires_grad_()
        sure = torch.randn(len(rows), generator=generator).requires_grad_() if confident else None
        found.append(StepOutput(k, rows, logits, confidence=sure))
    return HeadOutput(tuple(found))
