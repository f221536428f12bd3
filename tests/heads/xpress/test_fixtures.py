"""A training step of XPress, its greedy drafts and the passes that they settle in, held against what speculators 0.9.0 computed on the same
weights and data. It reads the text's token before the root, where engines and we read the root."""

from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.base import HeadOutput
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.xpress import XPressOptions
from draftsmith.heads.xpress import head as xpress
from tests.heads.speculators import FIXTURES, Reference

REFERENCE = Reference(FIXTURES / "speculators_xpress")
SPEC = LossSpec(kind="tv", weight=0.9, also={"argmax_ce": 0.1}, decay=exp(-1 / 4))
NAMES = {
    "token_embed": "w1",
    "readout": "w2",
    "mix_l": "mix.L",
    **{f"mlp_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
RENAMED = {f"refiner_head.{theirs}": f"xpress_head.{ours}" for theirs, ours in NAMES.items()} | {
    "refiner_head.": "xpress_head."
}


def make_head(monkeypatch: pytest.MonkeyPatch, *, tokens_before: bool = True) -> Any:
    """Their head in training. tokens_before: the root's slot reads what they do."""
    anchors, batch = REFERENCE.anchors, REFERENCE.batch
    ids, document = batch.ids[0], batch.document[0]
    before_R = torch.where(document[anchors - 1] == document[anchors], ids[anchors - 1], ids[anchors])

    def behind_token(tokens: Tensor) -> Tensor:
        return torch.cat([before_R[: len(tokens), None], tokens], -1)

    if tokens_before:
        monkeypatch.setattr(xpress, "behind_root", behind_token)
    return REFERENCE.head(xpress.XPressHead, XPressOptions, {"xpress_rank": 16, "xpress_mlp_hidden": 32}, RENAMED)


def scored(head: Any, spec: LossSpec = SPEC) -> tuple[Tensor, Tensor]:
    """Our loss at their anchors and slots, and the states of the blocks."""
    reference, anchors = REFERENCE, REFERENCE.anchors
    blocks = head.norm(reference.blocks(head))
    steps = head.outputs([blocks], [anchors - 1] * (reference.size - 1), reference.batch)
    kept = [
        replace(step, rows=step.rows[own], inputs=tuple(x[own] for x in step.sources))
        for step, own in zip(steps, reference.counted, strict=True)
    ]
    loss = head_loss(HeadOutput(tuple(kept)), reference.batch, reference.target_head, None, spec).loss_sum
    return loss / (reference.slots + 1e-5), blocks


def test_loss_gradients_and_drafts_are_those_of_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(monkeypatch)
    loss, blocks = scored(head)
    REFERENCE.check(loss, head, RENAMED)
    state, count = REFERENCE.first()
    with torch.no_grad():
        draft = xpress.XPressDrafter(head, REFERENCE.size - 1).draft_block(state, blocks[:count], REFERENCE.size - 1)
    assert draft.tokens_BN[:, 1:].tolist() == REFERENCE.expected["greedy_blocks"]


def test_passes_over_a_block_settle_at_the_draft_from_left_to_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """After n passes the first n tokens at least."""
    head = make_head(monkeypatch)
    _, blocks = scored(head)
    state, count = REFERENCE.first()
    blocks, passes = blocks[:count].detach(), REFERENCE.expected["passes"]
    found = head.guesses(blocks[:, 1:], head.xpress_head.features(blocks), state.root_B[:, None], 1 + len(passes))
    assert [guess.tolist() for guess in found[1:]] == passes
    assert not torch.equal(found[0], found[1])
    for number, guess in enumerate(found):
        assert torch.equal(guess[:, :number], found[-1][:, :number])


@pytest.mark.parametrize("part", ["rounds", "base", "all"])
def test_each_term_has_its_weight(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"rounds": {"base_weight": 0.0}, "base": {"rounds_weight": 0.0}, "all": {}}
    metrics = REFERENCE.expected["metrics"]
    terms = {"rounds": 0.3 * metrics["consistency_loss_sum"], "base": 0.6 * metrics["base_anchor_loss_sum"]}
    loss, _ = scored(make_head(monkeypatch), replace(SPEC, **parts[part]))
    besides = sum(term for name, term in terms.items() if part in (name, "all"))
    assert loss.item() == pytest.approx(metrics["tf_loss_sum"] + besides, rel=1e-6)


def test_the_root_in_place_of_the_token_before_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM reads, and we."""
    loss, _ = scored(make_head(monkeypatch, tokens_before=False))
    assert abs(loss.item() / REFERENCE.expected["loss"] - 1) > 1e-5


def test_a_mixer_read_above_its_diagonal_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(monkeypatch)
    assert head.xpress_head.mix.L.detach().triu(1).abs().max() > 0.1
    monkeypatch.setattr(torch.Tensor, "tril", lambda self: self)
    assert abs(scored(head)[0].item() / REFERENCE.expected["loss"] - 1) > 1e-5


def test_a_mean_over_the_slots_that_draft_alone_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(monkeypatch)
    features = head.xpress_head.features
    monkeypatch.setattr(head.xpress_head, "features", lambda x: features(torch.cat([x[:, 1:2], x[:, 1:]], 1)))
    assert abs(scored(head)[0].item() / REFERENCE.expected["loss"] - 1) > 1e-5
