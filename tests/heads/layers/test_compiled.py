"""Compiled parts of a training pass give the losses and gradients of the eager ones, in graphs that neither break nor multiply."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from draftsmith.data.batch import collate
from draftsmith.data.features.extract import compute_features
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.layers.compiled import compiled, compiling, is_compiling
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from tests.gpu.support import LAYERS, OPTIONS, make_head, make_target, make_texts

CPU = torch.device("cpu")
NO_PARTS = ("draft_model", "medusa", "medusa2")
"""Their heads have no attention."""
Step = tuple[float, list[Tensor]]


def make_steps(target: Target) -> list[Callable[[DraftHead], Step]]:
    """Return training steps on batches of several sizes; a single row has graphs of its own."""
    features = compute_features(target, make_texts(8, 10), LAYERS, torch.float32)

    def step(head: DraftHead, rows: list[Any]) -> Step:
        batch, spec = collate(rows, 60), LossSpec()
        scored = head_loss(head(batch, 3), batch, target.head, head.draft_vocab, spec)
        loss, trained = (
            scored.loss_sum / loss_divisor(batch, spec, head),
            [p for p in head.parameters() if p.requires_grad],
        )
        return loss.item(), list(torch.autograd.grad(loss, trained, materialize_grads=True))

    batches = (
        [features[:2], features[2:5]],
        [features[:3], features[5:6]],
        [features[4:5], features[1:4], features[6:7]],
    )
    return [lambda head, rows=rows: step(head, rows) for rows in batches]


def check(method: str) -> None:
    target = make_target("cpu")
    head, graphs = make_head(target, method).train(), []
    torch._dynamo.reset()
    counters.clear()
    for step in make_steps(target):
        loss, gradients = step(head)
        with compiling(True, CPU):
            found, ours = step(head)
        assert found == pytest.approx(loss, rel=1e-6)
        for one, other in zip(ours, gradients, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm() + 1e-9
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert len(set(graphs)) == 1, "batches of other lengths are compiled again"
    assert graphs[0] > 1 or method in NO_PARTS, "besides the one that is tried out first"


@pytest.mark.full
@pytest.mark.parametrize("method", [m if m == "eagle3" else pytest.param(m, marks=pytest.mark.slow) for m in OPTIONS])
def test_methods_compiled(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check(method)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_eagle3_by_the_compiler_of_a_cpu() -> None:
    check("eagle3")


def test_on_a_cpu_nothing_is_compiled_by_default() -> None:
    with compiling(None, CPU):
        assert not is_compiling()


def test_where_nothing_can_be_compiled_training_is_eager_and_says_so_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no Triton")

    monkeypatch.setattr(torch, "compile", fails)
    with (
        pytest.raises(UserError, match=r"cannot compile for cpu \(no Triton\): install a C compiler, or set"),
        compiling(True, CPU),
    ):
        pass
    monkeypatch.setattr(torch, "linspace", lambda *_, **__: torch.ones(15))
    monkeypatch.setattr(Tensor, "to", lambda self, _: self)
    with compiling(None, torch.device("cuda")):
        assert not is_compiling()
    assert "the training pass runs without train.compile" in capsys.readouterr().err
    assert not is_compiling()


def test_the_limit_of_graphs_holds_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backward passes on a GPU run."""
    function = compiled(lambda x: x * 2)
    kinds = [torch.ones((2,) * n, dtype=dtype) for n in range(1, 7) for dtype in (torch.float32, torch.float64)]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with compiling(True, CPU), ThreadPoolExecutor(1) as pool:
        for x in kinds:  # a graph each
            assert torch.equal(pool.submit(function, x).result(), 2 * x)
