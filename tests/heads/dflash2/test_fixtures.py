"""A training step of DFlash2, with a fixed decay and with D-PACE, and its greedy drafts, held against what speculators 0.9.0 computed on
the same weights and data."""

from math import exp

import pytest
import torch

from draftsmith.heads.base import HeadOutput
from draftsmith.heads.dflash2.head import DFlash2Drafter, DFlash2Head, DFlash2Options
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from tests.heads.speculators import FIXTURES, Reference

OURS = FIXTURES / "speculators_dflash2_dpace"
OTHERS = FIXTURES.parents[2] / "shared" / "fixtures"
CASES = {
    "dpace": (OURS, LossSpec(kind="argmax_ce", slot_weights="dpace", normalize="weights")),
    "fixed decay": (OTHERS / "speculators_dflash2", LossSpec(kind="kl", decay=exp(-1 / 4))),
}
NAMES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_drafts_are_those_of_speculators(case: str) -> None:
    folder, spec = CASES[case]
    if not folder.is_dir():
        pytest.skip(f"the reference run {folder.name} is not here")
    reference = Reference(folder)
    head = reference.head(
        DFlash2Head, DFlash2Options, {name: reference.facts("draft_config")[name] for name in NAMES}, {}
    )
    batch, states, counted = reference.batch, reference.blocks(head), reference.counted
    of_steps = [head.norm(states[own, 1 + k]) for k, own in enumerate(counted)]
    output = HeadOutput(tuple(head.outputs(of_steps, [reference.anchors[own] - 1 for own in counted], batch)))
    loss = head_loss(output, batch, reference.target_head, None, spec).loss_sum / (reference.slots + 1e-5)
    reference.check(loss, head, {})

    state, count = reference.first()
    with torch.no_grad():
        drafted = head.norm(states[:count, 1:])
        plain = drafted @ reference.target_head.weight.T
        draft = DFlash2Drafter(head, reference.size - 1).draft(state, drafted)
    assert draft.tokens_BN[:, 1:].tolist() == reference.expected["greedy_blocks"]
    assert plain.argmax(-1).tolist() == reference.expected["plain_argmax_blocks"]
