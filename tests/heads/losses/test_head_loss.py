"""Losses against their definitions on the whole vocabulary, and how rows are dropped, weighted and divided."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, StepOutput, count_rows
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.losses.head_loss import LossOutput, head_loss, loss_divisor, make_teacher
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa.head import MedusaOptions, build
from draftsmith.heads.registry import methods
from draftsmith.target.target import Target, TargetHead
from tests.batches import documents_of, pack
from tests.heads.losses.oracles import ORACLES, Row, random_output
from tests.models import SMALL_HEADS

VOCAB = torch.arange(0, 160, 2)


def naive_loss(output: HeadOutput, batch: TrainBatch, target: Target, vocab: Tensor, spec: LossSpec) -> Tensor:
    p_BLV = target.head.logits(batch.last).softmax(-1)
    total, L = torch.zeros(()), batch.ids.shape[1]
    for step in output.steps:
        for flat, logits in zip(step.rows.tolist(), step.logits, strict=True):
            b, t = divmod(flat, L)
            p_V = p_BLV[b, t + 1 + step.offset]
            if p_V.argmax() not in vocab:
                continue
            token = int(batch.ids[b, t + 2 + step.offset])
            q_V = torch.zeros_like(p_V).index_copy(0, vocab, logits.softmax(-1))
            total = total + spec.decay**step.offset * ORACLES[spec.kind](Row(spec, p_V, q_V, vocab, token))
    return total


def gradients(output: HeadOutput) -> list[Tensor]:
    return [step.logits.grad for step in output.steps]


@pytest.mark.parametrize("whole", [False, True], ids=["draft-vocab", "whole-vocab"])
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_equal_the_definition(kind, whole, target, batch):
    own = {"jsd": {"beta": 0.3}, "lk_hybrid": {"lk_scale": 0.8, "lk_decay": 2.0}}
    spec = LossSpec(kind=kind, decay=0.7, **own.get(kind, {}))
    vocab = torch.arange(160) if whole else VOCAB
    ours, theirs = random_output(batch, len(vocab)), random_output(batch, len(vocab))
    loss = head_loss(ours, batch, target.head, None if whole else vocab, spec).loss_sum
    expected = naive_loss(theirs, batch, target, vocab, spec)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
    loss.backward()
    expected.backward()
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_metrics_use_the_full_vocabulary_and_count_misses(target, batch):
    output = random_output(batch, len(VOCAB))
    scored = head_loss(output, batch, target.head, VOCAB, LossSpec())
    p = target.head.logits(batch.last).softmax(-1).flatten(0, 1)
    for k, step in enumerate(output.steps):
        teacher, q = p[step.rows + 1 + k], torch.zeros(len(step.rows), 160)
        q[:, VOCAB] = step.logits.detach().softmax(-1)
        assert scored.step_rows[k] == len(step.rows)
        assert scored.step_acceptance[k].item() == pytest.approx(torch.minimum(teacher, q).sum().item(), rel=1e-5)
        right = VOCAB[step.logits.argmax(-1)] == teacher.argmax(-1)
        assert scored.step_correct[k] == right.sum()
    perfect = [F.one_hot(batch.top1.flatten()[s.rows + 1 + s.offset], 160)[:, VOCAB].float() for s in output.steps]
    perfect = HeadOutput(tuple(replace(s, inputs=x) for s, x in zip(output.steps, perfect, strict=True)))
    scored = head_loss(perfect, batch, target.head, VOCAB, LossSpec())
    inside = [(batch.top1.flatten()[s.rows + 1 + s.offset] % 2 == 0).sum() for s in output.steps]
    assert scored.step_correct.tolist() == [int(n) for n in inside]
    assert 0 < scored.step_correct[0] < scored.step_rows[0]


def test_rows_outside_the_draft_vocabulary_carry_no_loss_but_stay_in_the_divisor(target, batch):
    output = random_output(batch, len(VOCAB))
    scored = head_loss(output, batch, target.head, VOCAB, LossSpec())
    scored.loss_sum.backward()
    assert scored.rows == count_rows(batch) == len(output.steps[0].rows) == loss_divisor(batch, LossSpec())
    outside = batch.top1.flatten()[output.steps[1].rows + 2] % 2 == 1
    grad = output.steps[1].logits.grad
    assert outside.any()
    assert grad[outside].abs().max() == 0
    assert grad[~outside].abs().sum(-1).min() > 0


def test_a_later_step_weighs_decay_and_the_rows_it_reaches(target, batch):
    output = random_output(batch, len(VOCAB))
    scored = head_loss(output, batch, target.head, VOCAB, LossSpec(decay=0.5))
    expected = scored.step_loss[0] + 0.5 * scored.step_loss[1] + 0.25 * scored.step_loss[2]
    torch.testing.assert_close(scored.loss_sum.detach(), expected)
    alone = head_loss(HeadOutput(output.steps[2:]), batch, target.head, VOCAB, LossSpec(decay=0.5))
    torch.testing.assert_close(alone.loss_sum.detach(), 0.25 * scored.step_loss[2])


def test_depth_weights_replace_the_decay(target, batch):
    output = random_output(batch, len(VOCAB))
    scored = head_loss(output, batch, target.head, VOCAB, LossSpec(depth_weights=[0.0, 2.0, 0.25]))
    torch.testing.assert_close(scored.loss_sum.detach(), 2 * scored.step_loss[1] + 0.25 * scored.step_loss[2])
    scored.loss_sum.backward()
    assert gradients(output)[0].abs().max() == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_everything_runs_in_fp32_also_under_autocast(kind, target, batch):
    """bf16 logits are the draft's own rounding; nothing is lost after that."""
    rough = HeadOutput(tuple(replace(s, inputs=s.logits.bfloat16()) for s in random_output(batch, len(VOCAB)).steps))
    wide = HeadOutput(tuple(replace(s, inputs=s.logits.float()) for s in rough.steps))
    spec = LossSpec(kind=kind)
    with torch.autocast("cpu", torch.bfloat16):
        inside = head_loss(rough, batch, target.head, VOCAB, spec)
    assert inside.loss_sum.dtype == torch.float32
    torch.testing.assert_close(inside.loss_sum, head_loss(wide, batch, target.head, VOCAB, spec).loss_sum)


