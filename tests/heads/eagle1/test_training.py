"""Training EAGLE-1 and HASS: loss and gradients of a slow reference, and the noise."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import drafting
from draftsmith.heads.eagle1.head import Eagle1Head, Eagle1Options
from draftsmith.heads.eagle3 import head as eagle3
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.heads.eagle1.test_head import LAYER, SlowEagle1, documents, make_head
from tests.models import make_target

pytestmark = pytest.mark.full

PAPER = LossSpec(kind="soft_ce", decay=1.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


class SlowTraining(SlowEagle1):
    """The reference with gradients: its weights are copies of the head's."""

    def __init__(self, head: Eagle1Head, target: Target) -> None:
        super().__init__(head.state_dict(), head.config, target, head.embedding_scale)
        self.fc = self.fc.clone().requires_grad_()

    def loss(self, batch: TrainBatch, passes: int, decay: float, top_k: int, *, detach: bool) -> Tensor:
        """The sum over rows and passes of SmoothL1 + 0.1 CE (+ the CE of the top tokens), on the rows of
        docs/algorithms.md, rule 1."""
        total = torch.zeros(())
        for b, start, ids, states in documents(batch):
            mask = batch.mask[b, start : start + len(ids)].tolist()
            for root in range(len(ids) - 2):
                reach = 0
                while reach < passes and root + 2 + reach < len(ids) and all(mask[root + 1 : root + 3 + reach]):
                    reach += 1
                for step, feature in enumerate(self.row(root, ids, states, reach, detach=detach)):
                    state = states[root + 1 + step]
                    gap = (feature - state).abs()
                    smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                    p, log_q = self.project(state).softmax(-1), self.project(feature).log_softmax(-1)
                    best = p.argsort(descending=True)[:top_k]
                    row = smooth - 0.1 * (p * log_q).sum() - (p[best] * log_q[best]).sum()
                    total = total + decay**step * row
        return total

    def gradients(self) -> dict[str, Tensor]:
        found = {LAYER + name: p.grad for name, p in self.layer.named_parameters()}
        return {**found, "fc.weight": self.fc.grad}


@pytest.mark.parametrize(
    ("passes", "detach", "top_k"), [(1, True, 0), (1, True, 10), (3, True, 10), (3, False, 0)], ids=str
)
def test_loss_and_gradients_are_those_of_the_slow_reference(passes, detach, top_k, target):
    head = make_head(target, aligned_passes=passes, detach_passes=detach)
    batch = pack(target, documents_of(target), ())
    spec = replace(PAPER, decay=0.7, top_k=top_k or 10, top_k_weight=float(top_k > 0))
    scored = head_loss(head(batch, head.trains.steps), batch, target.head, None, spec)
    scored.loss_sum.backward()
    slow = SlowTraining(head, target)
    expected = slow.loss(batch, passes, 0.7, top_k, detach=detach)
    expected.backward()
    torch.testing.assert_close(scored.loss_sum, expected, atol=1e-3, rtol=1e-5)
    ours = {name: p.grad for name, p in head.named_parameters() if p.requires_grad}
    assert ours.keys() == slow.gradients().keys()
    for name, gradient in slow.gradients().items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-3)


def test_a_head_without_features_refuses_a_weight_for_them(target):
    head = eagle3.build(eagle3.Eagle3Options(layer_ids=[1]), target, None)
    batch = pack(target, documents_of(target), (1,))
    with pytest.raises(UserError, match=r"loss\.feature_weight is 1\.0, but no output of the head") as caught:
        head_loss(head(batch, 1), batch, target.head, None, LossSpec(feature_weight=1.0))
    assert "\n" not in str(caught.value)
    assert not head.trains.outputs
    head_loss(head(batch, 1), batch, target.head, None, LossSpec(feature_weight=0.0))


def seeded(batch: TrainBatch, seed: int) -> TrainBatch:
    """Give every document a number of its own that `seed` decides."""
    return replace(batch, seed=seed * 100 + batch.ids.shape[0] * batch.document + torch.arange(len(batch.ids))[:, None])


def test_noise_is_on_the_states_in_training_alone(target):
    head, batch = make_head(target, noise=0.5), pack(target, documents_of(target), ())
    quiet = head(batch, 2)

    def noisy(seed: int) -> list[Tensor]:
        return [step.logits for step in head.train()(seeded(batch, seed), 2).steps]

    first, again, other = noisy(1), noisy(1), noisy(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    moved = replace(batch, last=head.perturb(batch.last, seeded(batch, 1)))
    with drafting(head):
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(head(batch, 2).steps, quiet.steps, strict=True))
        # Queries and keys read the same noise, drawn once.
        assert all(torch.equal(a, b.logits) for a, b in zip(first, head(moved, 2).steps, strict=True))
    assert head.training
    assert torch.equal(make_head(target, noise=0.0).train()(batch, 1).steps[0].logits, quiet.steps[0].logits)


def test_noise_is_uniform_and_falls_with_the_length_of_the_text(target):
    batch, zeros = seeded(pack(target, documents_of(target), ()), 1), torch.zeros(3, 30, 64)
    plain = make_head(target).perturb(zeros, batch)
    assert plain.abs().max() <= 0.1
    assert plain.max() > 0.0999
    assert plain.mean().abs() < 0.002
    assert plain.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    scaled = make_head(target, noise_length=60).perturb(zeros, batch)
    for b, start, ids, _ in documents(batch):
        largest = scaled[b, start : start + len(ids)].abs().max().item()
        assert largest == pytest.approx(0.1 * 60 / len(ids), rel=0.03)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise": 0.0, "noise_length": 512}, r"head\.noise_length is 512, but head\.noise is 0"),
        ({"detach_passes": False}, r"head\.detach_passes is false, but head\.aligned_passes is 1"),
    ],
)
def test_options_with_nothing_to_act_on_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Eagle1Options(**options)
