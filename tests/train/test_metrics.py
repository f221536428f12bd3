"""Held-out answers: the loss per slice is that of the slice's answers alone."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import OnlineSource
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate import acceptance as simulate
from draftsmith.heads.base import Trains
from draftsmith.heads.block.base import BlockHead
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import build
from draftsmith.heads.losses import head_loss as losses
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import Target
from draftsmith.train import loop
from draftsmith.train.metrics import HeldOut, evaluate_heldout, make_heldout_batches
from draftsmith.train.parallel import make_accelerator
from tests.heads.blocks import LOSSES, make_head, make_target
from tests.models import tiny_model


def samples() -> list[Tokenized]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(9):
        ids = torch.randint(5, 150, (12 + 3 * i,), generator=generator)
        found.append(Tokenized(ids, torch.arange(len(ids)) >= 4, f"s{i}", ("chat", "code", "math")[i % 3]))
    return found


def test_batches_hold_one_slice_and_losses_add_up() -> None:
    target = Target(tiny_model("llama"), path="tiny", fingerprint="0")
    torch.manual_seed(0)
    head = build(Eagle3Options(layer_ids=[2, 4, 6], ttt_steps=2), target, None)
    source = OnlineSource(target, samples(), (2, 4, 6))
    every = list(range(9))
    batches = make_heldout_batches(source, every, 48, 2)
    assert sorted(i for batch in batches for row in batch for i in row) == every
    for batch in batches:
        assert len({source.slices[i] for row in batch for i in row}) == 1

    def held(index: list[int]):  # type: ignore[no-untyped-def]
        plan = make_heldout_batches(source, index, 48, 2)
        return evaluate_heldout(head, source, plan, 48, target.head, LossSpec(), Sampling(1.0), 3)

    everything = held(every)
    rows = {}
    for name in ("chat", "code", "math"):
        index = [i for i in every if source.slices[i] == name]
        alone = held(index)
        assert everything.loss_by_slice[name] == pytest.approx(alone.loss, rel=1e-5)
        assert everything.tau_by_slice[name] == pytest.approx(alone.tau, rel=1e-5)
        rows[name] = sum(len(samples()[i].ids) - 4 - 1 for i in index)
    mean = sum(everything.loss_by_slice[name] * rows[name] for name in rows) / sum(rows.values())
    assert everything.loss == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters_are_judged_piece_by_piece(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is trained a block begins at every row: their logits are never held together, and the figures are those
    of all at once."""
    target = make_target()
    head = make_head(method, target, torch.arange(0, 160, 3)).train()
    source = OnlineSource(target, samples(), head.reads.layer_ids)
    plan = make_heldout_batches(source, list(range(9)), 48, 2)

    def held() -> HeldOut:
        return evaluate_heldout(head, source, plan, 48, target.head, LOSSES[method], Sampling(1.0), 3)

    rows: list[int] = []
    real = type(head).logits

    def logits(self: BlockHead, states: torch.Tensor) -> torch.Tensor:
        rows.append(states.shape[:-1].numel())
        return real(self, states)

    monkeypatch.setattr(type(head), "logits", logits)
    whole = held()
    most = max(rows)
    rows.clear()
    monkeypatch.setitem(losses.PIECE, "cpu", 5 * len(head.draft_vocab))
    monkeypatch.setattr(simulate, "_CHUNK_ROWS", 7)
    pieces = held()
    assert max(rows) == 7 < most
    for name, value in asdict(whole).items():
        assert getattr(pieces, name) == pytest.approx(value, rel=1e-5), name


def test_a_selector_is_judged_at_the_length_that_is_drafted() -> None:
    """A shorter draft has a pass of its own, as a head of shorter blocks has in training; without its selector a head drafts as one whose
    codebook says nothing of any token; and a single candidate is the likeliest token."""
    target = make_target()

    def held(*, empty: bool = False, size: int = 5, top_k: int = 160) -> HeldOut:
        head = make_head("dflash2", target, block_size=size, conv_group_size=8, selector_rank=6, selector_top_k=top_k)
        if empty:
            torch.nn.init.zeros_(head.candidate_selector.successor_codebook)
        source = OnlineSource(target, samples(), head.reads.layer_ids)
        plan = make_heldout_batches(source, list(range(9)), 48, 2)
        return evaluate_heldout(head.train(), source, plan, 48, target.head, LOSSES["dflash2"], Sampling(1.0), 2)

    whole, shorter, without, alone = held(), held(size=3), held(empty=True), held(top_k=1)
    assert whole.tau == pytest.approx(shorter.tau, rel=1e-6)
    figures = whole.more["selector"]
    assert figures["plain_tau"] == pytest.approx(without.tau, rel=1e-6)
    assert figures["lift"] == pytest.approx(whole.tau - without.tau, abs=1e-6)
    assert abs(figures["lift"]) > 1e-3
    assert figures["recall"] == [1.0] * 4
    assert alone.more["selector"]["recall"] == alone.more["selector"]["plain_accuracy"]


def test_calibration_computes_in_the_precision_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "best").mkdir()
    seen = []
    monkeypatch.setattr(loop, "calibrate_best", lambda *_: seen.append(torch.is_autocast_enabled("cpu")) or {})
    for precision in ("bf16", "no"):
        recipe = SimpleNamespace(answers=SimpleNamespace(sampling=Sampling()))
        run = SimpleNamespace(
            head=SimpleNamespace(trains=Trains(outputs=frozenset({"confidence"}))),
            folder=tmp_path,
            data=SimpleNamespace(source=None),
            heldout_batches=[],
            spec=TrainSpec(precision=precision),
            recipe=recipe,
            accelerator=make_accelerator(TrainSpec(precision=precision), torch.device("cpu")),
            target=None,
        )
        loop._Run._calibrate(run)
    assert seen == [True, False]
