"""The loss of a head's output on a batch: distillation losses against the frozen target, and exact acceptance.

Shapes: B batch rows, L tokens, R supervised rows of a step, U teacher positions of all steps, H target hidden,
V target vocab, W draft vocab, S steps.

The teacher's logits are computed from stored hidden states once per batch, for the union of the positions that any step needs
and for the draft vocabulary's columns alone (docs/algorithms.md, rule 4). The losses of a row are in divergences.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, iterate_supervised_rows, shift_left
from draftsmith.heads.losses.divergences import LOSSES, TINY, Teacher, acceptance, hard_ce, kl, top_k_ce
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import TargetHead

_CHUNK_ROWS = 1024
"""Rows whose distributions are held at a time without gradients: block drafters are evaluated on many times the rows that
they are trained on."""
_TEACHER_CHUNK = 1 << 26
"""Teacher logits made at a time (256 MB of fp32)."""


@torch.no_grad()
def make_teacher(
    batch: TrainBatch, positions_U: Tensor, target_head: TargetHead, draft_vocab: Tensor | None
) -> Teacher:
    """Return the target's distribution of the token after each flat position, exp(logit - logsumexp over the whole vocabulary),
    on the draft vocabulary's columns."""
    hidden_UH = batch.last.flatten(0, 1)[positions_U]
    logsumexp_U = batch.logsumexp.flatten()[positions_U].float()
    label_U = shift_left(batch.ids, 1, 0).flatten()[positions_U]
    rows = max(1, _TEACHER_CHUNK // (1 << 17 if draft_vocab is None else len(draft_vocab)))
    pieces = []
    for hidden, lse in zip(*(x.split(rows) for x in (hidden_UH, logsumexp_U)), strict=True):
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


@dataclass(frozen=True)
class LossOutput:
    """The sums over one batch; divide the loss by the global sum of `loss_divisor`, metrics by that of `step_rows`.

    loss_sum: scalar with gradient, the sum over steps k of their weight times the sum over rows. rows: N, the rows
    of step 0, dropped ones included. Per step, [S] without gradient: step_loss, the (weighted) sum of
    row losses before that weight; step_rows, the supervised rows, dropped ones included; step_correct, those where the
    draft's argmax is the target's; step_acceptance, the sum over rows of sum_x min(p(x), q(x)), p over all V.
    tuned: [4] without gradient, where the head tunes its target, else None: the sums over the target's rows of its loss
    (weighted), of KL(original || tuned) and of the rows where both have the same argmax; the number of rows.
    """

    loss_sum: Tensor
    rows: Tensor
    step_loss: Tensor
    step_rows: Tensor
    step_correct: Tensor
    step_acceptance: Tensor
    tuned: Tensor | None = None


def row_loss(spec: LossSpec, kind: str | None = None) -> Callable[[Tensor, Teacher], Tensor]:
    """Return the loss `kind` (None: that of `spec`) with the numbers of `spec`: ([R, W] log q, teacher) -> [R]."""
    loss = LOSSES[kind or spec.kind]
    function = partial(loss.function, **{key: getattr(spec, key) for key in loss.parameters})
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False) if loss.recomputed else function


def _row_terms(
    spec: LossSpec, batch: TrainBatch, tuned: bool
) -> Callable[[StepOutput, Tensor, Teacher, Tensor], Tensor]:
    """Return the whole loss of a step's rows, (step, [R, W] log q, teacher, [R] 0 where a row is dropped) -> [R].

    It sums the weighted losses of the logits, of the target's most likely tokens, of the features and of the confidence.
    tuned: whether the head tunes the target.
    """
    base = row_loss(spec)
    extra_terms = [(extra_weight, row_loss(spec, kind)) for kind, extra_weight in spec.also.items() if extra_weight]
    confidence_weight = 1.0 if spec.confidence_weight is None else spec.confidence_weight

    def loss_of(step: StepOutput, log_q_RW: Tensor, teacher: Teacher, kept_R: Tensor) -> Tensor:
        weight, feature_weight = spec.term_weights(step.feature is not None, tuned)
        loss_R = weight * base(log_q_RW, teacher)
        for extra_weight, loss in extra_terms:
            loss_R = loss_R + extra_weight * loss(log_q_RW, teacher)
        if spec.top_k_weight:
            loss_R = loss_R + spec.top_k_weight * top_k_ce(log_q_RW, teacher, spec.top_k)
        if feature_weight and step.feature is not None:
            state_RH = batch.last.flatten(0, 1)[step.rows + 1 + step.offset].float()
            distance_RH = F.smooth_l1_loss(step.feature.float(), state_RH, reduction="none")
            loss_R = loss_R + feature_weight * distance_RH.mean(-1)
        loss_R = loss_R * kept_R
        if step.confidence is not None:
            # On dropped rows too, whose drafts fail; and at weight 0, as processes that train together need a gradient of
            # every parameter.
            loss_R = loss_R + confidence_weight * confidence_loss(step.confidence, log_q_RW, teacher)
        return loss_R

    return loss_of


