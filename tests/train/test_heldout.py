"""Held-out answers: the loss per slice is that of the slice's answers alone."""

import pytest
import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.extract import OnlineSource
from draftsmith.eval.sampling import Sampling
from draftsmith.heads.eagle3 import build
from draftsmith.heads.eagle3_options import Eagle3Options
from draftsmith.heads.loss_spec import LossSpec
from draftsmith.heads.target import Target
from draftsmith.train.heldout import evaluate_heldout, make_heldout_batches
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
