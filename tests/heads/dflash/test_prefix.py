"""DFlash with a variable prefix: both passes over single blocks, what is drawn and how it is weighed, drafts of every length, and what is
refused."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.parity.bundle import make_bundle
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.dflash.head import DFlashDrafter, DFlashOptions
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from tests.heads.blocks import LOSSES, make_head, make_target, packed, requests, slow_states, trained


@torch.no_grad()
def test_a_second_pass_reads_what_the_first_drafts() -> None:
    """In evaluation the text's tokens, of its own document."""
    target = make_target()
    head, batch = make_head("dflash", target, variable_prefix=2), packed(target)
    changed = 0
    for k, step in enumerate(head(batch, 4).steps):
        for row, logits_W in list(zip(step.rows.tolist(), step.logits, strict=True))[::5]:
            plain, behind = (slow_states(head, batch, row, n)[1 + k] @ target.head.weight.double().T for n in (1, 3))
            torch.testing.assert_close(logits_W.double(), plain if k < 2 else behind, atol=2e-4, rtol=2e-4)
            changed += bool((plain - behind).abs().max() > 0.05)
    assert changed > 5


def test_training_weighs_anew_what_is_behind_a_drawn_prefix() -> None:
    """Slots up to its end do not learn from it, the first behind it weighs 1; the plain block learns as ever."""
    target = make_target()
    head, batch = make_head("dflash", target, variable_prefix=2, num_layers=1).train(), packed(target)
    spec = LOSSES["dflash"]
    ids, expected, drawn = batch.ids.flatten(), 0.0, Counter[int]()
    output = head(batch, 4)
    for k, step in enumerate(output.steps):
        for row, restart in zip(step.rows.tolist(), step.sources[-1].tolist(), strict=True):
            known, label = restart + 1, int(ids[row + 2 + k])
            drawn[known] += k == 0
            for n, weight in ((1, spec.decay**k), (known, spec.decay ** (1 + k - known) * (1 + k >= known))):
                if weight and n <= 1 + k:
                    logits = slow_states(head, batch, row, n)[1 + k] @ target.head.weight.double().T
                    expected += float(weight * -logits.log_softmax(-1)[label])
    assert set(drawn) == {2, 3, 4}
    found = head_loss(output, batch, target.head, None, spec)
    assert found.loss_sum.item() == pytest.approx(expected, rel=1e-4)
    pieces = head_loss(output, batch, target.head, None, spec, piece_size=2000)
    torch.testing.assert_close(pieces.loss_sum, found.loss_sum)


@pytest.mark.parametrize("base", [0.9, 0.5, 1.0])
def test_prefixes_are_drawn_by_a_truncated_geometric_distribution(base: float) -> None:
    """Of 2 tokens up to all slots but one, by the document's seed and the position."""
    target = make_target()
    head, batch = make_head("dflash", target, variable_prefix=1, prefix_base=base).train(), packed(target)
    rows, counts = torch.arange(batch.ids.numel()), Counter[int]()
    for n in range(60):
        seeded = replace(batch, seed=batch.seeds + n)
        known = head._known(seeded)(rows)
        assert torch.equal(known, head._known(seeded)(rows))
        counts.update(known.tolist())
    chances = [base**n for n in (2, 3, 4)]
    assert set(counts) == {2, 3, 4}
    for known, chance in zip((2, 3, 4), chances, strict=True):
        assert counts[known] / counts.total() == pytest.approx(chance / sum(chances), abs=0.02)


@pytest.mark.slow
@torch.no_grad()
def test_one_simulation_tells_the_acceptance_of_every_length() -> None:
    """The first tokens of a draft are of the first pass, whatever its length; the others of the second."""
    target, head, _ = trained("dflash", variable_prefix=1)
    decoded = {k: decode_batch(target, DFlashDrafter(head, k), requests(8), Sampling()).generations for k in (1, 2, 3)}
    simulated = head_simulator(head)(target, decoded[3], Sampling(), 3).tallies
    for k, generations in decoded.items():
        assert [g.output_ids for g in generations] == [g.output_ids for g in decoded[3]]
        tau = total([tally_generation(g, k) for g in generations], k).tau
        assert tau is not None
        assert tau > 1 + 0.4 * k
        assert total([tallies[k - 1] for tallies in simulated], k).tau == pytest.approx(tau)


def test_an_engine_is_held_against_one_pass() -> None:
    """Engines do not know the second one: what they must draft is what the same weights draft without a prefix."""
    target = make_target()
    prefixed, plain = make_head("dflash", target, variable_prefix=1), make_head("dflash", target)
    plain.load_state_dict(prefixed.state_dict())
    both = [make_bundle(target, head.eval(), requests(4), 3, {}, "dflash") for head in (prefixed, plain)]
    assert both[0] is not None
    assert both[0] == both[1]
    assert prefixed.prefix == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"variable_prefix": 4, "block_size": 5},
            "a block of 5 slots drafts 4 tokens, none of them behind such a prefix",
        ),
        ({"variable_prefix": 0}, "head.variable_prefix is 0: it must be from 1 to"),
        ({"prefix_base": 0.5}, "head.prefix_base is 0.5, but head.variable_prefix is null"),
        ({"variable_prefix": 2, "prefix_base": 0.0}, "head.prefix_base is 0.0"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        DFlashOptions(**options)
    assert "\n" not in str(caught.value)


def test_trees_and_d_pace_are_refused() -> None:
    head = make_head("dflash", make_target(), variable_prefix=2)
    with pytest.raises(UserError, match=r"heads with head\.variable_prefix draft no static trees"):
        head_system("", head, 2, 2, tree=StaticTree.of("bush", [[0], [1], [0, 0]]))
    with pytest.raises(UserError, match=r"train\.loss\.slot_weights is dpace, but .* behind a shown prefix") as caught:
        LossSpec(kind="hard_ce", slot_weights="dpace").check_head(head)
    assert "\n" not in str(caught.value)
    LossSpec(kind="hard_ce", slot_weights="dpace").check_head(make_head("dflash", make_target()))