def confidence_loss(confidence_R: Tensor, log_q_RW: Tensor, teacher: Teacher) -> Tensor:
    """Return [R]: the cross-entropy between a head's confidence (log-odds) and the chance that a token of its distribution is
    accepted, sum_x min(p(x), q(x)), which gives no gradient to the distribution."""
    accepted_R = acceptance(log_q_RW.detach(), teacher)
    return F.binary_cross_entropy_with_logits(confidence_R.float(), accepted_R, reduction="none")


def loss_divisor(batch: TrainBatch, spec: LossSpec, head: DraftHead | None = None) -> Tensor:
    """Return the scalar that, summed over all ranks and micro-batches of an update, divides the sum of `loss_sum`.

    It depends on the batch and on the rows that `head` gives logits of (None: all of docs/algorithms.md, rule 1), so an
    update's divisor is known before its first backward pass. "rows": N, those of step 0. "weights": the rows of all steps that the head is
    trained on, by the steps' weights. "sequence": documents with at least one row. "positions": B*L.
    """
    if spec.normalize == "positions":
        return torch.tensor(batch.ids.numel(), device=batch.ids.device)
    masks = iterate_supervised_rows(batch) if head is None else head.supervised(batch)
    if spec.normalize == "weights":
        steps = 1 if head is None else head.trains.steps
        counts = torch.stack([mask_BL.sum() for mask_BL in islice(masks, steps)])
        return (counts * counts.new_tensor([spec.step_weight(k) for k in range(steps)], dtype=torch.float32)).sum()
    first_BL = next(iter(masks))
    if spec.normalize == "sequence":
        return _document_rows(batch, first_BL)[0].count_nonzero()
    return first_BL.sum()


def head_loss(
    output: HeadOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab: Tensor | None,
    spec: LossSpec,
    warmup_weight: float = 1.0,
) -> LossOutput:
    """Return the loss and the metrics of a head's output on `batch`.

    The same divisor serves every step (docs/algorithms.md, rule 3), so a step with fewer rows weighs less. Rows whose
    target argmax (`batch.top1`) is outside the draft vocabulary are dropped from the loss but stay in `rows`, in
    `step_rows`, and count as misses (docs/algorithms.md, rule 8). Everything runs in fp32, also under
    autocast.
    draft_vocab: [W] sorted target ids, None for all. warmup_weight: multiplies the losses of the draft, see
    `LossSpec.warmup_weight`. The teacher of a target that is tuned too (output.tuned) is the original.
    """
    with torch.autocast(batch.ids.device.type, enabled=False):
        rows = torch.cat([s.rows + 1 + s.offset for s in output.scored])
        positions, index = torch.unique(rows, return_inverse=True)
        teacher = make_teacher(batch, positions, target_head, draft_vocab)
        top1 = batch.top1.flatten()[positions]
        loss_of = _row_terms(spec, batch, output.tuned is not None)
        weights = _row_weights(batch, spec, output.steps[0].rows)
        sums = []
        indices = index.split([len(s.rows) for s in output.scored])
        for step, index_R in zip(output.steps, indices, strict=False):
            weight = None if weights is None else weights[step.rows]
            sums.append(_step_sums(step, teacher, index_R, top1[index_R], weight, draft_vocab, loss_of))
        tuned_loss, tuned = torch.zeros((), device=batch.ids.device), None
        if output.tuned is not None:
            assert draft_vocab is None, "a tuned target has a distribution over its whole vocabulary"
            tuned_loss, tuned = _tuned_sums(output.tuned, teacher.select(indices[-1]), top1[indices[-1]], weights, spec)
    depth = torch.tensor([spec.step_weight(s.offset) for s in output.steps], device=batch.ids.device)
    step_loss = torch.stack([s.loss for s in sums])
    return LossOutput(
        loss_sum=warmup_weight * (depth * step_loss).sum() + tuned_loss,
        rows=torch.tensor(len(output.steps[0].rows), device=batch.ids.device),
        step_loss=step_loss.detach(),
        step_rows=torch.tensor([len(s.rows) for s in output.steps], device=batch.ids.device),
        step_correct=torch.stack([s.correct for s in sums]),
        step_acceptance=torch.stack([s.acceptance for s in sums]),
        tuned=tuned,
    )


