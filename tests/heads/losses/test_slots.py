"""D-PACE: its weights by their definition, in a loss, in pieces, and as what divides a step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, StepOutput
from draftsmith.heads.losses.head_loss import dpace, head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build
from draftsmith.train.steps import divide_again, step_sums
from tests.heads.losses.oracles import random_output

KINDS = ("dpace", "dpace_confidence", "dpace_continuation")


def by_definition(chances: list[float | None], alpha: float, kind: str) -> list[float]:
    """The weights of one block's slots, None for those that are not trained."""
    smooth = [1.0 if q is None else (1 - alpha) * q + alpha for q in chances]
    reached = [float(torch.tensor(smooth[: j + 1], dtype=torch.float64).prod()) for j in range(len(smooth))]
    weights = []
    for j, q in enumerate(chances):
        further = sum(reached[m] for m in range(j, len(smooth)) if chances[m] is not None)
        whole = {"dpace": further, "dpace_confidence": reached[j], "dpace_continuation": further / reached[j]}[kind]
        weights.append(0.0 if q is None else whole)
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_definition(kind: str) -> None:
    blocks = [[0.9, 0.5, 0.01, 1.0], [0.2, None, 0.7, None], [None, 0.3, 0.4, 0.8]]
    rows = [(q, b, k) for k in range(4) for b, block in enumerate(blocks) if (q := block[k]) is not None]
    chance, block, slot = (torch.tensor(values) for values in zip(*rows, strict=True))
    spec = LossSpec(kind="hard_ce", slot_weights=kind, dpace_alpha=0.3)
    found = dpace(chance, block, slot, 5, 4, spec)
    expected = [by_definition(chances, 0.3, kind) for chances in blocks]
    assert found.tolist() == pytest.approx([expected[b][k] for _, b, k in rows], rel=1e-6)


def test_weights_are_the_gradient_of_the_accepted_length() -> None:
    chance = torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    log_smooth = (0.5 * chance + 0.5).log().requires_grad_()
    log_smooth.cumsum(1).exp().sum().backward()
    block, slot = (torch.arange(18) // 6, torch.arange(18) % 6)
    found = dpace(chance.flatten(), block, slot, 3, 6, LossSpec(kind="hard_ce", slot_weights="dpace"))
    torch.testing.assert_close(found, log_smooth.grad.flatten())


def blocks_of(output: HeadOutput) -> HeadOutput:
    """One projection for all steps, as block drafters have."""
    return HeadOutput(tuple(StepOutput(step.offset, step.rows, step.inputs) for step in output.steps))


@pytest.mark.parametrize("vocab", [None, torch.arange(0, 160, 2)], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize(("kind", "label"), [("hard_ce", "text"), ("argmax_ce", "target")])
def test_a_loss_weighs_the_slots_of_each_block(vocab: Tensor | None, kind: str, label: str, target, batch) -> None:
    width = target.vocab_size if vocab is None else len(vocab)
    output = blocks_of(random_output(batch, width))
    spec = LossSpec(kind=kind, slot_weights="dpace", normalize="weights")
    ids = torch.arange(target.vocab_size) if vocab is None else vocab
    total, weights = 0.0, 0.0
    for row in output.steps[0].rows.tolist():
        losses: list[float] = []
        chances: list[float | None] = []
        for step in output.steps:
            if row not in step.rows.tolist():
                continue
            logits = step.logits[step.rows.tolist().index(row)].detach()
            best, text = (
                int(batch.top1.flatten()[row + 1 + step.offset]),
                int(batch.ids.flatten()[row + 2 + step.offset]),
            )
            token = text if label == "text" else best
            learned = best in ids.tolist() and token in ids.tolist()
            losses.append(-float(logits.log_softmax(-1)[ids.tolist().index(token)]) if learned else 0.0)
            chances.append(float(torch.tensor(-losses[-1]).exp()) if learned else 0.0)
        for loss, chance, weight in zip(losses, chances, by_definition(chances, 0.5, "dpace"), strict=True):
            total += weight * loss
            weights += weight * bool(chance)
    for size in (None, 5 * width):
        scored = head_loss(output, batch, target.head, vocab, spec, piece_size=size)
        assert scored.loss_sum.item() == pytest.approx(total, rel=1e-5)
        assert float(scored.weights) == pytest.approx(weights, rel=1e-5)
        assert not scored.weights.requires_grad
    rows = replace(spec, normalize="rows")
    assert head_loss(output, batch, target.head, vocab, rows).weights is None


def test_a_confidence_learns_of_drafts_that_fail_as_well(target, batch) -> None:
    vocab = torch.arange(0, 160, 2)
    steps = blocks_of(random_output(batch, len(vocab))).steps
    odds = [torch.zeros(len(step.rows), requires_grad=True) for step in steps]
    output = HeadOutput(tuple(replace(step, confidence=own) for step, own in zip(steps, odds, strict=True)))
    spec = LossSpec(kind="argmax_ce", slot_weights="dpace", normalize="weights", confidence_weight=1.0)
    head_loss(output, batch, target.head, vocab, spec).loss_sum.backward()
    assert all(own.grad is not None and own.grad.all() for own in odds)


def test_a_step_is_divided_by_the_weights_of_all_its_micro_batches(target, batch) -> None:
    """Whatever the gradients were divided by before: that is known before any pass."""
    spec = LossSpec(kind="hard_ce", slot_weights="dpace", normalize="weights")
    torch.manual_seed(0)
    head = torch.nn.Linear(160, 160)
    outputs = [
        HeadOutput(
            tuple(replace(step, inputs=step.inputs.detach(), project=head) for step in random_output(batch).steps[:k])
        )
        for k in (1, 3)
    ]
    scored = [head_loss(output, batch, target.head, None, spec) for output in outputs]
    sums = sum(step_sums(one)[:6] for one in scored)
    for one in scored:
        (one.loss_sum / 10).backward()
    given = [p.grad.clone() for p in head.parameters()]
    weights = divide_again(head, sums, torch.tensor(10.0))
    assert float(weights) == pytest.approx(sum(float(one.weights) for one in scored))
    for gradient, before in zip([p.grad for p in head.parameters()], given, strict=True):
        torch.testing.assert_close(gradient, before * 10 / weights)
    # Where no label of a step can be drafted, nothing has a weight.
    for p in head.parameters():
        p.grad.zero_()
    divide_again(head, torch.zeros(6), torch.tensor(10.0))
    assert not any(p.grad.any() for p in head.parameters())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"kind": "kl"},
            "slots by the probability of one token, but train.loss.kind is kl, .*: choose hard_ce or argmax",
        ),
        ({"decay": 0.7}, "train.loss.decay is 0.7, but train.loss.slot_weights is dpace, which replaces it"),
        ({"depth_weights": [1.0]}, "depth_weights is .1.0., but train.loss.slot_weights is dpace, which replaces it"),
        ({"dpace_alpha": 0.0}, "train.loss.dpace_alpha is 0.0"),
        ({"slot_weights": "decay", "dpace_alpha": 0.3}, "dpace_alpha is 0.3, but train.loss.slot_weights is decay"),
    ],
)
def test_what_does_not_fit_is_one_sentence(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        LossSpec(**{"kind": "hard_ce", "slot_weights": "dpace", **fields})
    assert "\n" not in str(caught.value)


def test_heads_without_blocks_are_refused(target) -> None:
    spec = LossSpec(kind="hard_ce", slot_weights="dpace")
    with pytest.raises(UserError, match="slot_weights is dpace, but medusa heads of this recipe learn no block"):
        spec.check_head(build(MedusaOptions(num_heads=3), target, None))