@pytest.mark.parametrize("normalize", ["rows", "sequence", "positions"])
def test_the_divisor_makes_batches_additive(normalize, target):
    """Two micro-batches, each divided by the divisor of both, give the mean that the name says."""
    spec = LossSpec(normalize=normalize, decay=1.0)
    rows = documents_of(target)
    batches = [pack(target, rows[:1], (1,)), pack(target, rows[1:], (1,))]

    def score(batch: TrainBatch) -> LossOutput:
        return head_loss(random_output(batch, len(VOCAB), 1), batch, target.head, VOCAB, spec)

    total = sum(score(b).loss_sum for b in batches) / sum(loss_divisor(b, spec) for b in batches)
    per_document = []
    for b in batches:
        output = random_output(b, len(VOCAB), 1)
        plain = head_loss(output, b, target.head, VOCAB, LossSpec(decay=1.0))
        plain.loss_sum.backward()
        step, L = output.steps[0], b.ids.shape[1]
        keys = (step.rows // L) * 10 + b.document.flatten()[step.rows]
        for key in keys.unique():
            inside = keys == key
            one = HeadOutput((StepOutput(0, step.rows[inside], step.logits[inside]),))
            value = head_loss(one, b, target.head, VOCAB, LossSpec(decay=1.0)).loss_sum
            per_document.append((value, int(inside.sum())))
    summed = sum(value for value, _ in per_document)
    expected = {
        "rows": summed / sum(n for _, n in per_document),
        "sequence": sum(value / n for value, n in per_document) / len(per_document),
        "positions": summed / sum(b.ids.numel() for b in batches),
    }[normalize]
    torch.testing.assert_close(total, expected)


def test_the_losses_of_steps_are_those_of_rows_however_these_weigh(target, batch):
    """They are shown as means per row, and compared between trainings."""
    output = random_output(batch, len(VOCAB))
    shown = [
        head_loss(output, batch, target.head, VOCAB, LossSpec(normalize=name)).step_loss
        for name in ("rows", "sequence")
    ]
    torch.testing.assert_close(shown[1], shown[0])


def test_the_teacher_is_the_distribution_on_the_draft_vocabulary(target, batch):
    whole = make_teacher(batch, torch.arange(4, 30), target.head, VOCAB)
    assert (whole.mass < 1).all()
    torch.testing.assert_close(whole.p.sum(-1), whole.mass)
    p = whole.p / whole.mass[:, None]
    torch.testing.assert_close(whole.negentropy, (p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_draft_vocabulary_without_mass_stays_finite(target, batch):
    batch = replace(batch, logsumexp=batch.logsumexp + 1e4)
    for kind in LOSSES:
        output = random_output(batch, len(VOCAB))
        loss = head_loss(output, batch, target.head, VOCAB, LossSpec(kind=kind)).loss_sum
        loss.backward()
        assert loss.isfinite(), kind
        assert all(g.isfinite().all() for g in gradients(output)), kind


def test_a_loss_that_weighs_nothing_is_refused(target):
    head = build(MedusaOptions(num_heads=2), target, None)
    with pytest.raises(UserError, match=r"no other loss has a weight, so nothing would be learned"):
        LossSpec(weight=0.0).check_head(head)
    for spec in (LossSpec(), LossSpec(weight=0.0, also={"tv": 0.5}), LossSpec(weight=0.0, top_k_weight=1.0)):
        spec.check_head(head)


@pytest.mark.parametrize("vocab", [[0], [3, 4, 9], [0, 2, 11]])
def test_every_id_is_found_in_the_draft_vocabulary(vocab):
    expected = [vocab.index(token) if token in vocab else -1 for token in range(12)]
    assert TargetHead(torch.zeros(12, 2)).places(torch.tensor(vocab)).tolist() == expected


class Saved:
    """What autograd keeps in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_no_distribution_is_kept_for_the_backward_pass(kind: str, method: str, target: Target) -> None:
    options, W = methods()[method].options_class(**SMALL_HEADS.get(method, {})), 90
    vocab = torch.arange(W) if hasattr(options, "draft_vocab_size") else None
    with torch.random.fork_rng(devices=[]):
        head = methods()[method].build(options, target, vocab).train()
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    kept: list[weakref.ref[Saved]] = []

    def keep(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
        scored = head_loss(head(batch, head.trains.steps), batch, target.head, vocab, LossSpec(kind=kind))
    there = [saved.tensor for each in kept if (saved := each()) is not None]
    assert len(there) > 3
    assert not [tensor.shape for tensor in there if tensor.ndim > 1 and tensor.shape[-1] in (W, target.vocab_size)]
    scored.loss_sum.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
