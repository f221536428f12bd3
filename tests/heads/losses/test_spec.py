"""Losses side by side, a head's confidence, the divisor of weighed steps, and samples of rows."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.simulate.acceptance import acceptance, find_answers, simulate
from draftsmith.heads.base import HeadOutput, StepOutput, Trains, iterate_supervised_rows, supervised_rows
from draftsmith.heads.losses import head_loss as head_loss_module
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build
from tests.heads.losses.oracles import random_output


def test_losses_side_by_side_are_their_weighed_sum(target, batch):
    """DSpark's: sum |q - p| is twice tv."""
    output = random_output(batch)
    both = LossSpec(kind="tv", weight=1.8, also={"hard_ce": 0.1}, decay=0.7)

    def loss(spec: LossSpec) -> Tensor:
        return head_loss(output, batch, target.head, None, spec).loss_sum

    torch.testing.assert_close(loss(replace(both, also={"hard_ce": 0.0})), 1.8 * loss(LossSpec(kind="tv", decay=0.7)))
    p, q = target.head.logits(batch.last).softmax(-1).flatten(0, 1), [s.logits.softmax(-1) for s in output.steps]
    plain = sum(
        0.7**k
        * (
            0.9 * (q[k] - p[s.rows + 1 + k]).abs().sum()
            - 0.1 * q[k].log()[range(len(q[k])), batch.ids.flatten()[s.rows + 2 + k]].sum()
        )
        for k, s in enumerate(output.steps)
    )
    torch.testing.assert_close(loss(both), plain)


HARD, FEATURES = LossSpec(kind="hard_ce", decay=0.7), LossSpec(kind="hard_ce", decay=0.7, feature_weight=0.4)


def with_features(output: HeadOutput, batch: TrainBatch) -> HeadOutput:
    generator = torch.Generator().manual_seed(7)
    width = batch.last.shape[-1]
    states = [2 * torch.randn(len(s.rows), width, generator=generator) for s in output.steps]
    return HeadOutput(tuple(replace(s, feature=x) for s, x in zip(output.steps, states, strict=True)))


@pytest.mark.parametrize("vocab", [None, torch.arange(0, 160, 2)], ids=["whole", "draft vocabulary"])
def test_features_and_the_most_likely_tokens_add_their_own_losses(vocab, target, batch):
    """EAGLE-1's and HASS's, row by row; a row that the draft vocabulary drops counts in none."""
    output = with_features(random_output(batch), batch)
    columns = torch.arange(160) if vocab is None else vocab
    output = HeadOutput(tuple(replace(s, inputs=s.logits[:, columns]) for s in output.steps))
    p_RV, last = target.head.logits(batch.last).softmax(-1).flatten(0, 1), batch.last.flatten(0, 1)
    features, likely = 0.0, 0.0
    for k, step in enumerate(output.steps):
        for row, logits, state in zip(step.rows.tolist(), step.logits, step.feature, strict=True):
            p_V = p_RV[row + 1 + k]
            if int(p_V.argmax()) not in columns:
                continue
            apart = (state - last[row + 1 + k]).abs()
            features += 0.7**k * float(torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean())
            p_W, log_q_W = p_V[columns], logits.log_softmax(-1)
            best = p_W.argsort(descending=True)[:4]
            likely -= 0.7**k * float((p_W[best] * log_q_W[best]).sum())

    def loss(spec: LossSpec) -> float:
        return float(head_loss(output, batch, target.head, vocab, spec).loss_sum)

    hard = loss(replace(HARD, weight=1.0, feature_weight=0.0))
    assert loss(replace(FEATURES, weight=1.0)) - hard == pytest.approx(0.4 * features, rel=1e-4)
    assert loss(HARD) == pytest.approx(0.1 * hard + features, rel=1e-4), "a tenth beside features"
    both = replace(HARD, weight=1.0, feature_weight=0.0, top_k_weight=0.3, top_k=4)
    assert loss(both) - hard == pytest.approx(0.3 * likely, rel=1e-4)


