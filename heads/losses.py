"""What a draft step is judged by: distillation losses against the frozen target, and exact acceptance.

Shapes: B batch rows, L tokens, R supervised rows of a step, U teacher positions of all steps, H target hidden,
V target vocab, W draft vocab, S steps.

Teacher logits are made from stored hidden states, once per batch, for the union of the positions that any step
needs and only for the draft vocabulary's columns (rule 4 of "rules for all heads"). p is the target's law over the
FULL vocabulary, exp(logit - logsumexp), so a row of p sums to less than 1. The losses of a row are in divergences.py.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.fields import without_neutral
from draftsmith.heads.base import HeadOutput, StepOutput, count_rows, supervised_rows
from draftsmith.heads.divergences import hard_ce, jsd, kl, lk_alpha, lk_hybrid, reverse_kl, soft_ce, top_k_ce, tv
from draftsmith.heads.teacher import TargetLogits, Teacher, draft_index, make_teacher

LossKind = Literal["kl", "reverse_kl", "jsd", "soft_ce", "tv", "lk_alpha", "lk_hybrid", "hard_ce"]
Normalize = Literal["rows", "sequence", "positions"]
BESIDE_FEATURES = 0.1
"""Weight of the loss of logits where features are learnt too, as in EAGLE-1."""


@dataclass(frozen=True)
class LossSpec:
    """How draft logits are compared with the target's law."""

    kind: LossKind = "kl"
    """kl: forward KL; reverse_kl: KL from the draft to the target; jsd: between the two, see beta; soft_ce: the gradient
    of kl without the entropy; tv: 1 - acceptance rate; lk_alpha: its logarithm; lk_hybrid: KL fading into tv as acceptance
    grows; hard_ce: cross-entropy with the text itself."""
    decay: float = 0.8
    """Step k weighs decay**k."""
    depth_weights: list[float] | None = None
    """The weight of each step (or head), in place of decay; null: by decay."""
    beta: float = 0.5
    """jsd: weight of the target's law in the mixture; near 0 the loss is beta * kl, near 1 (1 - beta) * reverse_kl."""
    lk_scale: float = 1.0
    """lk_hybrid: weight of the KL term at acceptance 0."""
    lk_decay: float = 3.0
    """lk_hybrid: how fast that weight falls as acceptance grows."""
    weight: float | None = None
    """Weight of the loss that `kind` names; null: 1, or 0.1 beside a feature loss (EAGLE-1)."""
    feature_weight: float | None = None
    """Weight of the smooth L1 distance between a head's output and the target's state that it stands for; null: 1 for
    heads that have such an output (EAGLE-1), 0 for others."""
    top_k_weight: float = 0.0
    """Weight of the cross-entropy on the target's top_k most likely tokens alone (HASS: 1)."""
    top_k: int = 10
    """How many tokens top_k_weight is about."""
    normalize: Normalize = "rows"
    """The mean that the loss is: over supervised rows; over documents of their own mean over rows; or over all
    B*L positions, padding included (SpecForge)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise UserError(f"loss.decay is {self.decay}: it must be above 0 and at most 1.")
        if not 0.0 < self.beta < 1.0:
            raise UserError(
                f"loss.beta is {self.beta}: it must be above 0 and below 1; kl and reverse_kl are its ends."
            )
        weights = self.depth_weights
        if weights is not None and not (sum(weights) > 0 and all(0 <= w < inf for w in weights)):
            raise UserError(
                f"loss.depth_weights is {weights}: give one number per step or head, none negative and not all of them 0."
            )
        for key in ("weight", "feature_weight", "top_k_weight"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < inf:
                raise UserError(f"loss.{key} is {value}: it must not be negative.")
        if self.top_k < 1:
            raise UserError(f"loss.top_k is {self.top_k}: it must be at least 1.")

    def check_features(self, present: bool) -> None:
        """Raise UserError where the recipe weighs features that the head's outputs do not have."""
        if self.feature_weight and not present:
            raise UserError(
                f"loss.feature_weight is {self.feature_weight}, but no output of the head stands for a state of the target: "
                "leave it out, or train EAGLE-1."
            )

    def term_weights(self, features: bool) -> tuple[float, float]:
        """Return the weights of the loss of logits and of features, of a head that has `features` or has not.

        Raises UserError for a weight on features that are not there.
        """
        self.check_features(features)
        feature_weight = float(features) if self.feature_weight is None else self.feature_weight
        weight = (BESIDE_FEATURES if feature_weight else 1.0) if self.weight is None else self.weight
        return weight, feature_weight

    def check_steps(self, steps: int) -> None:
        """Raise UserError where the weights are not those of a head that is trained on `steps` steps (or heads)."""
        if self.depth_weights is not None and len(self.depth_weights) != steps:
            raise UserError(
                f"loss.depth_weights has {len(self.depth_weights)} numbers, but the head is trained on {steps} steps: give "
                "one number for each."
            )

    def step_weight(self, offset: int) -> float:
        """Return the weight of step (or head) number `offset`."""
        return self.decay**offset if self.depth_weights is None else self.depth_weights[offset]

    @property
    def inputs(self) -> dict[str, Any]:
        """What a trained head depends on, to tell whether a finished one still fits."""
        neutral = {"depth_weights": None, "beta": 0.5, "weight": None, "feature_weight": None}
        return without_neutral(asdict(self), neutral | {"top_k_weight": 0.0, "top_k": 10})


