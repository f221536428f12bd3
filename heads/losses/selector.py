"""The loss of a head's selector (DFlash2): the cross-entropy among a slot's candidates, those that drafts are chosen from.

Shapes: R rows, W draft vocab, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.heads.losses.divergences import Teacher, label_ce
from draftsmith.heads.selector import Selector


@dataclass(frozen=True)
class Choice:
    """What a selector makes of rows.

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
