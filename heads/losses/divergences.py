"""How far a draft's distribution is from the target's, row by row: the losses that distillation can choose from.

Shapes: R rows, W draft vocab, V target vocab. q is the draft's distribution over the draft vocabulary, p the target's over the
whole one, of which a `Teacher` holds the columns of the draft vocabulary; p' is p renormalised over those. What is
about acceptance (tv, lk_alpha, lk_hybrid) takes p, what compares two distributions over the same tokens (soft_ce, kl,
reverse_kl, jsd) takes p'. All are pure functions in the dtype of their inputs.

A token of which p' says less than TINY counts as TINY where a logarithm is taken: reverse KL would be infinite.
"""

from math import log, log1p

import torch
from torch import Tensor

from draftsmith.heads.losses.teacher import TINY, Teacher


def soft_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] cross-entropy from the teacher renormalised over the draft vocabulary."""
    return -torch.linalg.vecdot(teacher.p, log_q_RW) / teacher.mass


def kl(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] forward KL(p' || q): soft cross-entropy minus the teacher's entropy."""
    return soft_ce(log_q_RW, teacher) + teacher.negentropy


def top_k_ce(log_q_RW: Tensor, teacher: Teacher, count: int) -> Tensor:
    """[R] the part of the cross-entropy from p that its `count` most likely tokens of the draft vocabulary make up.

    Zhang et al., "Learning Harmonized Representations for Speculative Sampling" (HASS, 2024), harmonized objective
    distillation: p is not renormalised over them.
    """
    p_RK, token_RK = teacher.p.topk(min(count, teacher.p.shape[-1]), -1)
    return -torch.linalg.vecdot(p_RK, log_q_RW.gather(-1, token_RK))


def reverse_kl(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] KL(q || p'): it punishes what q says and p' does not, and forgives what q leaves out."""
    return torch.linalg.vecdot(log_q_RW.exp(), log_q_RW - _log_p(teacher))


def jsd(log_q_RW: Tensor, teacher: Teacher, beta: float) -> Tensor:
    """[R] generalised Jensen-Shannon divergence: beta KL(p' || m) + (1 - beta) KL(q || m), m = beta p' + (1 - beta) q.

    0 < beta < 1. Agarwal et al., "On-Policy Distillation of Language Models" (2024), equation 1: near 0 it is
    beta KL(p' || q), near 1 (1 - beta) KL(q || p').
    """
    log_p_RW = _log_p(teacher)
    log_m_RW = torch.logaddexp(log_p_RW + log(beta), log_q_RW + log1p(-beta))
    from_p = torch.linalg.vecdot(teacher.p, log_p_RW - log_m_RW) / teacher.mass
    return beta * from_p + (1.0 - beta) * torch.linalg.vecdot(log_q_RW.exp(), log_q_RW - log_m_RW)


def acceptance(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] the probability that a token drawn from q is accepted: sum_x min(p(x), q(x)), p over all V."""
    return torch.minimum(log_q_RW.exp(), teacher.p).sum(-1)


def tv(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] total variation distance between p and q over all V: 1 - acceptance."""
    return 1.0 - acceptance(log_q_RW, teacher)


def lk_alpha(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] -log acceptance."""
    return -acceptance(log_q_RW, teacher).clamp_min(TINY).log()


def lk_hybrid(log_q_RW: Tensor, teacher: Teacher, scale: float, decay: float) -> Tensor:
    """[R] lam * KL + (1 - lam) * TV with lam = scale * exp(-decay * acceptance), detached."""
    alpha = acceptance(log_q_RW, teacher)
    lam = scale * torch.exp(-decay * alpha.detach())
    return lam * kl(log_q_RW, teacher) + (1.0 - lam) * (1.0 - alpha)


def hard_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] cross-entropy with the text's own token; 0 where that is outside the draft vocabulary."""
    picked = log_q_RW.gather(1, teacher.label.clamp_min(0)[:, None])[:, 0]
    return torch.where(teacher.label >= 0, -picked, torch.zeros_like(picked))


def _log_p(teacher: Teacher) -> Tensor:
    """[R, W] log p', at least log TINY."""
    return (teacher.p / teacher.mass[:, None]).clamp_min(TINY).log()
