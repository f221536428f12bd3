"""The losses of a row: against their oracles in float64, their gradients by differences, and what must hold between them; the
table of losses: what its entries say is true, and the docs and `--help` show it."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.fields import find_ranges
from draftsmith.heads.losses import divergences
from draftsmith.heads.losses.divergences import LOSSES, Teacher
from draftsmith.heads.losses.head_loss import head_loss, row_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import find_method, methods
from draftsmith.recipe.parse import recipe_parser
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.schedule import build_optimizers
from tests.batches import documents_of, pack
from tests.gpu.support import OPTIONS
from tests.heads.losses.oracles import ORACLES, Row

pytestmark = pytest.mark.full

SPECS = [LossSpec(kind=kind) for kind in LOSSES]
SPECS += [
    LossSpec(temperature=2.0),
    LossSpec(temperature=0.5),
    LossSpec(kind="jsd", beta=0.1),
    LossSpec(kind="jsd", beta=0.8),
    LossSpec("lk_hybrid", lk_scale=0.7, lk_decay=1.5),
]
V, W, R = 9, 6, 4
"""Tokens 0..5 are the draft vocabulary."""


def names(spec: LossSpec) -> str:
    return f"{spec.kind}-{spec.temperature}-{spec.beta}-{spec.lk_scale}"


def draft_probs(dtype: torch.dtype = torch.float64, inside: int = W) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's distribution [R, V], draft logits [R, W] and the text's tokens [R], one outside the draft vocabulary.

    inside: how many tokens the target's distribution gives anything to, where it is not all of them.
    """
    generator = torch.Generator().manual_seed(5)
    p_RV = (1.5 * torch.randn(R, V, generator=generator, dtype=torch.float64)).softmax(-1)
    if inside < W:
        p_RV[:, inside:] = 0
        p_RV /= p_RV.sum(-1, keepdim=True)
    logits_RW = 1.5 * torch.randn(R, W, generator=generator, dtype=torch.float64)
    return p_RV.to(dtype), logits_RW.to(dtype), torch.tensor([2, 8, 0, 5])


def teacher_of(p_RV: Tensor, tokens_R: Tensor) -> Teacher:
    """What `make_teacher` makes of the same distribution."""
    p = p_RV[:, :W]
    mass = p.sum(-1)
    share = p / mass[:, None]
    label_R, best_R = (torch.where(at < W, at, -1) for at in (tokens_R, p_RV.argmax(-1)))
    return Teacher(p, mass, torch.xlogy(share, share).sum(-1), label_R, best_R)


@pytest.mark.parametrize("inside", [W, 3], ids=["everywhere", "zeros"])
@pytest.mark.parametrize("spec", SPECS, ids=names)
def test_values_and_gradients_are_those_of_the_oracle(spec, inside):
    p, logits, tokens = draft_probs(inside=inside)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = row_loss(spec)(ours.log_softmax(-1), teacher_of(p, tokens))
    q = torch.nn.functional.pad(theirs.softmax(-1), (0, V - W))
    expected = [
        ORACLES[spec.kind](Row(spec, *row)) for row in zip(p, q, [torch.arange(W)] * R, tokens.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx([x.item() for x in expected], rel=1e-12, abs=1e-12)
    found.sum().backward()
    torch.stack(expected).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-9)
    narrow = row_loss(spec)(logits.float().log_softmax(-1), teacher_of(p.float(), tokens))
    assert narrow.tolist() == pytest.approx(found.tolist(), rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("count", [1, 3, W, W + 5])
def test_the_most_likely_tokens_are_each_rows_own(count):
    p, logits, tokens = draft_probs()
    log_q = logits.log_softmax(-1)
    found = divergences.top_k_ce(log_q, teacher_of(p, tokens), count)
    for row in range(R):
        best = sorted(range(W), key=lambda token: -float(p[row, token]))[:count]
        assert float(found[row]) == pytest.approx(-sum(float(p[row, t] * log_q[row, t]) for t in best))


@pytest.mark.parametrize("spec", SPECS, ids=names)
@pytest.mark.parametrize(
    "logits", [[300.0] + [-300.0] * 5, [-1e4] * 3 + [1e4] * 3, [0.0] * 6], ids=["sure", "wrong", "even"]
)
def test_distributions_with_zeros_give_finite_losses_and_gradients(spec, logits):
    """In fp32 a distribution of the target's may be 0 exactly, and one of the draft's too small for a number, or both."""
    p = torch.zeros(2, V)
    p[0, 0], p[1, :2] = 1.0, torch.tensor([1.0 - 1e-40, 1e-40])
    x = torch.tensor([logits, logits], requires_grad=True)
    loss = row_loss(spec)(x.log_softmax(-1), teacher_of(p, torch.tensor([0, 1])))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "eagle3") for kind in LOSSES), *(("kl", one) for one in methods() if one != "eagle3")]
)
@pytest.mark.slow
def test_every_loss_and_every_head_train(kind, method, target):
    """A few steps on one batch bring the loss down, and move every trained parameter."""
    torch.manual_seed(0)
    options = OPTIONS.get(method) or find_method(method).options_class()
    head = find_method(method).build(options, target, torch.arange(0, 160, 2) if method == "eagle3" else None)
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    spec, weights = (
        LossSpec(kind=kind, decay=0.5),
        [p for p in head.parameters() if p.requires_grad],
    )
    before, losses = [w.detach().clone() for w in weights], []
    (optimizer,) = build_optimizers(head, TrainSpec(lr=3e-3))
    for _ in range(4):
        scored = head_loss(head(batch, head.trains.steps), batch, target.head, head.draft_vocab, spec)
        losses.append(float(scored.loss_sum.detach() / scored.rows))
        optimizer.zero_grad()
        scored.loss_sum.div(scored.rows).backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(w.isfinite().all() and not torch.equal(w, b) for w, b in zip(weights, before, strict=True))


RANGES = dict(find_ranges(LossSpec, ""))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_the_numbers_of_a_loss_are_fields_of_the_recipe_and_keywords_of_its_function(loss):
    assert tuple(list(inspect.signature(loss.function).parameters)[2:]) == loss.parameters
    for key in loss.parameters:
        with pytest.raises(UserError, match=rf"^train\.loss\.{key} is nan: it must be {RANGES[key]}"):
            LossSpec(kind=loss.name, **{key: math.nan})


def test_help_names_every_loss():
    shown = next(
        one.help for one in recipe_parser("eagle3", "draftsmith train")._actions if one.dest == "train.loss.kind"
    )
    assert all(f"{loss.name}: {loss.summary}" in shown for loss in LOSSES.values())
