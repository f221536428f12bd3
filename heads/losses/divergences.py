"""The losses of a row, which compare a draft's distribution with the target's, and the table of them that `train.loss.kind` names.

Shapes: R rows, W draft vocab, V target vocab. q is the draft's distribution over the draft vocabulary; p the target's over the
whole one; p' is p renormalised over the draft vocabulary. A loss that compares two distributions over the same tokens takes p';
one about acceptance takes p, since p' would promise more acceptance than there is. All are pure functions in the dtype of
their inputs, finite with their gradients where p or q is 0: a logarithm of p' (`_log_p`) or of the acceptance (`lk_alpha`) is one
of at least TINY. A smaller acceptance has no gradient.

To add a loss, write its function with its entry in LOSSES, and its definition in tests/heads/losses/oracles.py; then
`python -m scripts.bench.pages` writes the docs' table. A number of its own is a field of `LossSpec`, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, log1p

import torch
from torch import Tensor

from draftsmith.heads.selector import Selector

TINY = 1e-30


@dataclass(frozen=True)
class Teacher:
    """The target's distribution on some rows. p: [R, W] fp32, p's columns of the draft vocabulary, not renormalised, so that a
    row sums to less than 1; mass: [R], these sums; negentropy: [R], the sum of p' log p' of p' = p / mass; label, best: [R] indices
    of the text's own token and of the target's likeliest one in the draft vocabulary, -1 outside; label None: no loss asks for it."""

    p: Tensor
    mass: Tensor
    negentropy: Tensor
    label: Tensor | None
    best: Tensor

    def select(self, index: Tensor) -> "Teacher":
        """Return the distribution on the rows `index`."""
        label = None if self.label is None else self.label[index]
        return Teacher(self.p[index], self.mass[index], self.negentropy[index], label, self.best[index])


def soft_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the cross-entropy from p'."""
    return -torch.linalg.vecdot(teacher.p, log_q_RW) / teacher.mass


def kl(log_q_RW: Tensor, teacher: Teacher, temperature: float = 1.0) -> Tensor:
    """Return [R], the forward KL(p' || q): soft cross-entropy minus the entropy of p'. Another temperature T gives T^2 KL between both
    distributions to the power 1/T, renormalised (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, section 2)."""
    if temperature == 1.0:
        return teacher.negentropy - torch.linalg.vecdot(teacher.p, log_q_RW) / teacher.mass
    log_q_RW, log_p_RW = ((x / temperature).log_softmax(-1) for x in (log_q_RW, _log_p(teacher)))
    return temperature**2 * torch.linalg.vecdot(log_p_RW.exp(), log_p_RW - log_q_RW)


def top_k_ce(log_q_RW: Tensor, teacher: Teacher, count: int) -> Tensor:
    """Return [R], the terms of the cross-entropy from p at the `count` most likely tokens of the draft vocabulary.

    Zhang et al., "Learning Harmonized Representations for Speculative Sampling" (HASS, 2024), harmonized objective
    distillation: p is not renormalised over them.
    """
    p_RK, token_RK = teacher.p.topk(min(count, teacher.p.shape[-1]), -1)
    return -torch.linalg.vecdot(p_RK, log_q_RW.gather(-1, token_RK))


