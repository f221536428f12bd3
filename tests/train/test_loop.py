"""The training loop: it learns, its checkpoints are whole, and trouble is said early."""

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from draftsmith.data.batch import Tokenized, TrainBatch
from draftsmith.data.features.extract import OnlineSource
from draftsmith.errors import UserError
from draftsmith.eval.training.history import Point, forecast
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import build
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.schema import AnswersSpec, EvaluateSpec, Recipe, TrackingSpec, TrainSpec
from draftsmith.target.target import Target
from draftsmith.train import loop, parallel
from draftsmith.train.checkpoints import Progress, latest_checkpoint, load_training_state, save_training_state
from draftsmith.train.dashboards import read_kept
from draftsmith.train.loop import train
from draftsmith.train.schedule import TrainData
from draftsmith.train.steps import postfix
from tests.helpers import hearing_signals

pytestmark = pytest.mark.full

LAYERS = (2, 4, 6)


@cache
def make_texts(target: Target) -> list[torch.Tensor]:
    """Texts that the target itself continues greedily from a few prompts: easy to learn."""
    prompts = (torch.tensor([[3 + i, 7, 9]]) for i in range(4))
    return [target.model.generate(p, max_new_tokens=20, do_sample=False, pad_token_id=0)[0] for p in prompts]


def make_data(target: Target, *, masked: bool = False) -> TrainData:
    """Each text six times."""
    samples = []
    for i in range(24):
        ids = make_texts(target)[i % 4]
        mask = torch.arange(len(ids)) >= 3
        samples.append(Tokenized(ids, mask & (not masked), f"s{i}", ("chat", "code")[i % 2]))
    source = OnlineSource(target, samples, LAYERS)
    return TrainData(source, list(range(20)), list(range(20, 24)))


def make_recipe(**overrides: object) -> Recipe:
    spec = TrainSpec(epochs=8, row_tokens=64, rows=2, optimizer="adamw", lr=3e-3, precision="no", evaluations=2)
    return Recipe(
        answers=AnswersSpec(temperature=0.0),
        evaluate=EvaluateSpec(num_speculative_tokens=3),
        train=replace(spec, **overrides),  # type: ignore[arg-type]
    )


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def make_head(target: Target) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(Eagle3Options(layer_ids=list(LAYERS), ttt_steps=3), target, None)


