"""Kernels, waits and copies of a training step and of a decoding round are those of counts.json, exactly.

A wait that comes back fails here, with its file and line. Where a change is meant,

    DRAFTSMITH_WRITE_COUNTS=1 pytest -n 0 tests/pretended_gpu/test_counts.py

writes the table again; look at its difference before it is committed. Sizes are tiny, so the bytes mean something only
next to each other.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator

from draftsmith.data.batch import collate
from draftsmith.data.features import extract as extraction
from draftsmith.data.features.extract import extract
from draftsmith.decoder import graphs
from draftsmith.decoder.answers import Request
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec, Normalize
from draftsmith.heads.registry import methods
from draftsmith.train import loop, parallel
from draftsmith.train.feed import plan_batch
from draftsmith.train.parallel import WrappedHead
from draftsmith.train.schedule import TrainData
from draftsmith.train.steps import Found
from tests.gpu.support import LAYERS, OPTIONS, make_head, make_recipe, make_target, make_texts
from tests.pretended_gpu.counts import ROOT, Counts
from tests.pretended_gpu.cuda import pretended_gpu

TABLE = Path(__file__).with_name("counts.json")
VERSIONS = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
WRITE = "DRAFTSMITH_WRITE_COUNTS" in os.environ
TREE = StaticTree.of("few", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
ROUNDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "the target alone": (None, {}),
    # The target that Medusa-2 tunes is another one.
    **{method: (method, {}) for method in sorted(OPTIONS) if method != "medusa2"},
    "eagle3, static tree": ("eagle3", {"tree": TREE}),
    "eagle3, dynamic tree": ("eagle3", {"tree": DynamicTree(3, 4, 16)}),
    "eagle3, drawn tree": ("eagle3", {"tree": TREE, "drawn": True}),
    "medusa, static tree": ("medusa", {"tree": TREE}),
    "hydra, static tree": ("hydra", {"tree": TREE}),
}
CASES = [(name, temperature, 1) for name in ROUNDS for temperature in (0, 1)]
FEW = ("the target alone", "eagle3", "eagle3, dynamic tree", "draft_model")
CASES += [(name, temperature, 4) for name in FEW for temperature in (0, 1)]
QUICK = ("eagle3", 0, 1)
"""What the default run counts, beside a training step of EAGLE-3."""


def check(name: str, counts: Counts) -> None:
    """Compare what was counted with the table, or write it there."""
    found = counts.table()
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    if WRITE:
        table[name] = found
        table = {"versions": VERSIONS} | {key: table[key] for key in sorted(table.keys() - {"versions"})}
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return
    if table["versions"] != VERSIONS:
        pytest.skip(f"counted with {table['versions']}, here are {VERSIONS}")
    wrong = []
    for part, values in found.items():
        for key in sorted(values.keys() | table[name][part].keys()):
            here, there = values.get(key, 0), table[name][part].get(key, 0)
            if here != there:
                lines = f" at {', '.join(counts.lines(key))}" if part == "waits" and here else ""
                wrong.append(f"{part}: {key}: {here}, and {there} in {TABLE.name}{lines}")
    assert not wrong, "\n".join([f"{name} differs; the head of this file says how to write the table again", *wrong])


def during(counts: Counts, phase: str, function: Any) -> Any:
    """Return `function`, counted as a phase."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counts.during(phase):
            return function(*args, **kwargs)

    return counted


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Features of the tiny target in bf16, made on the CPU."""
    folder = tmp_path_factory.mktemp("features")
    return extract(make_target("cpu", torch.bfloat16), make_texts(), folder, layer_ids=LAYERS)


@pytest.mark.full
def test_extraction(tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are copied by the writer's thread, out of pinned memory, and are those of the CPU."""
    with pretended_gpu() as gpu:
        monkeypatch.setattr(extraction, "compute_states", during(gpu.counts, "pass", extraction.compute_states))
        target = make_target(dtype=torch.bfloat16)
        gpu.counts.clear()
        far = extract(target, make_texts(), tmp_path, layer_ids=LAYERS, batch_tokens=256)
        found = gpu.counts.copy_of()
    assert far.ids == store.ids
    for ours, theirs in zip(map(far.get, range(len(far))), map(store.get, range(len(far))), strict=True):
        torch.testing.assert_close(ours.aux, theirs.aux, rtol=0.05, atol=0.05)
        torch.testing.assert_close(ours.logsumexp, theirs.logsumexp, rtol=0.01, atol=0.01)
    check("extraction", found)


