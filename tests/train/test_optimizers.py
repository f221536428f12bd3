"""Which parameter goes to which optimizer, and the learning-rate curve."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.optimizers import build_optimizers, lr_factor, set_lr


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4).requires_grad_(False)
        self.fc = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    head = Head()
    muon, adamw = build_optimizers(head, TrainSpec(optimizer="muon", lr=1e-3, muon_lr=0.02))
    assert isinstance(muon, torch.optim.Muon)
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(4, 4)]
    assert [p.shape for p in adamw.param_groups[0]["params"]] == [(4,), (8, 4)]
    (only,) = build_optimizers(head, TrainSpec(optimizer="adamw"))
    assert len(only.param_groups[0]["params"]) == 3, "the frozen embedding is left out"


def test_norms_and_biases_do_not_decay() -> None:
    muon, adamw = build_optimizers(Head(), TrainSpec(optimizer="muon", lr=1e-3, muon_lr=0.02, weight_decay=0.1))
    assert [group["weight_decay"] for group in muon.param_groups] == [0.1]
    decay = {tuple(p.shape): g["weight_decay"] for g in adamw.param_groups for p in g["params"]}
    assert decay == {(4,): 0.0, (8, 4): 0.1}


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    spec = TrainSpec(warmup=0.1, final_lr=0.2)
    factors = [lr_factor(step, 100, spec) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.6)
    assert all(a > b for a, b in pairwise(factors[10:]))
    assert lr_factor(100, 100, spec) == pytest.approx(0.2)
    optimizers = build_optimizers(Head(), TrainSpec(optimizer="muon", lr=1e-3, muon_lr=0.02))
    set_lr(optimizers, 0.5)
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.01, 5e-4]
