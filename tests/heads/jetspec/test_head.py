"""JetSpec: slots that depend on none behind them, drafts of every length from one pass, and the paper's loss."""

import pytest
import torch

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.dflash.head import DFlashDrafter
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from tests.heads.blocks import LOSSES, make_head, make_target, packed, requests, trained

pytestmark = pytest.mark.full


@torch.no_grad()
@pytest.mark.parametrize("method", ["jetspec", "dflash"])
def test_a_slot_does_not_depend_on_how_long_its_block_is(method: str) -> None:
    target = make_target()
    batch = packed(target)
    long, short = (make_head(method, target, block_size=size)(batch, 2).steps for size in (5, 3))
    same = [torch.allclose(a.logits, b.logits, atol=1e-5) for a, b in zip(long, short, strict=True)]
    assert same == [method == "jetspec"] * 2, "which DFlash's slots do, as they see those behind them"


def test_one_pass_tells_the_acceptance_of_every_length() -> None:
    target, head, _ = trained("jetspec")
    assert not head.drafts.own_pass
    assert [head.slots(k) for k in (1, 3)] == [2, 4], "which fills in no further than the draft"
    decoded = {k: decode_batch(target, DFlashDrafter(head, k), requests(8), Sampling()).generations for k in (1, 2, 3)}
    simulated = head_simulator(head)(target, decoded[3], Sampling(), 3).tallies
    for k, generations in decoded.items():
        assert [g.output_ids for g in generations] == [g.output_ids for g in decoded[3]]
        tau = total([tally_generation(g, k) for g in generations], k).tau
        assert tau is not None
        assert tau > 1.1
        assert total([tallies[k - 1] for tallies in simulated], k).tau == pytest.approx(tau)


def test_the_loss_is_the_mean_divergence_of_all_slots_alike() -> None:
    target = make_target()
    head, batch = make_head("jetspec", target, block_size=4), packed(target)
    spec, found = LOSSES["jetspec"], []
    log_p_BLV = target.head.logits(batch.last).log_softmax(-1)
    output = head(batch, 3)
    for step in output.steps:
        log_q_RV = step.logits.log_softmax(-1)
        # Row t's token of step k is x_{t+2+k}, behind position t + 1 + k.
        log_p_RV = log_p_BLV.flatten(0, 1)[step.rows + 1 + step.offset]
        found.append((log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1))
    loss = head_loss(output, batch, target.head, None, spec).loss_sum / loss_divisor(batch, spec, head)
    torch.testing.assert_close(loss, torch.cat(found).mean(), atol=1e-4, rtol=1e-4)