@pytest.mark.full
@pytest.mark.parametrize("method", [m if m == QUICK[0] else pytest.param(m, marks=pytest.mark.slow) for m in OPTIONS])
def test_a_training_step(method: str, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(epochs=1, precision="bf16")
    recipe = replace(recipe, train=replace(recipe.train, optimizer="adamw", max_steps=3, evaluations=1, workers=0))
    with pretended_gpu() as gpu:
        counts, run_step, run_read = gpu.counts, loop._Run._step, Found.read
        found: list[Counts] = []
        begun: list[int] = []

        def step(self: Any, window: Any, progress: Any, interrupt: Any) -> Any:
            waits = len(counts.waits)
            begun.append(gpu.stream_of(0).done)
            done = run_step(self, window, progress, interrupt)
            assert not progress.step or len(counts.waits) == waits, (
                "the host gives the device a step and waits for nothing"
            )
            if progress.step == 1:
                counts.clear()  # what follows, up to the end of the next step, is one turn of the loop
            if progress.step == 2:
                found.append(counts.copy_of())
            return done

        def read(self: Any, number: int) -> Any:
            found = run_read(self, number)
            late = gpu.host.seen[gpu.stream_of(0)] < begun[-1]
            assert late == (number < 3), "all but the last are read while the device is at the next one"
            return found

        monkeypatch.setattr(loop._Run, "_step", step)
        monkeypatch.setattr(Found, "read", read)
        monkeypatch.setattr(WrappedHead, "forward", during(counts, "forward", WrappedHead.forward))
        monkeypatch.setattr(parallel, "head_loss", during(counts, "loss", parallel.head_loss))
        monkeypatch.setattr(Accelerator, "backward", during(counts, "backward", Accelerator.backward))
        target = make_target(dtype=torch.bfloat16)
        if method == "eagle3":  # with the published number of steps, and a draft vocabulary
            vocab = torch.arange(0, target.vocab_size, 2, device=target.device)
            head = methods()[method].build(Eagle3Options(layer_ids=list(LAYERS), ttt_steps=7), target, vocab)
        else:
            head = make_head(target, method)
        data = TrainData(store, list(range(20)), list(range(20, 24)))
        loop.train(recipe, target, head, data, tmp_path)
    check(f"training step, {method}", found[0])


SETTINGS: dict[str, tuple[str, dict[str, Any], Normalize]] = {
    "two layers and a window": ("eagle3", {"num_hidden_layers": 2, "sliding_window": 9}, "sequence"),
    "noise by length": ("eagle1", {"noise": 0.1, "noise_length": 64}, "weights"),
    "a prefix layer and dropout": ("hydra", {"prefix_attention": True, "dropout": 0.2}, "rows"),
    "dropout of the adapter": ("medusa2", {"lora_dropout": 0.3}, "positions"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_wait_for_nothing_in_a_step_either(name: str, store: Any) -> None:
    method, options, normalize = SETTINGS[name]
    batch = collate([[store.get(0), store.get(1)], [store.get(2)]], 60, seeds=[[1, 2], [3]])
    with pretended_gpu() as gpu:
        target, loss = make_target(dtype=torch.bfloat16), LossSpec(normalize=normalize)
        head = methods()[method].build(replace(OPTIONS[method], **options), target, None).train()
        there = plan_batch(batch, head, loss, target.device).batch.to(target.device)
        gpu.counts.clear()
        with torch.autocast("cuda", torch.bfloat16):
            output = head(there, head.trains.steps)
        head_loss(output, there, target.head, None, loss, 0.3).loss_sum.backward()
        found = gpu.counts.table()
    assert found["waits"] == {}
    assert found["copies"] == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "temperature", "rows"),
    [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
@torch.no_grad()
def test_a_round(name: str, temperature: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "EAGER", 0)
    method, options = ROUNDS[name]
    requests = [Request(str(i), "a", tuple(range(5, 25)), 60, i, ignore_eos=True) for i in range(rows)]
    with pretended_gpu() as gpu:
        target, counts = make_target(dtype=torch.bfloat16), gpu.counts
        drafter: Drafter = TargetAlone()
        if method:
            drafter = methods()[method].make_drafter(make_head(target, method).to(target.dtype).eval(), 3, **options)
        rounds = Loop(target, drafter, requests, Sampling(float(temperature)), None, rows, timed=False)
        for _ in range(3):
            rounds.fill()
            rounds.round()
        rounds._passes = during(counts, "target", rounds._passes)  # its logits are of the pass
        drafter.propose = during(counts, "draft", drafter.propose)  # type: ignore[method-assign]
        for _ in range(20):  # up to a round whose shapes have all been captured
            counts.clear()
            rounds.round()
            found = counts.copy_of()
            if not any("capture" in wait for wait in found.table()["waits"]):
                break
    check(name_of(name, temperature, rows), found)


def name_of(name: str, temperature: int, rows: int) -> str:
    return f"round, {name}, T={temperature}, {rows} row{'s' if rows > 1 else ''}"


def test_the_table_holds_every_case_and_no_other() -> None:
    expected = {f"training step, {method}" for method in methods()} | {name_of(*case) for case in CASES}
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert table.keys() == expected | {"versions", "extraction"}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert table["versions"] == {name: pins[name] for name in VERSIONS}, (
        "or every test here skips: write the table again"
    )


@pytest.mark.skipif(WRITE, reason="the table is written")
def test_a_wait_that_comes_back_fails_with_its_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"versions": VERSIONS, "work": {"kernels": {"around": 1}, "waits": {}, "copies": {}}}
    (tmp_path / "counts.json").write_text(json.dumps(table))
    monkeypatch.setattr(f"{__name__}.TABLE", tmp_path / "counts.json")
    with pretended_gpu() as gpu:
        x = torch.zeros(3, device="cuda")
        check("work", gpu.counts)
        x.tolist()
    with pytest.raises(
        AssertionError, match=r"around: tests/pretended_gpu/test_counts.py .*tolist: 1, and 0 in .* at .*\.py:\d+"
    ):
        check("work", gpu.counts)