@pytest.mark.parametrize("normalize", ["rows", "sequence"])
@pytest.mark.parametrize("kind", ["kl", "hard_ce"])
def test_a_tuned_target_has_a_loss_of_its_own(kind, normalize, target, batch):
    """Medusa-2's: the original's distribution, or the text, at the positions of step 0's tokens and the one before."""
    generator = torch.Generator().manual_seed(8)
    output = random_output(batch)
    rows = (supervised_rows(batch, 0).flatten().nonzero().flatten() + 1)[::2]
    logits = 2 * torch.randn(len(rows), 160, generator=generator)
    tuned = StepOutput(-1, rows, logits)
    spec = LossSpec(kind="hard_ce", tuned_kind=kind, weight=1.0, normalize=normalize)
    p_RV = target.head.logits(batch.last).softmax(-1).flatten(0, 1)
    L = batch.ids.shape[1]
    keys = [row // L * 10 + int(batch.document.flatten()[row]) for row in range(batch.ids.numel())]
    counted = [keys[row] for row in output.steps[0].rows.tolist()]
    loss = apart = same = 0.0
    for row, one in zip(rows.tolist(), logits, strict=True):
        p, log_q = p_RV[row], one.log_softmax(-1)
        divergence = float((p * (p.log() - log_q)).sum())
        weight = 1.0 if normalize == "rows" else 1 / max(1, counted.count(keys[row]))
        text = -float(log_q[int(batch.ids.flatten()[row + 1])])
        loss += weight * (divergence if kind == "kl" else text)
        apart += divergence
        same += int(p.argmax()) == int(one.argmax())
    draft = float(head_loss(output, batch, target.head, None, spec).loss_sum)

    def scored(spec: LossSpec, progress: float = 1.0) -> Any:
        return head_loss(HeadOutput(output.steps, tuned), batch, target.head, None, spec, progress)

    found = scored(spec)
    assert found.tuned.tolist() == pytest.approx([loss, apart, same, len(rows)], rel=1e-4)
    assert float(found.loss_sum) == pytest.approx(draft + loss, rel=1e-4)
    assert float(scored(replace(spec, tuned_weight=0.3)).loss_sum) == pytest.approx(draft + 0.3 * loss, rel=1e-4)
    assert float(scored(replace(spec, weight=None)).loss_sum) == pytest.approx(0.2 * draft + loss, rel=1e-4)
    assert float(scored(replace(spec, ramp=1.0), 1 / 3).loss_sum) == pytest.approx(0.5 * draft + loss, rel=1e-4)


@pytest.mark.parametrize("normalize", ["rows", "sequence"])
def test_rows_go_piece_by_piece(normalize, target, batch, monkeypatch):
    given = [with_features(random_output(batch, confident=True), batch) for _ in range(3)]
    spec = LossSpec(normalize=normalize, also={"tv": 0.5}, top_k_weight=0.5, decay=0.5)
    expected = head_loss(given[0], batch, target.head, None, spec)
    assert sum(len(step.rows) for step in given[0].steps) > 70
    monkeypatch.setitem(head_loss_module.PIECE, "cpu", 9 * target.head.vocab_size)
    sizes = []

    def project(logits: Tensor) -> Tensor:
        sizes.append(len(logits))
        return logits * 1.0

    output = HeadOutput(tuple(replace(step, project=project) for step in given[1].steps))
    found = head_loss(output, batch, target.head, None, spec)
    assert max(sizes) == 9
    with torch.no_grad():
        measured = head_loss(given[2], batch, target.head, None, spec)
    for name in ("loss_sum", "step_loss", "step_acceptance", "step_correct", "step_rows", "rows"):
        for one in (found, measured):
            torch.testing.assert_close(getattr(one, name), getattr(expected, name), check_dtype=True, msg=name)
    expected.loss_sum.backward()
    found.loss_sum.backward()
    for one, other in zip(given[0].steps, given[1].steps, strict=True):
        for name in ("inputs", "feature", "confidence"):
            torch.testing.assert_close(getattr(one, name).grad, getattr(other, name).grad, msg=name)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 4e-3)])
def test_weights_learn_from_every_piece(dtype, close, target, batch, monkeypatch):
    """Under autocast too; in fp16 at the scale of a loss scaler, where gradients would not fit otherwise."""
    scale = 65536.0 / 100 if dtype == torch.float16 else 1.0
    found = []
    for size in (1 << 22, 9 * target.head.vocab_size):
        torch.manual_seed(0)
        weights = torch.nn.Linear(160, 160)
        steps = random_output(batch).steps
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            steps = tuple(StepOutput(step.offset, step.rows, step.inputs, weights) for step in steps)
        loss = head_loss(HeadOutput(steps), batch, target.head, None, LossSpec(), piece_size=size, scale=scale)
        (loss.loss_sum * scale).backward()
        found.append([weights.weight.grad, weights.bias.grad, *(step.inputs.grad for step in steps)])
    for whole, pieces in zip(*found, strict=True):
        assert whole.any()
        assert (whole - pieces).abs().max() <= close * whole.abs().max()