def test_epochs_that_max_steps_does_not_reach_are_not_planned(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, epoch = set(), loop.Schedule.epoch
    monkeypatch.setattr(loop.Schedule, "epoch", lambda self, number: planned.add(number) or epoch(self, number))
    train(
        make_recipe(max_steps=3, epochs=10_000, accumulation=8), target, make_head(target), make_data(target), tmp_path
    )
    assert len(read_metrics(tmp_path)) >= 3
    assert max(planned) < 8


def test_the_loss_is_told_by_draft_step_too(target: Target, tmp_path: Path) -> None:
    """Of one step it is the loss; of several the loss is their weighted sum, over the rows of the first."""
    losses = {}
    for steps in (1, 3):
        head = build(Eagle3Options(layer_ids=list(LAYERS), ttt_steps=steps), target, None)
        recipe = make_recipe(max_steps=1)
        train(recipe, target, head, make_data(target), tmp_path / str(steps))
        record = json.loads((tmp_path / str(steps) / "metrics.jsonl").read_text().splitlines()[0])
        assert len(record["step_loss"]) == steps
        losses[steps] = record["loss"], record["step_loss"]
    assert losses[1][0] == pytest.approx(losses[1][1][0])
    whole, (first, *later) = losses[3]
    weighted = [make_recipe().train.loss.step_weight(k) * loss for k, loss in enumerate(later, 1)]
    assert first < whole < first + sum(weighted), "later steps have fewer rows"
    assert whole > first + 0.7 * sum(weighted)


def test_training_learns_and_keeps_the_best_head(target: Target, tmp_path: Path) -> None:
    best = train(make_recipe(), target, make_head(target), make_data(target), tmp_path)
    lines = read_metrics(tmp_path)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["accuracy"][0] > 0.35
    taus = [line["tau"]["overall"] for line in lines if "tau" in line]
    assert max(taus) > 1.3, "greedy texts of four prompts are often drafted right"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best_tau"] == max(taus)
    assert load_head(best, target).reads.layer_ids == LAYERS


def test_a_dashboard_gets_what_the_clock_and_the_gradient_say(target: Target, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = make_recipe(epochs=1, optimizer="muon", muon_lr=0.02, warmup=0.0)
    recipe = replace(recipe, tracking=TrackingSpec(backends=["tensorboard"]))
    train(recipe, target, make_head(target), make_data(target), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = read_metrics(tmp_path)
    for name in ("grad_norm", "memory_gib", "tokens_per_second", "muon_lr"):
        assert name not in lines[0]
        found = events.Scalars(f"train/{name}")
        assert [event.step for event in found] == [line["step"] for line in lines]
        assert all(event.value > 0 for event in found)
    assert events.Scalars("train/muon_lr")[0].value == pytest.approx(0.02)
    assert events.Scalars("best/tau")[0].value == pytest.approx(
        json.loads((tmp_path / "summary.json").read_text())["best_tau"]
    )
    config = read_kept(tmp_path / "dashboards.jsonl")["config"]
    assert (config["target"]["fingerprint"], config["world_size"], config["tokens_per_step"]) == ("0", 1, 128)
    assert "torch" in config["versions"]


def test_evaluations_foretell_the_end(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second on, in metrics.jsonl and on the progress line; not at the end. Tokens seen stand for steps."""
    taus = iter((1.5, 1.8, 1.95, 2.05))
    real = loop.evaluate_heldout
    monkeypatch.setattr(loop, "evaluate_heldout", lambda *args: replace(real(*args), tau=next(taus)))
    train(make_recipe(evaluations=4), target, make_head(target), make_data(target), tmp_path)
    lines = read_metrics(tmp_path)
    evaluations = [line for line in lines if "tau" in line]
    assert ["forecast" in line for line in evaluations] == [False, True, True, False]
    points = [Point(line["step"], line["tokens"], line["tau"]["overall"]) for line in evaluations]
    for count in (2, 3):
        end = round(points[count - 1].tokens * lines[-1]["step"] / points[count - 1].step)
        found = forecast(points[:count], end, 3)
        assert found is not None
        assert evaluations[count - 1]["forecast"] == asdict(found)
        assert f"tau 1.80, forecast {found} at the end" in postfix({}, 1.8, found, 9.0)
    assert end == pytest.approx(points[-1].tokens, rel=0.05)
    assert postfix({}, 1.8, None, 9.0) == "tau 1.80 9 tok/s"


def test_patience_stops_early(target: Target, tmp_path: Path) -> None:
    recipe = make_recipe(lr=0.0, epochs=6, evaluations=6, patience=2)
    train(recipe, target, make_head(target), make_data(target), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sum('"tau"' in line for line in lines) == 3, "the first is the best, two more are no better"


@pytest.mark.parametrize(
    ("where", "call", "step"),
    [
        ("head_loss", 9, 9),
        ("save_head", 1, 20),
        pytest.param("set_lr", 4, 4, marks=pytest.mark.slow),
        pytest.param("evaluate_heldout", 1, 20, marks=pytest.mark.slow),
    ],
)
@hearing_signals()
def test_interrupt_saves_a_checkpoint_and_resume_goes_on(
    where: str, call: int, step: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the forward pass, between optimizers, while evaluating and while saving: always a whole step."""
    data = make_data(target)
    train(make_recipe(), target, make_head(target), data, tmp_path / "whole")
    module = parallel if where == "head_loss" else loop
    real, calls = getattr(module, where), [0]

    def interrupted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, where, interrupted)
    with pytest.raises(UserError, match="run the same command again"):
        train(make_recipe(), target, make_head(target), data, tmp_path / "cut")
    monkeypatch.setattr(module, where, real)
    found = latest_checkpoint(tmp_path / "cut")
    assert found is not None
    assert found.name == f"step_{step}"
    # A half-written checkpoint is never resumed from.
    (tmp_path / "cut" / "step_99.tmp").mkdir()
    (tmp_path / "cut" / "step_98").mkdir()
    assert latest_checkpoint(tmp_path / "cut") == found
    with monkeypatch.context() as stored_anew:
        stored_anew.setattr(loop.Schedule, "order", "of other shards")
        with pytest.raises(UserError, match=r"took the samples in another order: .* add --redo train"):
            train(make_recipe(), target, make_head(target), data, tmp_path / "cut")
    train(make_recipe(), target, make_head(target), data, tmp_path / "cut")
    for name in ("metrics.jsonl", "best/model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_empty_masks_and_broken_losses_are_said(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no supervised row"):
        train(make_recipe(), target, make_head(target), make_data(target, masked=True), tmp_path / "a")
    head = make_head(target)
    with torch.no_grad():
        head.get_parameter("fc.weight").fill_(torch.nan)
    with pytest.raises(UserError, match="The loss became nan at step 1"):
        train(make_recipe(), target, head, make_data(target), tmp_path / "b")


@pytest.mark.parametrize(("broken", "steps"), [(1, 1), (2, 2), (2, 5)], ids=["at once", "at the end", "within"])
def test_a_gradient_that_is_no_number_is_left_out_and_ends_the_training(
    broken: int, steps: int, target: Target, tmp_path: Path
) -> None:
    """Before anything is evaluated or saved; one step late where nothing is."""
    head, states = make_head(target), []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        states.append({name: value.clone() for name, value in head.state_dict().items()})
        return torch.full_like(grad, torch.inf) if len(states) == broken else grad

    head.get_parameter("fc.weight").register_hook(hook)
    message = rf"The norm of the gradient became (inf|nan) at step {broken}: lower train\.lr"
    with pytest.raises(UserError, match=message):
        train(make_recipe(max_steps=steps, evaluations=1), target, head, make_data(target), tmp_path)
    assert len(states) == min(broken + 1, steps)
    after = states[broken] if steps > broken else head.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in states[broken - 1].items())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"] * (broken > 1)
    assert broken == 1 or len(read_metrics(tmp_path)) == broken - 1


def remask(target: Target, learned: Callable[[int, torch.Tensor], torch.Tensor]) -> TrainData:
    """The same texts; `learned` says of a sample's number and positions which of these are learned."""
    data = make_data(target)
    samples = []
    for i in range(24):
        ids, mask = data.source.text(i)
        samples.append(Tokenized(ids, mask & learned(i, torch.arange(len(ids))), f"s{i}", data.source.slices[i]))
    return TrainData(OnlineSource(target, samples, LAYERS), data.train, data.heldout)


def test_a_step_without_a_supervised_row_changes_nothing(target: Target, tmp_path: Path) -> None:
    """An answer of one token has a root and nothing to draft behind it."""
    some = remask(target, lambda i, position: (position == 3) | (i >= 16))
    recipe = make_recipe(rows=1, row_tokens=24, epochs=2, clip=0.0)
    train(recipe, target, make_head(target), some, tmp_path / "some")
    lines = read_metrics(tmp_path / "some")
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert sum("loss" in line for line in lines) == 8, "four samples, twice"
    tokens = [0, *(line["tokens"] for line in lines)]
    assert all(
        (later > earlier) == ("loss" in line) for earlier, later, line in zip(tokens, tokens[1:], lines, strict=False)
    )


def test_a_step_without_a_supervised_row_has_no_gradient_to_tell(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the norm of the step before."""
    told: list[tuple[bool, bool, bool]] = []
    log = loop.Tracker.log

    def spy(self, values, extra=None):
        told.append(("loss" in values, "grad_norm" in extra, "muon_lr" in extra))
        return log(self, values, extra)

    monkeypatch.setattr(loop.Tracker, "log", spy)
    some = remask(target, lambda i, position: (position == 3) | (i % 2 == 0))
    recipe = make_recipe(rows=1, row_tokens=24, epochs=1, optimizer="muon", muon_lr=0.02)
    train(recipe, target, make_head(target), some, tmp_path)
    assert sorted(set(told)) == [(False, False, False), (True, True, True)]


def test_a_step_whose_rows_all_weigh_nothing_changes_nothing(target: Target, tmp_path: Path) -> None:
    """An answer of two tokens has a row at the first step alone, which weighs nothing here."""
    some = remask(target, lambda i, position: position // 2 == 2)
    head = make_head(target)
    loss = LossSpec(depth_weights=[0.0] + [1.0] * (head.trains.steps - 1), normalize="weights")
    before = {name: value.clone() for name, value in head.state_dict().items()}
    recipe = make_recipe(epochs=1, clip=0.0, loss=loss)
    with pytest.raises(UserError, match="no supervised row"):
        train(recipe, target, head, some, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


def test_a_micro_batch_is_let_go_of_before_the_next_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[ref[TrainBatch]] = []
    real = loop.Feed.batch

    def watched(*given: Any) -> TrainBatch:
        assert not before or before[-1]() is None
        batch = real(*given)
        before.append(ref(batch))
        return batch

    monkeypatch.setattr(loop.Feed, "batch", watched)
    train(make_recipe(max_steps=2, accumulation=3), target, make_head(target), make_data(target), tmp_path)
    assert len(before) == 6


def test_acceptance_at_chance_is_warned_of(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = make_head(target)
    with torch.no_grad():
        head.get_parameter("lm_head.weight").zero_()
    train(make_recipe(lr=0.0, epochs=1, evaluations=1), target, head, make_data(target), tmp_path)
    assert "guessing the most common token" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "resumed"])
def test_the_clock_counts_reading_and_no_evaluation(
    cut: bool, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that batches move by 1 and evaluations by 1000: a head that reads what must be computed first pays for it. After an
    interruption the seconds and the tokens per second are still those of the whole training."""
    now = [0.0]
    read, evaluate = loop.Feed._read, loop.evaluate_heldout

    def slow_read(*given):
        now[0] += 1.0
        return read(*given)

    def slow_evaluation(*given):
        now[0] += 1000.0
        return evaluate(*given)

    monkeypatch.setattr(loop.Feed, "_read", slow_read)
    monkeypatch.setattr(loop, "evaluate_heldout", slow_evaluation)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    if cut:
        set_lr, calls = loop.set_lr, [0]

        def interrupted(*given):
            calls[0] += 1
            if calls[0] == 2:
                signal.raise_signal(signal.SIGTERM)
            return set_lr(*given)

        monkeypatch.setattr(loop, "set_lr", interrupted)
        with pytest.raises(UserError, match="interrupted at step 2 of 3"):
            train(make_recipe(max_steps=3, workers=0), target, make_head(target), make_data(target), tmp_path)
        now[0] += 500.0
    train(make_recipe(max_steps=3, workers=0), target, make_head(target), make_data(target), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train_seconds"] == summary["step"] == 3
    assert summary["tokens_per_second"] == summary["tokens"] / 3
    assert "seconds" not in (tmp_path / "metrics.jsonl").read_text()


def test_seconds_that_an_earlier_version_did_not_note_are_not_guessed(target: Target, tmp_path: Path) -> None:
    accelerator = loop.make_accelerator(make_recipe().train, target.device)
    save_training_state(accelerator, tmp_path, Progress(step=2, tokens=9), make_head(target))
    found = tmp_path / "step_2"
    record = json.loads((found / "progress.json").read_text())
    del record["train_seconds"]
    (found / "progress.json").write_text(json.dumps(record))
    (found / "DONE").write_text("{}")
    resumed = load_training_state(accelerator, tmp_path, make_head(target))
    assert resumed == Progress(step=2, tokens=9, train_seconds=None)
