"""The parts of an evaluation's time, and which drafters it measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.estimate.estimator import assume, make_estimate
from draftsmith.estimate.evaluation import EvaluationEstimate
from draftsmith.estimate.figures import find_device
from draftsmith.eval.clocks.turns import FEW
from draftsmith.heads.registry import find_method
from draftsmith.recipe.evaluate import BaselineSpec, DraftSpec, EvaluateSpec
from draftsmith.recipe.schema import DataSpec, Recipe, TrainSpec
from draftsmith.stages.drafters import at_temperature, select_drafters
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from tests.models import tiny_model

PROMPTS = {"chat": 5, "code": 1}


def evaluation(method: str = "eagle3", **changes: Any) -> EvaluationEstimate:
    """Prompts of 12 tokens, answers of 24."""
    options = find_method(method).options_class()
    spec = EvaluateSpec(
        **{"max_new_tokens": 40, "num_speculative_tokens": 3, "max_k": 3, "plan_batches": [], **changes}
    )
    recipe = Recipe(
        method=method, head=options, evaluate=spec, data=DataSpec(max_length=48), train=TrainSpec(row_tokens=48)
    )
    shape = shape_of(tiny_model("llama").config, 4)
    given = replace(assume(recipe, shape, find_device("h100")), prompt=12, answer=24, evaluated=24)
    return EvaluationEstimate(make_estimate(recipe, shape, 400, given, PROMPTS))


TREES = [
    DraftSpec(),
    DraftSpec("medusa_63"),
    DraftSpec("medusa_63", children="drawn"),
    DraftSpec("medusa_63", acceptance="typical"),
    DraftSpec("dynamic", total_tokens=20),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "drafts"), [("eagle3", TREES[:1]), ("eagle3", TREES), ("medusa", TREES[:4])])
def test_the_drafters_are_those_of_the_evaluation(method: str, drafts: list[DraftSpec], temperature: float) -> None:
    made = evaluation(method, drafts=drafts, baselines=[BaselineSpec("prompt_lookup")])
    target = Target(tiny_model("llama"), path="tiny", fingerprint="0")
    head = find_method(method).build(made.estimate.recipe.head, target, None)
    found = select_drafters(made.estimate.recipe, {method: head}, target, 64, None, lambda text: None)
    kept = at_temperature(found, made.spec.sampling(temperature))
    mine = [way for way in made.ways if temperature or way.greedy]
    assert sorted(c.nodes(c.num_speculative_tokens) for c in kept) == sorted(way.nodes for way in mine)
    assert sum(c.simulate is not None for c in kept) == sum(way.simulated for way in mine)
    assert sum(c.tree is None for c in kept) == sum(way.chain for way in mine)


def test_decoding_is_every_answer_of_every_repeat() -> None:
    """Memory-bound, so that a draft's pass takes as long as a token's, and half as many of them make an answer, but no draft is
    counted as faster than the target alone."""
    made = evaluation(temperatures=[1.0], generate=False, repeats=2)
    estimate = made.estimate
    prefill = sum(PROMPTS.values()) * estimate.target.forward_flops(12)
    assert made.parts["decoding"] == pytest.approx(
        2 * (2 * 6 * 24 * estimate.pass_seconds(1, 1, 24) + 2 * estimate.seconds(prefill))
    )
    with_generate = evaluation(temperatures=[1.0], repeats=2)
    some = sum(min(FEW, count) for count in PROMPTS.values())
    extra = with_generate.parts["decoding"] - made.parts["decoding"]
    assert extra == pytest.approx(2 * some * 24 * estimate.pass_seconds(1, 1, 24))


def test_limits_of_slices_count() -> None:
    made = evaluation(max_new_tokens_by_slice={"chat": 10})
    assert made.tokens() == 5 * 10 + 24
    assert evaluation(max_new_tokens=16).tokens() == 6 * 16


def test_each_part_comes_with_what_asks_for_it() -> None:
    in_float32 = {"dtype": "float32", "temperatures": [0.0]}
    assert evaluation(**in_float32).parts.keys() == {"decoding", "simulation", "costs"}
    assert "draft lengths" in evaluation(**in_float32, plan_batches=[1]).parts
    half = evaluation(temperatures=[0.0])
    half = replace(half, estimate=replace(half.estimate, target=replace(half.estimate.target, itemsize=2)))
    assert "equality in float32" in half.parts
    assert "equality in float32" not in replace(half, estimate=with_spec(half, lossless=False)).parts
    assert "equality in float32" not in replace(half, estimate=with_spec(half, temperatures=[0.7])).parts
    table = [evaluation(plan_batches=batches).parts["costs"] for batches in ([], [1], [1, 2, 4])]
    assert table == sorted(table)
    assert table[0] < table[1] < table[2]
    small = evaluation(plan_batches=[1, 2, 4])
    device = replace(small.estimate.given.device, memory=0.0)
    small = EvaluationEstimate(replace(small.estimate, given=replace(small.estimate.given, device=device)))
    assert small.parts["costs"] == pytest.approx(table[1]), "batches that do not fit are not timed"


def with_spec(made: EvaluationEstimate, **changes: Any) -> Any:
    spec = replace(made.spec, **changes)
    return replace(made.estimate, recipe=replace(made.estimate.recipe, evaluate=spec))


def test_float32_takes_twice_the_memory_of_half_precision() -> None:
    estimate = evaluation().estimate
    estimate = replace(estimate, target=replace(estimate.target, itemsize=2))
    assert estimate.pass_seconds(1, 1, 10, 4) == pytest.approx(2 * estimate.pass_seconds(1, 1, 10))
    assert torch.float32.itemsize == 4