def test_confidence_learns_the_acceptance_rate_and_leaves_the_distribution_alone(target, batch):
    output = random_output(batch, confident=True)
    weights = [LossSpec(decay=0.7, confidence_weight=w) for w in (None, 1.0, 0.25, 0.0)]
    found = [head_loss(output, batch, target.head, None, spec).loss_sum for spec in weights]
    p = target.head.logits(batch.last).softmax(-1).flatten(0, 1)
    expected = 0.0
    for k, step in enumerate(output.steps):
        assert step.confidence is not None
        for row, logits, odds in zip(step.rows.tolist(), step.logits, step.confidence.tolist(), strict=True):
            rate = 1 - 0.5 * float((p[row + 1 + k] - logits.detach().softmax(-1)).abs().sum())
            chance = 1 / (1 + math.exp(-odds))
            expected -= 0.7**k * (rate * math.log(chance) + (1 - rate) * math.log(1 - chance))
    assert float(found[0] - found[3]) == pytest.approx(expected, rel=1e-4)
    assert float(found[2] - found[3]) == pytest.approx(expected / 4, rel=1e-3)
    assert torch.equal(found[0], found[1])
    (found[0] - found[3]).backward()
    assert all(step.logits.grad is not None and step.logits.grad.abs().max() < 1e-6 for step in output.steps)
    # At weight 0 there is a gradient too, of nothing: processes that train together wait for all of them.
    for step in output.steps:
        step.confidence.grad = None
    head_loss(output, batch, target.head, None, weights[3]).loss_sum.backward()
    assert all(step.confidence.grad is not None and not bool(step.confidence.grad.any()) for step in output.steps)


def test_confidence_learns_from_rows_that_the_draft_vocabulary_drops(target, batch):
    """Their drafts fail, which is what a confidence is to know; their distributions learn nothing."""
    whole, vocab = random_output(batch, steps=1, confident=True), torch.arange(0, 160, 2)
    output = HeadOutput(tuple(replace(s, inputs=s.logits.detach()[:, vocab].requires_grad_()) for s in whole.steps))
    (step,) = output.steps
    dropped = batch.top1.flatten()[step.rows + 1] % 2 == 1
    assert dropped.any()
    assert not dropped.all()
    head_loss(output, batch, target.head, vocab, LossSpec()).loss_sum.backward()
    assert step.confidence is not None
    assert step.confidence.grad is not None
    assert step.logits.grad is not None
    assert (step.confidence.grad != 0).all()
    assert torch.equal(step.logits.grad.abs().sum(1) == 0, dropped)


def test_the_divisor_of_weighed_steps_is_the_sum_of_their_weights(target, batch):
    head = build(MedusaOptions(num_heads=3), target, None)
    spec = LossSpec(normalize="weights", depth_weights=[1.0, 0.5, 0.125])
    rows = [int(supervised_rows(batch, k).sum()) for k in range(3)]
    assert rows[0] > rows[1] > rows[2] > 0
    assert float(loss_divisor(batch, spec, head)) == pytest.approx(rows[0] + rows[1] / 2 + rows[2] / 8)
    with torch.no_grad():
        constant = [torch.zeros_like(step.logits) for step in head(batch, 3).steps]
    flat = HeadOutput(
        tuple(StepOutput(s.offset, s.rows, x) for s, x in zip(head(batch, 3).steps, constant, strict=True))
    )
    scored = head_loss(flat, batch, target.head, None, replace(spec, kind="hard_ce"))
    # The mean of a loss that is the same everywhere is that loss.
    assert float(scored.loss_sum / loss_divisor(batch, spec, head)) == pytest.approx(math.log(160), rel=1e-5)


class Sampler:
    """What loss_divisor asks of a head: one that learns from every other row of step 0."""

    trains = Trains(2)

    def supervised(self, batch: TrainBatch) -> Iterator[Tensor]:
        some = torch.arange(batch.ids.numel()).view_as(batch.ids) % 2 == 0
        for mask_BL in iterate_supervised_rows(batch):
            yield mask_BL & some


@pytest.mark.parametrize("normalize", ["rows", "weights", "sequence", "positions"])
def test_a_sample_of_rows_is_divided_by_what_was_drawn(normalize, target, batch):
    spec, head = LossSpec(normalize=normalize, kind="hard_ce", decay=1.0), cast(Any, Sampler())
    masks = head.supervised(batch)
    steps = [
        StepOutput(k, rows, torch.zeros(len(rows), 160))
        for k in range(2)
        for rows in [next(masks).flatten().nonzero()[:, 0]]
    ]
    scored = head_loss(HeadOutput(tuple(steps)), batch, target.head, None, spec)
    rows = [len(step.rows) for step in steps]
    keys = steps[0].rows // batch.ids.shape[1] * 10 + batch.document.flatten()[steps[0].rows]
    second = steps[1].rows // batch.ids.shape[1] * 10 + batch.document.flatten()[steps[1].rows]
    expected = {
        "rows": (rows[0] + rows[1]) / rows[0],
        "weights": 1.0,
        "sequence": 1.0
        + sum(int((second == k).sum()) / int((keys == k).sum()) for k in keys.unique()) / len(keys.unique()),
        "positions": (rows[0] + rows[1]) / batch.ids.numel(),
    }[normalize]
    assert int(scored.rows) == rows[0]
    assert float(scored.loss_sum / loss_divisor(batch, spec, head)) == pytest.approx(expected * math.log(160), rel=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["T0", "T1"])