@dataclass(frozen=True)
class LossOutput:
    """The sums over one batch; divide by the global sum of `loss_divisor` (loss) or of `step_rows` (metrics).

    loss_sum: scalar with gradient, the sum over steps k of their weight times the sum over rows. rows: N, the rows
    supervised at offset 0, dropped ones included. Per step, [S] without gradient: step_loss, the (weighted) sum of
    row losses before that weight; step_rows, the supervised rows, dropped ones included; step_correct, those where the
    draft's argmax is the target's; step_acceptance, the sum over rows of sum_x min(p(x), q(x)), p over all V.
    """

    loss_sum: Tensor
    rows: Tensor
    step_loss: Tensor
    step_rows: Tensor
    step_correct: Tensor
    step_acceptance: Tensor


def row_loss(spec: LossSpec) -> Callable[[Tensor, Teacher], Tensor]:
    """Return the loss of rows that `spec` names: ([R, W] log q, teacher) -> [R].

    Those that go through more laws than the two make them again in the backward pass: kept, they would be up to six
    more [R, W] per step.
    """
    lean = {"kl": kl, "soft_ce": soft_ce, "hard_ce": hard_ce}
    wide = {
        "reverse_kl": reverse_kl,
        "jsd": partial(jsd, beta=spec.beta),
        "tv": tv,
        "lk_alpha": lk_alpha,
        "lk_hybrid": partial(lk_hybrid, scale=spec.lk_scale, decay=spec.lk_decay),
    }
    if spec.kind in lean:
        return lean[spec.kind]
    if spec.kind not in wide:
        raise UserError(f"loss.kind is {spec.kind!r}: choose one of {', '.join(get_args(LossKind))}.")
    return partial(checkpoint, wide[spec.kind], use_reentrant=False, preserve_rng_state=False)


def _row_terms(spec: LossSpec, batch: TrainBatch) -> Callable[[StepOutput, Tensor, Teacher], Tensor]:
    """Return the whole loss of a step's rows, (step, [R, W] log q, teacher) -> [R]: that of the logits, and where they
    have a weight that of the target's likeliest tokens and that of the features."""
    base = row_loss(spec)

    def loss_of(step: StepOutput, log_q_RW: Tensor, teacher: Teacher) -> Tensor:
        weight, feature_weight = spec.term_weights(step.feature is not None)
        loss_R = weight * base(log_q_RW, teacher)
        if spec.top_k_weight:
            loss_R = loss_R + spec.top_k_weight * top_k_ce(log_q_RW, teacher, spec.top_k)
        if feature_weight and step.feature is not None:
            state_RH = batch.last.flatten(0, 1)[step.rows + 1 + step.offset].float()
            distance_RH = F.smooth_l1_loss(step.feature.float(), state_RH, reduction="none")
            loss_R = loss_R + feature_weight * distance_RH.mean(-1)
        return loss_R

    return loss_of


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
        loss_of, weights = _row_terms(spec, batch), _row_weights(batch, spec)
        sums = []
        for step, where in zip(output.steps, index.split([len(s.rows) for s in output.steps]), strict=True):
            weight = None if weights is None else weights[step.rows]
            sums.append(_step_sums(step, teacher.select(where), top1[where], weight, draft_vocab, loss_of))
    depth = torch.tensor([spec.step_weight(s.offset) for s in output.steps], device=batch.ids.device)
    step_loss = torch.stack([s.loss for s in sums])
    return LossOutput(
        loss_sum=(depth * step_loss).sum(),
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
    loss_of: Callable[[StepOutput, Tensor, Teacher], Tensor],
) -> _StepSums:
    log_q_RW = torch.log_softmax(step.logits, -1, dtype=torch.float32)
    best_R = draft_index(top1_R, draft_vocab)
    kept_R = (best_R >= 0).to(log_q_RW.dtype)
    loss = (loss_of(step, log_q_RW, teacher) * (kept_R if weight_R is None else kept_R * weight_R)).sum()
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
