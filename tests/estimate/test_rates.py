"""The rates of this machine: the plan made with them gives the seconds back that were measured."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.estimate import rates
from draftsmith.estimate.estimator import assume, make_estimate
from draftsmith.estimate.figures import Estimate, PlannedTarget, device_here
from draftsmith.heads.registry import methods
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from draftsmith.target.shape import shape_of
from tests.models import tiny_model

SECONDS = 0.25


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job is done, once, and takes SECONDS."""

    def once(job: Callable[[], object], device: torch.device) -> float:
        job()
        return SECONDS

    monkeypatch.setattr(rates, "_time", once)


def measured(recipe: Recipe) -> Estimate:
    """The plan for a target of 16 layers, as the tiny recipes have one."""
    config = tiny_model("llama", num_hidden_layers=16).config
    planned = PlannedTarget(config, shape_of(config, 4), "float32")
    estimate = make_estimate(recipe, planned.shape, 400, assume(recipe, planned.shape, device_here("cpu")))
    device = rates.measure_device(recipe, planned, estimate)
    return make_estimate(recipe, planned.shape, 400, assume(recipe, planned.shape, device))


def recipe_of(method: str, *more: str) -> Recipe:
    recipe = next(Path("recipes", method).glob("tiny.yaml"))
    return parse_recipe(["--recipe", str(recipe), "--data.max_length", "48", "--train.row_tokens", "48", *more])


@pytest.mark.usefixtures("clock")
def test_a_plan_gives_the_measured_seconds_back() -> None:
    recipe = recipe_of("eagle3", "--answers.batch", "12", "--head.draft_vocab_size", "100")
    made = measured(recipe)
    given = made.given
    length = given.prompt + given.answer
    texts = rates._TOKENS // length
    assert made.seconds(texts * made.target.forward_flops(length)) == pytest.approx(SECONDS)
    for rows, tokens in ((1, 1), (1, 1 + recipe.evaluate.num_speculative_tokens), (12, 1)):
        assert made.pass_seconds(rows, tokens, made.context) == pytest.approx(SECONDS)
    between = made.pass_seconds(1, 3, made.context)
    assert between == pytest.approx(3 * made.target.step_flops(made.context) / given.device.rates.of_pass(3))
    flops = texts * made.head.of_text(given.prompt, given.answer, recipe.train.loss).flops
    assert made.train_pass_seconds(flops) == pytest.approx(SECONDS)
    assert given.device.bandwidth == pytest.approx(made.target.touched_bytes(1) / SECONDS)


@pytest.mark.usefixtures("clock")
def test_of_a_large_target_some_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own seconds are those of the layers that were made, by the share of their FLOPs."""
    recipe = recipe_of("eagle3", "--head.draft_vocab_size", "100")
    monkeypatch.setattr(rates, "_LAYERS", 1.0)
    made = measured(recipe)
    few = shape_of(tiny_model("llama", num_hidden_layers=3).config, 4)
    assert made.target.layers == 16
    share = made.target.step_flops(made.context) / few.step_flops(made.context)
    assert made.pass_seconds(1, 1, made.context) == pytest.approx(share * SECONDS)


@pytest.mark.usefixtures("clock")
@pytest.mark.full
@pytest.mark.parametrize("method", methods())
def test_every_method_is_measured(method: str) -> None:
    sized = {"draft_vocab_size": "100", "mask_token_id": "3"}
    options = methods()[method].options_class.__dataclass_fields__
    more = [word for key, value in sized.items() if key in options for word in (f"--head.{key}", value)]
    made = measured(recipe_of(method, *more))
    assert made.given.device.rates is not None
    assert made.train_seconds > 0


def test_a_target_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    monkeypatch.setattr("draftsmith.estimate.figures.available_memory", lambda device: 1000)
    assert main(["plan", "--target.path", str(tmp_path), "--data.limit", "1000", "--device", "cpu"]) == 2
    assert "too little free memory to measure even 8 layers" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "process", "counted"), [(3.0, 4.0, 3.0), (1.0, 8.0, 4.0)])
def test_other_programs_do_not_count(
    monkeypatch: pytest.MonkeyPatch, own: float, process: float, counted: float
) -> None:
    """On a CPU: the time of this thread, or of all threads by their number where this one waits for the others."""
    for name, seconds in (("thread_time", own), ("process_time", process), ("perf_counter", 99.0)):
        clock = iter((10.0, 10.0 + seconds))
        monkeypatch.setattr(rates.time, name, lambda clock=clock: next(clock))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert rates._seconds(lambda: None, torch.device("cpu")) == counted


@pytest.mark.usefixtures("clock")
def test_the_embedded_default_is_planned_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target.path", "embedded", "--data.limit", "500", "--data.max_length", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith("measured")]
    assert "cpu" in told
    prompt = int(re.search(r"500 conversations of (\d+) prompt and 64 answer tokens", lines[2])[1])
    assert 10 < prompt < 64, "as long as its prompts are, not half of what is left"
    assert any(line.startswith("evaluation: 120 prompts, 2 temperatures, 3 repeats") for line in lines)
    assert any(line.startswith("total: ") for line in lines)