def test_a_draft_that_stops_proposes_no_further(sampling, target, batch):
    """Stopped before its k-th token everywhere, a draft of 3 is one of k."""
    mask, output = torch.zeros_like(batch.mask), random_output(batch)
    mask[1, 2:8] = True
    if sampling.greedy:  # the text of the target's own choice
        ids = batch.ids.clone()
        for t in range(2, 8):
            ids[1, t] = batch.top1[1, t - 1]
        batch = replace(batch, ids=ids)
    batch = replace(batch, mask=mask)
    answers = find_answers(batch)
    output = random_output(batch)

    def tallies(stop: int | None, k: int) -> Any:
        rule = None if stop is None else LengthRule(tuple(2.0 if offset >= stop else 0.0 for offset in range(3)))
        found = acceptance(output, batch, target.head, None, sampling, rule=rule)
        return simulate(found.c_BLK, answers, k)

    assert len(answers) == 1
    for stop in (0, 1, 2):
        (stopped,) = tallies(stop, 3)
        if not stop:
            assert (stopped.rounds, stopped.drafted) == (stopped.tokens, 0)
            continue
        (short,) = tallies(None, stop)
        assert stopped.drafted == pytest.approx(short.drafted)
        assert stopped.rounds == pytest.approx(short.rounds)
        assert stopped.accepted_K.tolist()[:stop] == pytest.approx(short.accepted_K.tolist())
        assert not stopped.reached_K[stop:].any()
    (whole,) = tallies(None, 3)
    assert tallies(3, 3)[0].rounds == pytest.approx(whole.rounds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"also": {"tv": -1.0}}, r"loss\.also\.tv is -1\.0: it must be from 0 to 1000000"),
        ({"also": {"cross": 1.0}}, r"loss\.also names 'cross': choose among kl, "),
        ({"confidence_weight": -0.5}, r"loss\.confidence_weight is -0\.5: it must be from 0 to 1000000"),
        ({"kind": "mse"}, r"loss\.kind is 'mse': choose one of kl, "),
        ({"ramp": 1.5}, r"loss.ramp is 1.5"),
        *(({"depth_weights": bad}, r"loss\.depth_weights") for bad in ([], [1.0, -0.5], [0.0, 0.0], [1.0, math.nan], [math.inf])),
        ({"beta": 0.1}, "train.loss.beta is 0.1, but it belongs to jsd, and train.loss.kind is kl: leave it out"),
        ({"kind": "tv", "lk_decay": 2.0}, "train.loss.lk_decay is 2.0, but it belongs to lk_hybrid, and train.loss.kind is tv"),
        ({"top_k": 5}, "train.loss.top_k is 5, but train.loss.top_k_weight is 0"),
        ({"decay": 0.5, "depth_weights": [1.0]}, "loss.decay is 0.5, but train.loss.depth_weights name the weight of every step"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        LossSpec(**options)


def test_weights_are_those_of_all_steps_and_numbers_of_a_loss_beside_the_first_are_taken():
    with pytest.raises(UserError, match="has 2 numbers, but the head is trained on 3 steps"):
        LossSpec(depth_weights=[1.0, 0.5]).check_steps(3)
    LossSpec(depth_weights=[1.0, 0.5]).check_steps(2)
    LossSpec().check_steps(7)
    assert LossSpec(also={"jsd": 0.5}, beta=0.1, top_k_weight=1.0, top_k=5).beta == 0.1


def test_a_decay_over_a_single_step_is_refused():
    head = cast(Any, SimpleNamespace(trains=Trains(1), method="draft_model"))
    for harmless in (LossSpec(), LossSpec(decay=1.0)):
        harmless.check_head(head)
    with pytest.raises(
        UserError, match=r"train\.loss\.decay is 0\.5, but draft_model heads of this recipe learn a single step"
    ):
        LossSpec(decay=0.5).check_head(head)
    head.trains = Trains(2)
    LossSpec(decay=0.5).check_head(head)


def test_a_weight_on_a_confidence_that_is_not_there_is_refused():
    head = cast(Any, SimpleNamespace(trains=Trains(2), method="medusa"))
    LossSpec(confidence_weight=0.0).check_head(head)
    with pytest.raises(
        UserError, match=r"loss\.confidence_weight is 1\.0, but medusa heads of this recipe say no confidence"
    ) as caught:
        LossSpec(confidence_weight=1.0).check_head(head)
    assert "\n" not in str(caught.value)
    head.trains = Trains(2, frozenset({"confidence"}))
    LossSpec(confidence_weight=1.0).check_head(head)
    with pytest.raises(UserError, match=r"confidence_weight is 0, which leaves .*: set head\.confidence_head to false"):
        LossSpec(confidence_weight=0.0).check_head(head)
