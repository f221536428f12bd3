"""The loss of a head's output on a batch: distillation losses against the frozen target, and exact acceptance.

Shapes: B batch rows, L tokens, R supervised rows of a step, U teacher positions of all steps, H target hidden,
V target vocab, W draft vocab, S steps.

The rows of all steps are taken in the order of their positions, a piece at a time (pieces.py): of a piece's positions the teacher's
logits are computed once, from stored hidden states and for the draft vocabulary's columns alone (docs/algorithms.md, rule 4). No
tensor with V or W columns outlives its piece. The losses of a row are in divergences.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.data.batch import TrainBatch
from draftsmith.data.memory import move
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, iterate_supervised_rows, shift_left
from draftsmith.heads.losses.divergences import LOSSES, TINY, Teacher, acceptance, choose, hard_ce, kl, top_k_ce
from draftsmith.heads.losses.pieces import Piece, divisor_of, joined, plan_loss, sum_pieces
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.plan import LossPlan, flat_rows
from draftsmith.target.target import TargetHead

PIECE = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Logits that are there at a time, by the kind of device: what a CPU's caches hold, and 128 MB of fp32. Other kinds take CUDA's."""


@torch.no_grad()
def make_teacher(
    batch: TrainBatch, positions_U: Tensor, target_head: TargetHead, draft_vocab: Tensor | None, labels: bool = True
) -> Teacher:
    """Return the target's distribution of the token after each flat position, exp(logit - logsumexp over the whole vocabulary),
    on the draft vocabulary's columns. labels: with the text's own tokens."""
    hidden_UH = batch.last.flatten(0, 1)[positions_U]
    logsumexp_U = batch.logsumexp.flatten()[positions_U].float()
    logits_UW = target_head.narrow_logits(hidden_UH, draft_vocab)
    # Made float32 in the same pass. No token has less than TINY, so that the mass is never 0.
    log_p_UW = torch.sub(logits_UW, logsumexp_U[:, None], out=logits_UW if logits_UW.dtype == torch.float32 else None)
    p_UW = log_p_UW.clamp_min_(log(TINY)).exp()
    mass_U = p_UW.sum(-1)
    negentropy_U = log_p_UW.mul_(p_UW).sum(-1).div_(mass_U).sub_(mass_U.log())

    def index(ids: Tensor) -> Tensor:
        ids_U = ids.flatten()[positions_U].long()
        return ids_U if draft_vocab is None else target_head.places(draft_vocab)[ids_U]

    label_U = index(shift_left(batch.ids, 1, 0)) if labels else None
    return Teacher(p_UW, mass_U, negentropy_U, label_U, index(batch.top1))


@dataclass(frozen=True)
class LossOutput:
    """The sums over one batch; divide the loss by the global sum of `loss_divisor`, metrics by that of `step_rows`.

    loss_sum: scalar with gradient, the sum over steps k of their weight times the sum over rows. rows: N, the rows
    of step 0, dropped ones included. Per step, [S] without gradient: step_loss, the sum of
    row losses before that weight and those of documents; step_rows, the supervised rows, dropped ones included; step_correct, those where the
    draft's argmax is the target's; step_acceptance, the sum over rows of sum_x min(p(x), q(x)), p over all V.
    tuned: [4] without gradient, where the head tunes its target, else None: the sums over the target's rows of its loss
    (weighted), of KL(original || tuned) and of the rows where both have the same argmax; the number of rows.
    weights: scalar without gradient, the sum of D-PACE's weights, which then stands in the divisor's place; else None.
    selector: [2, S] without gradient, of a head with a selector, else None: the rows where the argmax of the plain logits is the
    target's, and those where the target's argmax is among the candidates.
    """

    loss_sum: Tensor
    rows: Tensor
    step_loss: Tensor
    step_rows: Tensor
    step_correct: Tensor
    step_acceptance: Tensor
    tuned: Tensor | None = None
    weights: Tensor | None = None
    selector: Tensor | None = None


