"""The plan of micro-batches, which parameter goes to which optimizer, the learning-rate curve, and Muon against torch's own."""

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draftsmith.data.batch import Features
from draftsmith.data.features import store
from draftsmith.data.features.index import StoreSpec
from draftsmith.data.features.store import FeatureStore, estimate_bytes
from draftsmith.recipe.schema import TrainSpec
from draftsmith.train import schedule
from draftsmith.train.feed import read_batch
from draftsmith.train.schedule import (
    Micro,
    Muon,
    Schedule,
    build_optimizers,
    lr_factor,
    orthogonalise,
    set_lr,
)
from tests.data.features.test_store import write_store
from tests.pretended_gpu.cuda import pretended_gpu

LENGTHS = [7, 30, 12, 25, 9, 31, 16, 3, 22, 14, 28]


def plan(processes: int, accumulation: int) -> Schedule:
    return Schedule(LENGTHS, TrainSpec(row_tokens=32, rows=1, accumulation=accumulation), seed=3, processes=processes)


def test_every_sample_once_and_whole_windows() -> None:
    schedule = plan(2, 2)
    for epoch in (0, 1):
        micros = schedule.epoch(epoch)
        assert len(micros) % 4 == 0
        seen = [i for m in micros if m.counts for row in m.rows for i in row]
        assert sorted(seen) == list(range(len(LENGTHS)))
    assert schedule.epoch(0) != schedule.epoch(1)
    assert schedule.epoch(0) == plan(2, 2).epoch(0)


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 4), (2, 2), (4, 1), (3, 1)])
def test_micro_batches_are_dealt_out_in_turns(processes: int, accumulation: int, skip: int) -> None:
    """From what one process sees in an epoch: no micro-batch is lost, seen twice, or in another window."""
    window = processes * accumulation
    whole = plan(1, window).epoch(1)
    schedule = plan(processes, accumulation)
    for rank in range(processes):
        dealt = [micro for place, micro in enumerate(whole) if place % processes == rank and place >= skip * window]
        assert schedule.share(1, rank, skip) == dealt
        assert schedule.share(1, rank) == schedule.share(1, rank, 0)
        assert len(dealt) == (len(whole) // window - skip) * accumulation


def test_fillers_repeat_the_first_and_do_not_count() -> None:
    alone = Schedule([5], TrainSpec(row_tokens=32, rows=1), seed=3, processes=3)
    assert alone.epoch(0) == [Micro(((0,),), True), Micro(((0,),), False), Micro(((0,),), False)]
    whole = plan(5, 1).epoch(0)
    assert {micro.rows for micro in whole if not micro.counts} == {whole[0].rows}


def test_an_epoch_opens_every_shard_in_one_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More shards than stay open, read by 1, 2 and 3 processes, which share out the same micro-batches."""
    states, ids = torch.zeros(3, 2), torch.arange(3)
    plain = Features(ids, ids >= 0, states, states, ids.int(), torch.zeros(3), "", "s")
    samples = [replace(plain, sample_id=str(i)) for i in range(300)]
    size = estimate_bytes(3, 2, 1, "float32")
    spec = StoreSpec("f" * 16, "float32", (2,), "float32", 2, 50, "s" * 16, 3 * size, 1, ("s",))
    source = write_store(tmp_path, samples, spec)
    opened, real = [], store.safe_open
    monkeypatch.setattr(store, "safe_open", lambda file, **options: opened.append(file) or real(file, **options))
    index, rows = list(range(1, 300)), TrainSpec(row_tokens=12, rows=2)
    whole, order = None, ""
    assert Schedule([3] * len(index), rows, 5, 1, source.shards[index] // 9).order == "", "as without shards"
    for processes in (1, 2, 3):
        plan = Schedule([3] * len(index), rows, 5, processes, source.shards[index])
        counted = [micro for micro in plan.epoch(1) if micro.counts]
        whole, order = whole or counted, order or plan.order
        assert counted == whole
        assert plan.order == order != ""
        for rank in range(processes):
            reader, micros = FeatureStore(tmp_path), plan.share(1, rank)
            opened.clear()
            for micro in micros:
                read_batch(reader, [[index[i] for i in row] for row in micro.rows], (2,), 12)
            assert len(opened) <= 2 * 100
            assert len(set(opened)) > store.OPEN_SHARDS
    assert Schedule([3] * len(index), rows, 5, 1, source.shards[index] // 2).order not in ("", order)


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


COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


def matrices() -> list[torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=draws)) for shape in ((24, 40), (40, 24), (32, 32))]


def gradients(step: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(step + 1)
    return [torch.randn(*p.shape, generator=draws) for p in matrices()]


def train(kind: type[torch.optim.Muon], steps: int) -> tuple[list[torch.nn.Parameter], torch.optim.Muon]:
    parameters = matrices()
    optimizer = kind(parameters, lr=0.02, weight_decay=0.1)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters, optimizer


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a processor without instructions for bf16, and on one with them."""
    monkeypatch.setattr(schedule, "faster_in_bf16", lambda device: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("bf16")
def test_steps_are_torchs_but_for_the_rounding_of_bf16() -> None:
    (ours, _), (theirs, _) = train(Muon, 4), train(torch.optim.Muon, 4)
    for start, mine, other in zip(matrices(), ours, theirs, strict=True):
        moved = (other - start).norm()
        assert moved > 0.1
        assert (mine - other).norm() < 0.02 * moved


@pytest.mark.usefixtures("bf16")
def test_state_is_torchs_and_either_goes_on_from_it() -> None:
    ours, optimizer = train(Muon, 2)
    state = copy.deepcopy(optimizer.state_dict())
    assert state.keys() == train(torch.optim.Muon, 2)[1].state_dict().keys()
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    again = torch.optim.Muon(resumed, lr=1.0)
    again.load_state_dict(state)
    for one, parameters in ((optimizer, ours), (again, resumed)):
        for parameter, gradient in zip(parameters, gradients(2), strict=True):
            parameter.grad = gradient
        one.step()
    for mine, other in zip(ours, resumed, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-3, rtol=0)


def test_a_parameter_without_gradient_stays_and_a_closure_is_called() -> None:
    parameters = matrices()
    optimizer = Muon(parameters, lr=0.1)

    def closure() -> torch.Tensor:
        loss = (parameters[0] ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == (matrices()[0] ** 2).sum()
    assert not torch.equal(parameters[0], matrices()[0])
    assert torch.equal(parameters[1], matrices()[1])


@pytest.mark.usefixtures("bf16")
def test_singular_values_come_near_one() -> None:
    for matrix in (torch.diag(torch.linspace(0.05, 1.0, 16)), torch.randn(40, 12), torch.randn(12, 40).double()):
        found = orthogonalise(matrix, COEFFICIENTS, STEPS, EPS)
        assert found.dtype == matrix.dtype
        assert found.shape == matrix.shape
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_the_iteration_is_the_polynomial_of_singular_values(bf16: bool) -> None:
    """x -> a x + b x^3 + c x^5 on each of them, five times; the vectors stay."""
    draws = torch.Generator().manual_seed(3)
    matrix = torch.randn(20, 30, generator=draws, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    expected = (left * values) @ right
    found = orthogonalise(matrix, COEFFICIENTS, STEPS, EPS)
    torch.testing.assert_close(found.double(), expected, atol=0.03 if bf16 else 1e-4, rtol=0)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """Neither weights nor state: what follows is as if there had been none. The optimizers look at `found_inf` themselves."""
    trained = []
    for broken in ([0], [0, 1, 0], [1, 0]):
        torch.manual_seed(0)
        head = Head()
        optimizers = build_optimizers(head, TrainSpec(optimizer="muon", lr=1e-3, muon_lr=0.02, weight_decay=0.1))
        for now in broken:
            for parameter in head.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan if now else 0.5)
            for optimizer in optimizers:
                optimizer.found_inf = torch.tensor(float(now))  # type: ignore[attr-defined]
                optimizer.step()
        trained.append([*head.parameters(), *(x for o in optimizers for s in o.state.values() for x in s.values())])
    once, twice, late = trained
    assert all(torch.equal(x, y) for x, y in zip(once, late, strict=True))
    assert all(x.isfinite().all() for x in twice)
    assert sum(torch.equal(x, y) for x, y in zip(once, twice, strict=True)) == 1, "of the frozen embedding"


def test_adamw_of_a_checkpoint_of_an_earlier_version_is_fused_too() -> None:
    (optimizer,) = build_optimizers(Head(), TrainSpec(optimizer="adamw"))
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "param_groups": [g | {"fused": None} for g in state["param_groups"]]})
    assert all(group["fused"] for group in optimizer.param_groups)


def _train_together(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=rank)
    made: list[torch.Size] = []
    alone = schedule.orthogonalise
    schedule.orthogonalise = lambda matrix, *options: made.append(matrix.shape) or alone(matrix, *options)
    parameters, optimizer = train(Muon, 3)
    torch.save((parameters, optimizer.state_dict(), made), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_processes_share_the_work_and_get_what_one_would(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_together, (str(tmp_path),), nprocs=2)
    alone, optimizer = train(Muon, 3)
    shapes = []
    for rank in range(2):
        parameters, state, made = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert all(torch.equal(one, other) for one, other in zip(parameters, alone, strict=True))
        for place, kept in optimizer.state_dict()["state"].items():
            assert torch.equal(state["state"][place]["momentum_buffer"], kept["momentum_buffer"])
        shapes.append(made)
    assert sorted(map(len, shapes)) == [3, 6]


def test_gpus_share_the_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two sends what it has made and takes the rest, which here are zeros."""
    sent: list[tuple[torch.Size, str, int]] = []

    def broadcast(update: torch.Tensor, owner: int, async_op: bool) -> SimpleNamespace:
        if owner:
            update.zero_()
        sent.append((update.shape, update.device.type, owner))
        return SimpleNamespace(wait=lambda: None)

    group = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_world_size": lambda: 2,
        "get_rank": lambda: 0,
    }
    alone, _ = train(Muon, 1)
    with pretended_gpu():
        here = [torch.nn.Parameter(p.detach().cuda()) for p in matrices()]
        for parameter, gradient in zip(here, gradients(0), strict=True):
            parameter.grad = gradient.cuda()
        monkeypatch.setattr(schedule, "distributed", SimpleNamespace(**group, broadcast=broadcast))
        Muon(here, lr=0.02, weight_decay=0.1).step()
        moved = [p.detach().cpu() for p in here]
    assert [(tuple(shape), kind) for shape, kind, _ in sent] == [
        ((24, 40), "cuda"),
        ((40, 24), "cuda"),
        ((32, 32), "cuda"),
    ]
    assert sorted(owner for *_, owner in sent) in ([0, 0, 1], [0, 1, 1])
    for start, mine, other, (*_, owner) in zip(matrices(), moved, alone, sent, strict=True):
        expected = start * (1 - 0.02 * 0.1) if owner else other
        assert (mine - expected).norm() < 0.02 * (other - start).norm()