@dataclass(frozen=True)
class _StepSums:
    loss: Tensor
    correct: Tensor
    acceptance: Tensor


def _step_sums(
    step: StepOutput,
    teacher: Teacher,
    index_R: Tensor,
    top1_R: Tensor,
    weight_R: Tensor | None,
    draft_vocab: Tensor | None,
    loss_of: Callable[[StepOutput, Tensor, Teacher, Tensor], Tensor],
) -> _StepSums:
    """Return the sums over a step's rows; index_R: where each row's distribution stands in `teacher`."""
    if not torch.is_grad_enabled() and len(step.rows) > _CHUNK_ROWS:
        parts = []
        for piece in torch.arange(len(step.rows), device=top1_R.device).split(_CHUNK_ROWS):
            weight = None if weight_R is None else weight_R[piece]
            own = (step.select(piece), teacher, index_R[piece], top1_R[piece], weight)
            parts.append(_step_sums(*own, draft_vocab, loss_of))
        sums = ([getattr(part, field.name) for part in parts] for field in fields(_StepSums))
        return _StepSums(*(torch.stack(values).sum(0) for values in sums))
    teacher, log_q_RW = teacher.select(index_R), torch.log_softmax(step.logits, -1, dtype=torch.float32)
    best_R = draft_index(top1_R, draft_vocab)
    kept_R = (best_R >= 0).to(log_q_RW.dtype)
    loss_R = loss_of(step, log_q_RW, teacher, kept_R)
    loss = (loss_R if weight_R is None else loss_R * weight_R).sum()
    with torch.no_grad():
        correct = (log_q_RW.argmax(-1) == best_R).sum()  # in fp32: several times faster than in bf16
        overlap = log_q_RW.exp()
        accepted = torch.minimum(overlap, teacher.p, out=overlap).sum()
    return _StepSums(loss, correct, accepted)


def _tuned_sums(
    step: StepOutput, teacher: Teacher, top1_R: Tensor, weights: Tensor | None, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """Return a tuned target's weighted loss, and `LossOutput.tuned`."""
    log_q_RV = torch.log_softmax(step.logits, -1, dtype=torch.float32)
    kl_R = kl(log_q_RV, teacher)
    loss_R = kl_R if spec.tuned_kind == "kl" else hard_ce(log_q_RV, teacher)
    loss_R = loss_R if weights is None else loss_R * weights[step.rows]
    loss = (1.0 if spec.tuned_weight is None else spec.tuned_weight) * loss_R.sum()
    same = (log_q_RV.argmax(-1) == top1_R).sum()
    rows = torch.tensor(len(step.rows), device=step.rows.device)
    return loss, torch.stack([loss, kl_R.sum(), same.float(), rows.float()]).detach()


def _document_rows(batch: TrainBatch, rows_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the rows each document has, and each flat position's document number in that count."""
    row = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    key = (row * (batch.document.max() + 2) + batch.document + 1).flatten()
    counts = torch.bincount(key, rows_BL.flatten().float())
    return counts, key


def _row_weights(batch: TrainBatch, spec: LossSpec, rows: Tensor) -> Tensor | None:
    """Return [B*L] weights of rows, None where all are 1: with "sequence" 1 / (rows of step 0 in the row's document)."""
    if spec.normalize != "sequence":
        return None
    first = torch.zeros(batch.ids.numel(), device=rows.device)
    counts, key = _document_rows(batch, first.index_fill(0, rows, 1.0))
    return counts.clamp_min(1.0).reciprocal()[key]
