"""What a draft step is judged by: distillation losses against the frozen target, and exact acceptance.

Shapes: B batch rows, L tokens, R supervised rows of a step, U teacher positions of all steps, H target hidden,
V target vocab, W draft vocab, S steps.

Teacher logits are made from stored hidden states, once per batch, for the union of the positions that any step
needs and only for the draft vocabulary's columns (rule 4 of "rules for all heads"). p is the target's law over the
FULL vocabulary, exp(logit - logsumexp), so a row of p sums to less than 1; KL and cross-entropy renormalise it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, StepOutput, count_rows, supervised_rows
from draftsmith.heads.teacher import TINY, TargetLogits, Teacher, draft_index, make_teacher

LossKind = Literal["kl", "soft_ce", "tv", "lk_alpha", "lk_hybrid", "hard_ce"]
Normalize = Literal["rows", "sequence", "positions"]


@dataclass(frozen=True)
class LossSpec:
    """How draft logits are compared with the target's law."""

    kind: LossKind = "kl"
    """kl: forward KL; soft_ce: the same gradient without the entropy; tv: 1 - acceptance rate; lk_alpha: its
    logarithm; lk_hybrid: KL fading into tv as acceptance grows; hard_ce: cross-entropy with the text itself."""
    decay: float = 0.8
    """Step k weighs decay**k."""
    lk_scale: float = 1.0
    """lk_hybrid: weight of the KL term at acceptance 0."""
    lk_decay: float = 3.0
    """lk_hybrid: how fast that weight falls as acceptance grows."""
    normalize: Normalize = "rows"
    """The mean that the loss is: over supervised rows; over documents of their own mean over rows; or over all
    B*L positions, padding included (SpecForge)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise UserError(f"loss.decay is {self.decay}: it must be above 0 and at most 1.")


@dataclass(frozen=True)
class LossOutput:
    """The sums over one batch; divide by the global sum of `loss_divisor` (loss) or of `step_rows` (metrics).

    loss_sum: scalar with gradient, the sum over steps k of decay**k times the sum over rows. rows: N, the rows
    supervised at offset 0, dropped ones included. Per step, [S] without gradient: step_loss, the (weighted) sum of
    row losses before decay; step_rows, the supervised rows, dropped ones included; step_correct, those where the
    draft's argmax is the target's; step_acceptance, the sum over rows of sum_x min(p(x), q(x)), p over all V.
    """

    loss_sum: Tensor
    rows: Tensor
    step_loss: Tensor
    step_rows: Tensor
    step_correct: Tensor
    step_acceptance: Tensor


def soft_ce(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] cross-entropy from the teacher renormalised over the draft vocabulary."""
    return -torch.linalg.vecdot(teacher.p, log_q_RW) / teacher.mass


def kl(log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """[R] forward KL(p' || q): soft cross-entropy minus the teacher's entropy."""
    return soft_ce(log_q_RW, teacher) + teacher.negentropy


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


def row_loss(spec: LossSpec) -> Callable[[Tensor, Teacher], Tensor]:
    """Return the loss of rows that `spec` names: ([R, W] log q, teacher) -> [R]."""
    if spec.kind == "lk_hybrid":
        return lambda log_q, teacher: lk_hybrid(log_q, teacher, spec.lk_scale, spec.lk_decay)
    plain = {"kl": kl, "soft_ce": soft_ce, "tv": tv, "lk_alpha": lk_alpha, "hard_ce": hard_ce}
    if spec.kind not in plain:
        raise UserError(f"loss.kind is {spec.kind!r}: choose one of {', '.join([*plain, 'lk_hybrid'])}.")
    return plain[spec.kind]


def loss_divisor(batch: TrainBatch, spec: LossSpec) -> Tensor:
    """Return the scalar that, summed over all ranks and micro-batches of an update, divides the sum of `loss_sum`.

    It depends on the batch alone, so an update's divisor is known before its first backward pass. "rows": N.
    "sequence": documents with at least one supervised row. "positions": B*L.
    """
    if spec.normalize == "sequence":
        return _document_rows(batch)[0].count_nonzero()
    if spec.normalize == "positions":
        return torch.tensor(batch.ids.numel(), device=batch.ids.device)
    return count_rows(batch)


def head_loss(
    output: HeadOutput, batch: TrainBatch, target_head: TargetLogits, draft_vocab: Tensor | None, spec: LossSpec
) -> LossOutput:
    """Return the loss and the metrics of a head's output on `batch`.

    The same divisor serves every step (rule 3), so a step that fewer rows reach weighs less. Rows whose target
    argmax (`batch.top1`) is outside the draft vocabulary are dropped from the loss but stay in `rows`, in
    `step_rows`, and count as misses (rule 8). Everything runs in fp32, also under autocast.
    draft_vocab: [W] sorted target ids, None for all.
    """
    with torch.autocast(batch.ids.device.type, enabled=False):
        needed, index = torch.unique(torch.cat([s.rows + 1 + s.offset for s in output.steps]), return_inverse=True)
        teacher = make_teacher(batch, needed, target_head, draft_vocab)
        top1 = batch.top1.flatten()[needed]
        loss_of, weights = row_loss(spec), _row_weights(batch, spec)
        sums = []
        for step, where in zip(output.steps, index.split([len(s.rows) for s in output.steps]), strict=True):
            weight = None if weights is None else weights[step.rows]
            sums.append(_step_sums(step, teacher.select(where), top1[where], weight, draft_vocab, loss_of))
    decay = torch.tensor([spec.decay**s.offset for s in output.steps], device=batch.ids.device)
    step_loss = torch.stack([s.loss for s in sums])
    return LossOutput(
        loss_sum=(decay * step_loss).sum(),
        rows=count_rows(batch),
        step_loss=step_loss.detach(),
        step_rows=torch.tensor([len(s.rows) for s in output.steps], device=batch.ids.device),
        step_correct=torch.stack([s.correct for s in sums]),
        step_acceptance=torch.stack([s.acceptance for s in sums]),
    )


@dataclass(frozen=True)
class _StepSums:
    loss: Tensor
    correct: Tensor
    acceptance: Tensor


def _step_sums(
    step: StepOutput,
    teacher: Teacher,
    top1_R: Tensor,
    weight_R: Tensor | None,
    draft_vocab: Tensor | None,
    loss_of: Callable[[Tensor, Teacher], Tensor],
) -> _StepSums:
    log_q_RW = torch.log_softmax(step.logits, -1, dtype=torch.float32)
    best_R = draft_index(top1_R, draft_vocab)
    kept_R = (best_R >= 0).to(log_q_RW.dtype)
    loss = (loss_of(log_q_RW, teacher) * (kept_R if weight_R is None else kept_R * weight_R)).sum()
    with torch.no_grad():
        correct = (log_q_RW.argmax(-1) == best_R).sum()  # in fp32: several times faster than in bf16
        overlap = log_q_RW.exp()
        accepted = torch.minimum(overlap, teacher.p, out=overlap).sum()
    return _StepSums(loss, correct, accepted)


def _document_rows(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return the supervised rows per document, and each flat position's document number in that count."""
    row = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    key = (row * (batch.document.max() + 2) + batch.document + 1).flatten()
    counts = torch.bincount(key, supervised_rows(batch, 0).flatten().float())
    return counts, key


def _row_weights(batch: TrainBatch, spec: LossSpec) -> Tensor | None:
    """Return [B*L] weights of rows, None where all are 1: with "sequence" 1 / (rows of the row's document)."""
    if spec.normalize != "sequence":
        return None
    counts, key = _document_rows(batch)
    return counts.clamp_min(1.0).reciprocal()[key]
