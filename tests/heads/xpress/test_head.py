"""XPress: the training pass against one block at a time, drafts of every length, what it learns, and bad options. What speculators computes
is in test_fixtures.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.losses.head_loss import PIECE, head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.xpress.head import XPressDrafter, XPressHead, XPressOptions
from tests.heads.blocks import LAYERS, LOSSES, MASK, make_head, make_target, packed, requests, slow_states, trained

VOCAB = torch.arange(0, 160, 3)
SMALL = {"xpress_rank": 6, "xpress_mlp_hidden": 10}


def slow_corrections(weights: dict[str, Tensor], states_SH: Tensor, before: list[int]) -> Tensor:
    """What is added to the logits of the last of the first slots, of which the tokens before are given: channel by channel."""
    own = {name.removeprefix("xpress_head."): value for name, value in weights.items() if "xpress_head" in name}
    of_block = own["down_g.weight"] @ (sum(states_SH) / len(states_SH))
    inputs = [
        own["in_proj.weight"] @ torch.cat([own["down_h.weight"] @ states_SH[j], of_block, own["w1.weight"][token]])
        for j, token in enumerate(before)
    ]
    j = len(before) - 1
    x = inputs[j].clone()
    for c in range(len(x)):
        for i in range(j + 1):
            x[c] += own["mix.L"][c, j, i] * inputs[i][c]
    gate, up = own["mlp.gate_proj.weight"] @ x, own["mlp.up_proj.weight"] @ x
    x = x + own["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return own["w2.weight"] @ x


@pytest.mark.full
@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["whole vocabulary", "draft vocabulary"])
@torch.no_grad()
def test_training_logits_are_those_of_single_blocks(vocab: Tensor | None) -> None:
    target = make_target()
    head = make_head("xpress", target, vocab, **SMALL)
    weights = {name: value.double() for name, value in head.state_dict().items()}
    batch, ids = packed(target), packed(target).ids.flatten()
    corrected = 0
    for k, step in enumerate(head(batch, head.trains.steps).steps):
        assert torch.equal(step.rows, supervised_rows(batch, k).flatten().nonzero().flatten())
        for i, row in enumerate(step.rows.tolist()[::4]):
            states = slow_states(head, batch, row)
            base = states[1 + k] @ target.head.weight.double().T
            before = [int(ids[row + 1]), *ids[row + 1 : row + 2 + k].tolist()]
            delta = slow_corrections(weights, states, before)
            expected = (base if vocab is None else base[vocab]) + delta
            found = step.projected(*(x[4 * i] for x in step.sources))
            torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
            corrected += bool(delta.abs().max() > 0.02)
    assert corrected > 5


@torch.no_grad()
def test_guesses_are_read_as_the_target_s_tokens() -> None:
    """Also where the head drafts among a part of these; in pieces as at once."""
    target = make_target()
    head = make_head("xpress", target, VOCAB, **SMALL)
    head.xpress_head.w2.weight *= 20
    torch.manual_seed(0)
    states, root = torch.randn(7, 5, 64), torch.arange(7)[:, None]
    refine, base = head.xpress_head, head.logits(states[:, 1:])
    features, expected = refine.features(states), [VOCAB[base.argmax(-1)]]
    for _ in range(2):
        latent = refine(features, torch.cat([root, root, expected[-1][:, :-1]], 1))
        expected.append(VOCAB[(base + refine.w2(latent)).argmax(-1)])
    assert len({tuple(guess.flatten().tolist()) for guess in expected}) == 3
    for piece in (1 << 22, 2 * 4 * len(VOCAB)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PIECE, "cpu", piece)
            found = head.guesses(states[:, 1:], features, root, 3)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_weights_that_guesses_read_learn_under_autocast() -> None:
    """Which keeps copies of weights: those made without gradient would leave them untrained."""
    target = make_target()
    head, batch, gradients = make_head("xpress", target, **SMALL).train(), packed(target), []
    for half in (True, False):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            head_loss(head(batch, 4), batch, target.head, None, LOSSES["xpress"]).loss_sum.backward()
        gradients.append({name: p.grad for name, p in head.named_parameters() if p.requires_grad})
    for name, found in gradients[0].items():
        assert found is not None, name
        assert (found - gradients[1][name]).norm() < 0.1 * gradients[1][name].norm(), name


def test_a_new_head_is_a_dflash_head() -> None:
    target = make_target()
    head = XPressHead.build(XPressOptions([*LAYERS], mask_token_id=MASK, num_layers=1), target, None)
    for step in head(packed(target), 3).steps:
        for logits in step.besides(*step.sources):
            assert torch.equal(step.logits, logits)
    assert head.eval()(packed(target), 3).steps[0].besides is None, "which training alone pays for"


@pytest.mark.slow
@torch.no_grad()
def test_one_pass_tells_the_acceptance_of_every_length() -> None:
    """A draft of any length fills in the whole block: the mean over a shorter one would change every slot."""
    target, head, batch = trained("xpress")
    shorter, longer = (head(batch, k).steps[0].logits for k in (1, 3))
    torch.testing.assert_close(shorter, longer)
    decoded = {k: decode_batch(target, XPressDrafter(head, k), requests(8), Sampling()).generations for k in (1, 2, 3)}
    simulated = head_simulator(head)(target, decoded[3], Sampling(), 3).tallies
    for k, generations in decoded.items():
        tau = total([tally_generation(g, k) for g in generations], k).tau
        assert tau is not None
        assert tau > 1.1
        assert total([tallies[k - 1] for tallies in simulated], k).tau == pytest.approx(tau)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"xpress_rank": 0}, "head.xpress_rank is 0: it must be from 1 to"),
        ({"xpress_mlp_hidden": 0}, "head.xpress_mlp_hidden is 0: it must be from 1 to"),
        ({"free_rounds": 0}, "head.free_rounds is 0: it must be from 1 to 16"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        XPressOptions(**options)
    assert "\n" not in str(caught.value)


def test_the_base_stays_where_its_share_is_not_named() -> None:
    """Without it the layers drift to what serves the correction."""
    spec = LossSpec()
    assert spec.besides(0.9, 3) == (1.0, 0.6, *[pytest.approx(0.1)] * 3)
    assert spec.besides(0.5, 0) == (1.0, 0.0), "Domino's"
    assert LossSpec(base_share=0.5, rounds_weight=0.0).besides(0.25, 2) == (1.0, 0.3, 0.0, 0.0)


def test_rounds_are_refused_where_there_are_none() -> None:
    with pytest.raises(UserError, match=r"train\.loss\.rounds_weight is 0\.5, but domino heads .* read no guesses"):
        LossSpec(rounds_weight=0.5).check_head(make_head("domino", make_target(), gru_hidden_dim=7, emb_dim=6))
    LossSpec(rounds_weight=0.5, base_weight=0.2).check_head(make_head("xpress", make_target(), **SMALL))