def row_loss(spec: LossSpec, kind: str | None = None) -> Callable[[Tensor, Teacher], Tensor]:
    """Return the loss `kind` (None: that of `spec`) with the numbers of `spec`: ([R, W] log q, teacher) -> [R]."""
    loss = LOSSES[kind or spec.kind]
    return partial(loss.function, **{key: getattr(spec, key) for key in loss.parameters})


def loss_divisor(batch: TrainBatch, spec: LossSpec, head: DraftHead | None = None) -> Tensor:
    """Return the scalar that, summed over all ranks and micro-batches of an update, divides the sum of `loss_sum`.

    It depends on the batch and on the rows that `head` gives logits of (None: all of docs/algorithms.md, rule 1), so an
    update's divisor is known before its first backward pass. "rows": N, those of step 0. "weights": the rows of all steps that the head is
    trained on, by the steps' weights. "sequence": documents with at least one row. "positions": B*L.
    """
    masks = iterate_supervised_rows(batch) if head is None else head.supervised(batch)
    steps = head.trains.steps if spec.normalize == "weights" and head is not None else 1
    return divisor_of([flat_rows(mask_BL) for mask_BL in islice(masks, steps)], batch, spec)


def head_loss(
    output: HeadOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab: Tensor | None,
    spec: LossSpec,
    progress: float = 1.0,
    piece_size: int | None = None,
    scale: float = 1.0,
) -> LossOutput:
    """Return the loss and the metrics of a head's output on `batch`.

    The same divisor serves every step (docs/algorithms.md, rule 3), so a step with fewer rows weighs less. Rows whose
    target argmax (`batch.top1`) is outside the draft vocabulary are dropped from the loss but stay in `rows`, in
    `step_rows`, and count as misses (docs/algorithms.md, rule 8). Everything runs in fp32, also under
    autocast.
    draft_vocab: [W] sorted target ids, None for all. progress: the part of the training that is done, which
    `LossSpec.warmup_weight` and `LossSpec.besides` go by. piece_size: logits that are there at a time, None for those of `PIECE`. scale: see `sum_pieces`. The teacher
    of a target that is tuned too (output.tuned) is the original.
    """
    device, steps, plan = batch.ids.device, output.steps, _planned(output, batch, spec)
    warmup = spec.warmup_weight(progress)
    depth_S = plan.depths_S if warmup == 1 else plan.depths_S * warmup
    terms = _RowTerms(spec, batch, output.tuned is not None, plan.weights, depth_S, progress)
    assert output.tuned is None or draft_vocab is None, "a tuned target has a distribution over its whole vocabulary"
    with torch.autocast(device.type, enabled=False):
        size = piece_size or PIECE.get(batch.last.device.type, PIECE["cuda"])
        kinds = (spec.kind, *spec.also, *([] if output.tuned is None else [spec.tuned_kind]))
        # Whether a loss is about the text's own tokens.
        labels = spec.selector_labels == "data" or any(LOSSES[kind].label == "label" for kind in kinds)
        teach = partial(make_teacher, batch, target_head=target_head, draft_vocab=draft_vocab, labels=labels)
        width = target_head.vocab_size if draft_vocab is None else len(draft_vocab)
        loss, figures = _sums(output, plan, teach, terms, max(1, size // (width * len(output.scored))), scale)
    figures = figures.float()
    tuned = None if output.tuned is None else figures[-4:]
    chosen = steps[0].selector is not None
    figures = figures[: (3 + spec.dpace + 2 * chosen) * len(steps)].view(-1, len(steps))
    return LossOutput(
        loss_sum=loss,
        rows=plan.counts_S[0],
        step_loss=figures[0],
        step_rows=plan.counts_S,
        step_correct=figures[1],
        step_acceptance=figures[2],
        tuned=tuned,
        weights=figures[3].sum() if spec.divided_later else None,
        selector=figures[-2:] if chosen else None,
    )


@torch.no_grad()
def dpace(chance_R: Tensor, block_R: Tensor, slot_R: Tensor, blocks: int, slots: int, spec: LossSpec) -> Tensor:
    """Return the weights [R] of rows by how much each slot of a block adds to the accepted length: "D-PACE" (arXiv 2605.18810).

    A slot's draft is accepted with about the probability q that the head gives to its label, smoothed: q' = (1 - alpha) q + alpha. The
    draft gets as far as slot j with C_j = q'_1 .. q'_j, so that the accepted length is the sum of C_j. Its gradient by log q'_j is the
    weight of slot j: the sum of C_m over m >= j. A slot that is not trained is passed over.

    chance_R: the probability of each row's label. block_R, slot_R: the numbers of its block and of its slot, each pair once. blocks,
    slots: how many there are (N, S).
    """
    place_R = block_R * slots + slot_R
    flat = torch.full((blocks * slots,), -1.0, device=chance_R.device)
    chance_NS = flat.index_copy(0, place_R, chance_R.float()).view(blocks, slots)
    trained_NS = chance_NS >= 0
    smoothed_NS = torch.where(trained_NS, (1 - spec.dpace_alpha) * chance_NS + spec.dpace_alpha, 1.0)
    reached_NS = smoothed_NS.cumprod(1)
    further_NS = trained_NS.float()  # C_m / C_j, summed: without a division, as C_j may underflow
    for slot in reversed(range(slots - 1)):
        further_NS[:, slot] += smoothed_NS[:, slot + 1] * further_NS[:, slot + 1]
    weights = {
        "dpace": reached_NS * further_NS,
        "dpace_confidence": reached_NS,
        "dpace_continuation": further_NS,
    }
    return weights[spec.slot_weights].flatten()[place_R]


@dataclass(frozen=True)
class _RowTerms:
    """Makes the weighted loss and the figures of rows: (rows, [R, W] log q) -> a scalar, and by step the losses, the right guesses and the
    acceptance, then D-PACE's weights and `LossOutput.selector`, where there are such.

    tuned: whether the head tunes the target. weights: see `LossPlan`. depth_S: the steps' weights. progress: see `head_loss`.
    """

    spec: LossSpec
    batch: TrainBatch
    tuned: bool
    weights: Tensor | None
    depth_S: Tensor
    progress: float

    def __call__(self, piece: Piece, log_q_RW: Tensor) -> tuple[Tensor, Tensor]:
        spec, teacher = self.spec, piece.teacher
        kept_R = trained_R = teacher.best >= 0
        if spec.dpace:
            base, label_R = row_loss(spec), getattr(teacher, LOSSES[spec.kind].label)
            trained_R = kept_R & (label_R >= 0)
            slot_R = self._slots(piece, base(log_q_RW.detach(), teacher), trained_R)
        else:
            slot_R = piece.of_steps(self.depth_S)
        loss_R = self.loss_of(piece, log_q_RW, trained_R)
        source = piece.source
        if source.besides is not None and source.rounds is not None:
            own, *shares = spec.besides(self.progress, source.rounds)
            loss_R = loss_R * own
            others = source.in_precision(source.besides, *piece.inputs) if any(shares) else ()
            for share, logits_RW in zip(shares, others, strict=bool(others)):
                log_besides_RW = torch.log_softmax(logits_RW, -1, dtype=torch.float32)
                loss_R = torch.add(loss_R, self.loss_of(piece, log_besides_RW, trained_R), alpha=share)
        # The figures are of rows alike, whatever these weigh.
        weights_R = None if self.weights is None else self.weights[piece.rows]
        total, choice = (loss_R if weights_R is None else loss_R * weights_R) @ slot_R, None
        if source.rounds is None:
            total = total + self._restarted(piece, trained_R).sum()
        if source.selector is not None:
            label_R = teacher.label if spec.selector_labels == "data" else teacher.best
            assert label_R is not None
            choice = choose(log_q_RW, teacher, label_R, source.selector, piece.inputs[1:])
            known_R = kept_R & (label_R >= 0)
            own_R = (1.0 if self.spec.selector_weight is None else self.spec.selector_weight) * known_R * choice.loss_R
            weighed_R = own_R if weights_R is None else own_R * weights_R
            total = total + weighed_R @ self._slots(piece, choice.loss_R, known_R)
            loss_R = loss_R + own_R
        with torch.no_grad():
            correct_R = log_q_RW.max(-1).indices == teacher.best  # on a CPU in half of the time of argmax
            slots = [slot_R * trained_R] if spec.dpace else []
            if choice is None:
                figures = [loss_R, correct_R, acceptance(log_q_RW, teacher), *slots]
            else:
                figures = [loss_R, choice.correct_R, choice.acceptance_R, *slots, correct_R, choice.recalled_R]
            step_RS = piece.of_steps(piece.plan.places_SS)
            into_FR = loss_R.new_empty(len(figures), len(loss_R), dtype=step_RS.dtype)
            figures_FR = torch.stack(figures, out=into_FR)
        return total, figures_FR @ step_RS

    def loss_of(self, rows: Piece, log_q_RW: Tensor, kept_R: Tensor) -> Tensor:
        """Return [R], the weighted losses of the logits, of the target's most likely tokens, of the features and of the confidence, added up.
        log_q_RW: of the draft. kept_R: 0 where a row is dropped."""
        spec, teacher = self.spec, rows.teacher
        weight, feature_weight = spec.term_weights(rows.feature is not None, self.tuned)
        loss_R = row_loss(spec)(log_q_RW, teacher)
        loss_R = loss_R if weight == 1 else weight * loss_R
        for kind, extra_weight in spec.also.items():
            if extra_weight:
                loss_R = loss_R + extra_weight * row_loss(spec, kind)(log_q_RW, teacher)
        if spec.top_k_weight:
            loss_R = loss_R + spec.top_k_weight * top_k_ce(log_q_RW, teacher, spec.top_k)
        if feature_weight and rows.feature is not None:
            state_RH = self.batch.last.flatten(0, 1)[rows.positions].float()
            distance_RH = F.smooth_l1_loss(rows.feature.float(), state_RH, reduction="none")
            loss_R = loss_R + feature_weight * distance_RH.mean(-1)
        loss_R = loss_R * kept_R
        if rows.confidence is not None:
            # On dropped rows too, whose drafts fail; and at weight 0, as processes that train together need a gradient of
            # every parameter.
            # The confidence (log-odds) learns the chance that a token of the head's distribution is accepted, sum_x min(p(x), q(x)),
            # which gives no gradient to the distribution.
            accepted_R = acceptance(log_q_RW.detach(), teacher)
            weight = 1.0 if spec.confidence_weight is None else spec.confidence_weight
            loss_R = loss_R + weight * F.binary_cross_entropy_with_logits(
                rows.confidence.float(), accepted_R, reduction="none"
            )
        return loss_R

    def _restarted(self, piece: Piece, trained_R: Tensor) -> Tensor:
        """Return [R], the weighted losses behind a shown prefix, from whose end the steps' weights begin."""
        source, behind_R = piece.source, piece.step - piece.inputs[-1]
        assert source.besides is not None
        (logits_RW,) = source.in_precision(source.besides, *piece.inputs)
        loss_R = self.loss_of(piece, torch.log_softmax(logits_RW, -1, dtype=torch.float32), trained_R * (behind_R >= 0))
        loss_R = loss_R if self.weights is None else loss_R * self.weights[piece.rows]
        return loss_R * self.depth_S[behind_R.clamp_min(0)]

    def _slots(self, piece: Piece, ce_R: Tensor, known_R: Tensor) -> Tensor:
        """Return the weights of rows: their steps' or, by their cross-entropy, D-PACE's. A draft hardly gets past a label that it cannot
        have, where `known_R` is 0."""
        if not self.spec.dpace:
            return piece.of_steps(self.depth_S)
        chance_R = (-ce_R.detach()).exp() * known_R
        own_R = dpace(chance_R, piece.block, piece.step, piece.blocks, len(self.depth_S), self.spec)
        return piece.of_steps(self.depth_S) * own_R

    def of_tuned(self, piece: Piece, log_q_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tuned target's weighted loss, and `LossOutput.tuned`."""
        spec, kl_R = self.spec, kl(log_q_RV, piece.teacher)
        loss_R = kl_R if spec.tuned_kind == "kl" else hard_ce(log_q_RV, piece.teacher)
        loss_R = loss_R if self.weights is None else loss_R * self.weights[piece.rows]
        loss = (1.0 if spec.tuned_weight is None else spec.tuned_weight) * loss_R.sum()
        same_R = log_q_RV.argmax(-1) == piece.teacher.best
        figures = [loss.detach(), kl_R.detach().sum(), same_R.sum(), torch.ones_like(same_R).sum()]
        return loss, torch.stack([figure.double() for figure in figures])


def by_projection(steps: Sequence[StepOutput]) -> list[list[int]]:
    """Return the numbers of the steps, those side by side that one function makes the logits of."""

    def alike(number: int) -> tuple[Any, ...]:
        step = steps[number]
        return step.project, step.offset < 0, step.feature is None, step.confidence is None

    return [list(group) for _, group in groupby(range(len(steps)), key=alike)]


def _planned(output: HeadOutput, batch: TrainBatch, spec: LossSpec) -> LossPlan:
    """Return the plan of the loss that travels with the batch, or one made now, for which a GPU is waited for, also where a head did not
    compute the rows that it planned."""
    plan, computed = batch.plan, [(step.offset, id(step.rows)) for step in output.scored]
    if plan is not None and plan.loss is not None and computed == [(offset, id(at)) for offset, at in plan.scored]:
        return plan.loss
    rows, offsets = [step.rows.cpu() for step in output.scored], [step.offset for step in output.scored]
    return move(plan_loss(rows, offsets, batch.without_states().to("cpu"), spec), batch.ids.device)


def _sums(
    output: HeadOutput,
    plan: LossPlan,
    teach: Callable[[Tensor], Teacher],
    terms: _RowTerms,
    count: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums over the rows of all steps, see `sum_pieces`: positions come in order, with the rows of all steps there.

    teach: flat positions -> the target's distribution. count: positions of a piece.
    """
    steps, spans = output.scored, plan.spans(count)
    columns = [(number, tensor) for number, step in enumerate(steps) for tensor in step.tensors]
    groups = by_projection(steps)

    def of_piece(number: int, *values: Tensor) -> tuple[Tensor, Tensor]:
        asked, here = spans[number].positions, spans[number].rows
        teacher = teach(plan.positions_U[asked])
        total, figures, tuned = None, None, []
        for group in groups:
            first = steps[group[0]]
            own = [[value for (k, _), value in zip(columns, values, strict=True) if k == step] for step in group]
            given = [joined(parts) for parts in zip(*own, strict=True)]
            inputs, others = given[: len(first.sources)], given[len(first.sources) :]
            feature = None if first.feature is None else others[0]
            confidence = None if first.confidence is None else others[-1]
            known = teacher.select(joined([plan.indices[k][here[k]] for k in group]) - asked.start)
            parts = [(steps[k], k, here[k]) for k in group]
            piece = Piece(plan, parts, known, feature, confidence, number * count, count, first, inputs)
            log_q_RW = torch.log_softmax(first.projected(*inputs), -1, dtype=torch.float32)
            if first.offset >= 0:
                loss, more = terms(piece, log_q_RW)
                figures = more if figures is None else figures + more
            else:
                loss, more = terms.of_tuned(piece, log_q_RW)
                tuned = [more]
            total = loss if total is None else total + loss
        assert figures is not None, "a head has steps"
        assert total is not None
        return total, torch.cat([figures.flatten(), *tuned]) if tuned else figures.flatten()

    return sum_pieces(
        of_piece, [tensor for _, tensor in columns], [[span.rows[k] for k, _ in columns] for span in spans], scale
    )
