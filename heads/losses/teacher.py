"""The frozen target's distribution on the rows that a loss needs, from stored states (docs/algorithms.md, rule 4).

Shapes: B batch rows, L tokens, R rows, U teacher positions, H target hidden, V target vocab, W draft vocab.

p is the distribution over the FULL vocabulary, exp(logit - logsumexp), kept on the draft vocabulary's columns only: a row of it
sums to less than 1.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import shift_left

TEACHER_CHUNK = 1 << 26  # logits made at a time (256 MB of fp32)
TINY = 1e-30


@dataclass(frozen=True)
class Teacher:
    """The target's distribution on some rows. p: [R, W] fp32, not renormalised; mass: [R], its sums; negentropy: [R], the
    sum of p' log p' of the renormalised p' = p / mass; label: [R] index of the text's own token in the draft
    vocabulary, -1 outside."""

    p: Tensor
    mass: Tensor
    negentropy: Tensor
    label: Tensor

    def select(self, index: Tensor) -> "Teacher":
        """Return the distribution on the rows `index`."""
        return Teacher(self.p[index], self.mass[index], self.negentropy[index], self.label[index])


class TargetLogits(Protocol):
    """The part of `TargetHead` that a teacher needs."""

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor: ...


@torch.no_grad()
def make_teacher(
    batch: TrainBatch, positions_U: Tensor, target_head: TargetLogits, draft_vocab: Tensor | None
) -> Teacher:
    """Return the target's distribution of the token after each flat position, on the draft vocabulary's columns."""
    hidden_UH = batch.last.flatten(0, 1)[positions_U]
    logsumexp_U = batch.logsumexp.flatten()[positions_U].float()
    label_U = shift_left(batch.ids, 1, 0).flatten()[positions_U]
    W = None if draft_vocab is None else len(draft_vocab)
    pieces = []
    for hidden, lse in zip(*(x.split(_chunk_rows(W)) for x in (hidden_UH, logsumexp_U)), strict=True):
        pieces.append(target_head.logits(hidden, draft_vocab).float().sub_(lse[:, None]))
    log_p_UW = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    p_UW = log_p_UW.exp()
    mass_U = p_UW.sum(-1).clamp_min(TINY)
    negentropy_U = torch.linalg.vecdot(p_UW, log_p_UW.clamp_min(-1e4)) / mass_U - mass_U.log()
    return Teacher(p_UW, mass_U, negentropy_U, draft_index(label_U, draft_vocab))


def draft_index(ids: Tensor, draft_vocab: Tensor | None) -> Tensor:
    """Return where each target id stands in the sorted draft vocabulary, -1 where it does not."""
    if draft_vocab is None:
        return ids.long()
    index = torch.searchsorted(draft_vocab, ids.long()).clamp_max(len(draft_vocab) - 1)
    return torch.where(draft_vocab[index] == ids, index, -1)


def _chunk_rows(W: int | None) -> int:
    return max(1, TEACHER_CHUNK // (W or (1 << 17)))