def reverse_kl(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the reverse KL(q || p'): it punishes tokens that q makes likely and p' does not, not those that q leaves out."""
    return torch.linalg.vecdot(log_q_RW.exp(), log_q_RW - _log_p(teacher))


def jsd(log_q_RW: Tensor, teacher: Teacher, beta: float) -> Tensor:
    """Return [R], the generalised Jensen-Shannon divergence beta KL(p' || m) + (1 - beta) KL(q || m) with the mixture
    m = beta p' + (1 - beta) q.

    0 < beta < 1. Agarwal et al., "On-Policy Distillation of Language Models" (2024), equation 1: near 0 it is
    beta KL(p' || q), near 1 (1 - beta) KL(q || p').
    """
    log_p_RW = _log_p(teacher)
    log_m_RW = torch.logaddexp(log_p_RW + log(beta), log_q_RW + log1p(-beta))
    from_p = torch.linalg.vecdot(teacher.p, log_p_RW - log_m_RW) / teacher.mass
    return beta * from_p + (1.0 - beta) * torch.linalg.vecdot(log_q_RW.exp(), log_q_RW - log_m_RW)


def acceptance(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the probability that a token drawn from q is accepted: sum_x min(p(x), q(x)), p over all V."""
    q_RW = log_q_RW.exp()
    return torch.minimum(q_RW, teacher.p, out=None if q_RW.requires_grad else q_RW).sum(-1)


def tv(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the total variation distance between p and q over all V: 1 - acceptance."""
    return 1.0 - acceptance(log_q_RW, teacher)


def lk_alpha(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the negative logarithm of the acceptance."""
    return -acceptance(log_q_RW, teacher).clamp_min(TINY).log()


def lk_hybrid(log_q_RW: Tensor, teacher: Teacher, lk_scale: float, lk_decay: float) -> Tensor:
    """Return [R], lam * KL + (1 - lam) * TV with lam = lk_scale * exp(-lk_decay * acceptance), detached."""
    alpha = acceptance(log_q_RW, teacher)
    lam = lk_scale * torch.exp(-lk_decay * alpha.detach())
    return lam * kl(log_q_RW, teacher) + (1.0 - lam) * (1.0 - alpha)


def hard_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the cross-entropy with the text's own token; 0 where that is outside the draft vocabulary."""
    assert teacher.label is not None
    return label_ce(log_q_RW, teacher.label)


def argmax_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R], the cross-entropy with the target's likeliest token; 0 where that is outside the draft vocabulary."""
    return label_ce(log_q_RW, teacher.best)


def label_ce(log_q_RC: Tensor, label_R: Tensor) -> Tensor:
    """Return [R], the cross-entropy of log-probabilities with a column each; 0 where that is -1."""
    picked = log_q_RC.gather(1, label_R.clamp_min(0)[:, None])[:, 0]
    return torch.where(label_R >= 0, -picked, torch.zeros_like(picked))


def _log_p(teacher: Teacher) -> Tensor:
    """Return [R, W], log p', at least log TINY."""
    return (teacher.p / teacher.mass[:, None]).clamp_min(TINY).log()


@dataclass(frozen=True)
class Loss:
    """One loss that `train.loss.kind` can name: by the name of its function.

    function: ([R, W] log q, teacher, **parameters) -> [R]. formula, summary: for docs/train-a-head.md; `--help` has the summary.
    parameters: its numbers, fields of `LossSpec`. label: the field of the teacher with the one token that it is the cross-entropy
    with, "" for other losses.
    """

    function: Callable[..., Tensor]
    formula: str
    summary: str
    parameters: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        return self.function.__name__


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            kl,
            "T² Σ p'ᵀ log(p'ᵀ/qᵀ), p'ᵀ ∝ p'^(1/T), qᵀ ∝ q^(1/T), T = `temperature`",
            "forward KL, for which the draft covers whatever the target may say",
            parameters=("temperature",),
        ),
        Loss(
            reverse_kl,
            "Σ q log(q/p')",
            "reverse KL, for which the draft keeps to what the target says for certain, surer and less varied",
        ),
        Loss(
            jsd,
            "β Σ p' log(p'/m) + (1-β) Σ q log(q/m), m = βp' + (1-β)q",
            "between the two by beta, which gives beta * kl near 0 and (1 - beta) * reverse_kl near 1",
            parameters=("beta",),
        ),
        Loss(
            soft_ce,
            "-Σ p' log q",
            "cross-entropy with the target's distribution, the gradient of kl and the value that other trainers print",
        ),
        Loss(
            tv,
            "1 - Σ min(p, q)",
            "total variation, the rejection rate itself, with weak gradients far from the target, so after another loss",
        ),
        Loss(
            lk_alpha,
            "-log Σ min(p, q)",
            "the logarithm of the acceptance rate, like tv with stronger gradients where little is accepted",
        ),
        Loss(
            lk_hybrid,
            "λ·`kl` + (1-λ)·`tv`, λ = `lk_scale`·exp(-`lk_decay`·Σ min(p, q))",
            "kl at first, tv once drafts are accepted",
            parameters=("lk_scale", "lk_decay"),
        ),
        Loss(
            hard_ce,
            "-log q(x)",
            "cross-entropy with the text's own token x alone, as Medusa was published",
            label="label",
        ),
        Loss(
            argmax_ce,
            "-log q(argmax p)",
            "cross-entropy with the target's likeliest token alone, whatever the text has",
            label="best",
        ),
    )
}
"""The losses by name. Validation, `--help`, the docs' table and the tests read it."""


@dataclass(frozen=True)
class Choice:
    """What a selector (DFlash2) makes of rows, with C candidates each.

    loss_R: with gradient, the cross-entropy with the label, which stands in the last candidate's place where it is none; 0 where the
    draft vocabulary lacks it. correct_R: whether the token with the best score is the target's likeliest, recalled_R: whether that is a
    candidate. acceptance_R: sum_x min(p(x), q(x)) of what is drafted.
    """

    loss_R: Tensor
    correct_R: Tensor
    recalled_R: Tensor
    acceptance_R: Tensor


def choose(log_q_RW: Tensor, teacher: Teacher, label_R: Tensor, selector: Selector, more: Sequence[Tensor]) -> Choice:
    """Return what a selector makes of rows. label_R: of each row in the draft vocabulary, -1 outside. more: what it takes besides."""
    with torch.no_grad():
        among_RC = selector.candidates(log_q_RW)
        held_R = (among_RC == label_R[:, None]).any(-1)
        learned_RC = among_RC.clone()
        learned_RC[:, -1] = torch.where(held_R, among_RC[:, -1], label_R.clamp_min(0))
        place_R = (learned_RC == label_R[:, None]).int().argmax(-1)
    scores_RC = selector.rescore(learned_RC, log_q_RW.gather(-1, learned_RC), *more)
    loss_R = label_ce(scores_RC.log_softmax(-1), torch.where(label_R >= 0, place_R, -1))
    with torch.no_grad():
        scores_RC = selector.rescore(among_RC, log_q_RW.gather(-1, among_RC), *more)
        p_RC = teacher.p.gather(-1, among_RC)
        token_R = among_RC.gather(-1, scores_RC.argmax(-1, keepdim=True))[:, 0]
        accepted_R = torch.minimum(scores_RC.softmax(-1), p_RC).sum(-1)
    recalled_R = (among_RC == teacher.best[:, None]).any(-1)
    return Choice(loss_R, token_R == teacher.best, recalled_R, accepted_R)
