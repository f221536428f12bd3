"""The plan and its memory against sums by hand and the tensors of a decode: every place, the best draft, and what is left out."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.cache import KVCache, entry_bytes, layer_shapes
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import Drafting
from draftsmith.eval.drafters import baselines
from draftsmith.eval.drafters.baseline_spec import BaselineSpec
from draftsmith.eval.drafters.baselines import Supplies
from draftsmith.eval.drafters.system import DraftInfo, SystemUnderTest, head_system
from draftsmith.eval.planner.decision import make_decision
from draftsmith.eval.planner.one_evaluation import check_one_evaluation
from draftsmith.eval.planner.plan import (
    PAYS,
    Memory,
    Plan,
    RoundCost,
    break_even_tokens,
    by_batch,
    memory_at,
)
from draftsmith.eval.results.result import Costs, DrafterResult, Measures, TargetInfo
from draftsmith.heads.hydra import HydraOptions
from draftsmith.heads.registry import methods
from draftsmith.target.target import Target
from tests.eval.planner.plans import KS, busier, plan, result, served_table, table
from tests.gpu.support import OPTIONS
from tests.models import make_target

GOOD = {"overall": 0.8, "code": 0.9, "rag": 0.3}


def test_every_cell_is_tau_over_what_a_round_costs() -> None:
    made = plan(result(0, GOOD), result(1, {"overall": 0.6, "code": 0.7, "rag": 0.2}))
    cells = list(made.cells())
    assert len(cells) == 2 * 3 * 3 * 3
    for cell in cells:
        alpha = {(0, "overall"): 0.8, (1, "overall"): 0.6, (0, "code"): 0.9, (1, "code"): 0.7, (0, "rag"): 0.3}.get(
            (cell.temperature, cell.slice), 0.2
        )
        assert [o.num_speculative_tokens for o in cell.options] == list(KS)
        alone = 10 * max(1, cell.batch / 16) + 0.5
        for option in cell.options:
            k = option.num_speculative_tokens
            tau = sum(alpha**i for i in range(k + 1))
            round_ms = 10 * max(1, (k + 1) * cell.batch / 16) + k * 1.0 + 1.0
            assert option.speedup == pytest.approx(tau * alone / round_ms)
            assert cell.tok_s(option) == pytest.approx(1000 * cell.batch * tau / round_ms)
            assert cell.tok_s(option) / cell.alone_tok_s == pytest.approx(option.speedup)
        assert cell.best.speedup == max(o.speedup for o in cell.options)
        assert cell.pays == (cell.best.speedup >= PAYS)


def test_every_temperature_is_planned_with_what_a_round_costs_there() -> None:
    costs = table()
    warm = Drafting({"eagle3": {str(k): 3.0 * k for k in KS}}, {"": 2.5, "eagle3": 5.0})
    costs = replace(costs, points=tuple(replace(point, sampled=warm) for point in costs.points))
    made = plan(result(0, GOOD), result(1, GOOD), costs=costs)
    greedy, sampled = made.headline
    assert [o.cost.overhead for o in greedy.options] == [1.0] * len(KS)
    assert [o.cost.draft for o in greedy.options] == [1.0 * k for k in KS]
    assert [o.cost.overhead for o in sampled.options] == [5.0] * len(KS)
    assert [o.cost.draft for o in sampled.options] == [3.0 * k for k in KS]
    assert sampled.alone_ms == greedy.alone_ms + 2.0
    pick = greedy.options[0]
    saved = [
        cell.alone_ms * (1 - 1 / option.speedup)
        for cell in (greedy, sampled)
        for option in cell.options
        if option.num_speculative_tokens == pick.num_speculative_tokens
    ]
    point = costs.at(made.batch, made.context)
    assert point is not None
    assert min(saved) > 0
    assert break_even_tokens(made, pick) == 2 + int(point.admit_ms["eagle3"] / min(saved))


def test_whole_rounds_price_what_was_measured_and_what_lies_between() -> None:
    made = plan(result(0, GOOD), costs=served_table({2: 12.0, 4: 15.0}))
    for cell in made.cells():
        assert [(o.num_speculative_tokens, o.cost.total) for o in cell.options] == [(2, 12.0), (3, 13.5), (4, 15.0)]
        assert all(o.cost.verify is o.cost.draft is None for o in cell.options)
        assert [o.speedup for o in cell.options] == [pytest.approx(o.tau * 10 / o.cost.total) for o in cell.options]
        assert cell.alone_tok_s == pytest.approx(1000 * cell.batch / 10)
    one = plan(result(0, GOOD), costs=served_table({3: 13.0}))
    assert [o.num_speculative_tokens for o in one.over_temperatures(1)] == [3], "nothing is known of other lengths"
    best = made.over_temperatures(1)[0]
    assert break_even_tokens(made, best) == 2 + int(5.0 / (10 * (1 - 1 / best.speedup)))


def test_larger_batches_are_given_shorter_drafts_and_then_none() -> None:
    made = plan(result(0, GOOD))
    ks = {batch: made.over_temperatures(batch)[0].num_speculative_tokens for batch in (1, 4, 16)}
    assert ks[1] == 4
    assert ks[16] < ks[4] <= ks[1]
    best = made.over_temperatures(1)[0]
    table_by_batch = by_batch(made, best)
    assert table_by_batch[0][0] == 1
    assert table_by_batch[-1][1:] == (16, 0), "at batch 16 every token costs, and nothing pays"
    assert all(last + 1 == first for (_, last, _), (first, _, _) in itertools.pairwise(table_by_batch))
    short = next(o for o in made.over_temperatures(1) if o.num_speculative_tokens == 2)
    assert max(k for *_, k in by_batch(made, short)) == 2


def test_one_draft_length_for_all_temperatures() -> None:
    """The best for both is that of neither alone where one wants long drafts and the other short ones."""
    high, low = result(0, {"overall": 0.9}), result(1, {"overall": 0.05})
    assert plan(high).over_temperatures(1)[0].num_speculative_tokens == 4
    assert plan(low).over_temperatures(1)[0].num_speculative_tokens == 1
    both = plan(high, low)
    best = both.over_temperatures(1)[0]
    products = []
    for k in KS:
        option = next(o for o in both.over_temperatures(1) if o.num_speculative_tokens == k)
        first, second = both.speedups(option, 1)
        products.append(first * second)
    assert best.num_speculative_tokens == KS[products.index(max(products))]


def test_answers_must_be_long_enough_to_pay_for_the_prompt() -> None:
    """Reading the prompt takes 30 ms and every token after the first saves 10.5 - 10.5 / speedup."""
    made = plan(result(0, GOOD))
    best = made.over_temperatures(1)[0]
    tokens = break_even_tokens(made, best)
    assert tokens is not None
    saved = 10.5 - 10.5 / best.speedup
    assert (tokens - 1) * saved > 30 > (tokens - 2) * saved
    slow = plan(result(0, {"overall": 0.0}))
    assert break_even_tokens(slow, slow.over_temperatures(1)[0]) is None


@pytest.mark.parametrize(("temperature", "answers"), [(0, 1), (1, 3)])
def test_a_prompt_is_read_once_for_each_of_its_answers(temperature: float, answers: int) -> None:
    """20 prompts whose answers have 100 tokens after the first, and so 100 / tau rounds: reading takes a share of 30 ms in each. Of
    three greedy repeats acceptance is counted on one, as they are all alike."""
    one = result(temperature, GOOD)
    overall = replace(one.drafters["eagle3"].overall, tokens=20 * 100 * answers)
    drafters = {"eagle3": replace(one.drafters["eagle3"], overall=overall)}
    made = plan(replace(one, drafters=drafters, settings=replace(one.settings, repeats=3)))
    option = made.over_temperatures(1)[0]
    round_ms = option.cost.total + 30 * option.tau / 100
    assert made.predict(made.results[0], option, option.tau) == pytest.approx(option.tau * 10.5 / round_ms)


def test_what_was_not_simulated_is_planned_with_what_was_decoded() -> None:
    one = result(0, GOOD)
    decoded = replace(one, drafters={"eagle3": DrafterResult(Measures(5, tau=2.5), {}, one.drafters["eagle3"].draft)})
    options = Plan((decoded,), table()).over_temperatures(1)
    assert [(o.num_speculative_tokens, o.tau) for o in options] == [(4, 2.5)]
    nothing = replace(one, drafters={"eagle3": DrafterResult(Measures(5), {}, None)})
    assert Plan((nothing,), table()).over_temperatures(1) == []
    assert Plan((one,), table(name="medusa")).over_temperatures(1) == [], "costs of other drafters"


def test_trees_are_charged_for_all_their_nodes() -> None:
    one = result(0, GOOD)
    wide = replace(table(), nodes={"eagle3": {"1": 4, "2": 8, "3": 99, "4": 99}})
    options = {o.num_speculative_tokens: o for o in Plan((one,), wide).over_temperatures(4)}
    assert options.keys() == {1, 2}, "a pass over 99 tokens was not timed"
    assert options[2].cost.verify == pytest.approx(10 * 8 * 4 / 16)


def test_results_of_two_targets_make_no_plan() -> None:
    one, other = result(0, GOOD), result(1, GOOD)
    check_one_evaluation([one, other])
    with pytest.raises(UserError, match="of the same temperature"):
        check_one_evaluation([one, one])
    with pytest.raises(UserError, match="several targets"):
        check_one_evaluation([one, replace(other, target=replace(other.target, fingerprint="f2"))])


RUN = {"name": "mine", "output_dir": "runs/mine", "train": {}}


@pytest.mark.parametrize(
    ("settings", "recipe", "said"),
    [
        ({"prompts": "p2"}, RUN, "their prompts are p1 and p2"),
        ({"batch": 8}, RUN, "their batches are 1 and 8"),
        ({"top_k": 20}, RUN, "their top-k is off and 20"),
        ({"top_p": 0.5}, RUN, r"their top-p is 0\.9 and 0\.5"),
        ({"min_p": 0.1}, RUN, r"their min-p is off and 0\.1"),
        ({"repetition_penalty": 1.2}, RUN, r"their repetition penalty is off and 1\.2"),
        ({}, RUN | {"output_dir": "runs/other"}, "their runs are runs/mine and runs/other"),
        ({}, {"name": "other", "output_dir": None}, "their runs are runs/mine and runs/other"),
        ({}, {"name": "mine", "output_dir": None}, None),
        ({}, RUN | {"output_dir": "runs/../runs/mine/", "train": {"epochs": 2}}, None),
        ({"prompts": None}, None, None),
    ],
)
def test_results_of_two_evaluations_make_no_plan(
    settings: dict[str, Any], recipe: dict[str, Any] | None, said: str | None
) -> None:
    """Earlier results do not name their prompts. At temperature 0 nothing is filtered but by a repetition penalty."""
    greedy, warm, warmer = (result(temperature, GOOD) for temperature in (0, 0.7, 1))
    greedy, warm = (replace(one, recipe=RUN, settings=replace(one.settings, prompts="p1")) for one in (greedy, warm))
    warm = replace(warm, settings=replace(warm.settings, top_p=0.9))
    other = {"prompts": "p1", "top_p": 0.9} | settings
    warmer = replace(warmer, recipe=recipe, settings=replace(warmer.settings, **other))
    check_one_evaluation([greedy, warm])
    if said is None:
        assert make_decision([greedy, warm, warmer], table(), "costs.json") is not None
        return
    with pytest.raises(UserError, match=f"of several evaluations, as {said}: plan for one evaluation at a time"):
        make_decision([greedy, warm, warmer], table(), "costs.json")
    if "runs" in said:  # in the folder of one evaluation, which was moved before it was whole
        check_one_evaluation([greedy, warm, warmer], one_run=True)


def test_a_simulation_is_planned_at_the_smallest_batch() -> None:
    """Its batch says how many answers were made together."""
    simulated = busier(result(0, GOOD), 16)
    assert plan(simulated).batch == 1
    timed = replace(simulated, costs=Costs({"1": 1.0}, {}))
    assert plan(timed).batch == 16


def test_contexts_that_did_not_fit_are_no_headline() -> None:
    full = table(batches=(1,))
    some = replace(full, points=tuple(point for point in full.points if point.context < 128))
    made = plan(result(0, GOOD), costs=some)
    assert made.context == 64
    assert made.cell(made.results[0]) is not None


@pytest.mark.parametrize(("verify", "speedup"), [(1.0, 2.08), (3.28, 0.83)])
def test_one_acceptance_pays_or_not_by_what_a_verify_pass_costs(verify: float, speedup: float) -> None:
    """alpha 0.769, K 4, a drafted token costs 0.130 of a target step."""
    cost = RoundCost(alone=1.0, verify=verify, draft=4 * 0.130)
    assert cost.speedup(sum(0.769**i for i in range(5))) == pytest.approx(speedup, abs=0.005)


def test_at_the_limits_a_round_is_as_fast_as_was_asked() -> None:
    """Each limit, put in place of what it limits, gives the speedup that it was computed for."""
    cost = RoundCost(alone=3.0, verify=4.0, draft=1.5, overhead=0.25)
    assert cost.speedup(cost.tau_needed) == pytest.approx(1)
    for speedup in (1.0, 1.4):
        assert replace(cost, draft=1.5 + cost.slack(2.6, speedup)).speedup(2.6) == pytest.approx(speedup)
    assert cost.slack(1.0, 1.0) < -1.5


BUSH = StaticTree.of("bush", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SYSTEMS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{name: (name, options, {}) for name, options in OPTIONS.items()},
    "eagle3 tree": ("eagle3", OPTIONS["eagle3"], {"tree": BUSH}),
    "eagle3 dynamic tree": ("eagle3", OPTIONS["eagle3"], {"tree": DynamicTree(10, 3, 2)}),
    "hydra without a prefix layer": ("hydra", HydraOptions(num_heads=3), {}),
    "medusa tree": ("medusa", OPTIONS["medusa"], {"tree": BUSH}),
}
BASELINES = {
    "draft model": BaselineSpec("draft_model", path="small"),
    "prompt lookup": BaselineSpec("prompt_lookup"),
    "lookahead": BaselineSpec("lookahead", W=4, N=3, G=2),
    "suffix decoding": BaselineSpec("suffix"),
}
PROMPTS, ANSWER = (5, 9, 7), 12
LONGEST = max(PROMPTS) + ANSWER


def make_system(target: Target, name: str) -> SystemUnderTest:
    if name in BASELINES:
        supplies = Supplies(4, 4, target.vocab_size, lambda path: make_target(num_hidden_layers=2), lambda path: [])
        spec = BASELINES[name]
        return baselines.BASELINES[spec.kind](spec, supplies)
    method, options, how = SYSTEMS[name]
    head = methods()[method].build(options, target, None).deployed(target).to(target.dtype)
    verifier = head.verifier(target)
    return head_system(name, head, 3, 3, verifier=None if verifier is target else verifier, **how)


def described(target: Target) -> TargetInfo:
    return TargetInfo("t", weight_bytes=target.weight_bytes, cache_bytes=entry_bytes(layer_shapes(target)))


def own_weights(modules: Any, besides: Target) -> int:
    """Bytes of the weights of a module that are no weights of a target."""
    shared = {p.untyped_storage().data_ptr() for p in besides.model.parameters()}
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in modules.parameters()}
    return sum(size for at, size in found.items() if at not in shared)


def cached(cache: KVCache | None) -> int:
    return 0 if cache is None else sum(buffer.nbytes for buffer in cache.buffers.values())


def loop_of(target: Target, system: SystemUnderTest) -> Loop:
    """A batch after a round; the answers are as long as asked for."""
    requests = [Request(f"{n}", "chat", tuple(range(3, 3 + n)), ANSWER, ignore_eos=True) for n in PROMPTS]
    made = system.make(system.num_speculative_tokens)
    loop = Loop(system.verified_by(target), made, requests, Sampling(), system.typical, len(PROMPTS))
    loop.round()
    return loop


@pytest.mark.parametrize("name", [*SYSTEMS, *BASELINES])
def test_every_drafters_memory_is_that_of_its_tensors(name: str) -> None:
    target = make_target()
    system = make_system(target, name)
    found = memory_at(described(target), system.info, len(PROMPTS), LONGEST)
    assert found is not None
    loop = loop_of(target, system)
    assert found.target_cache + found.draft_entries == cached(loop.cache)
    assert found.draft_cache == cached(getattr(loop.drafter, "cache", None))
    weights = loop.drafter.model.model if isinstance(loop.drafter, DraftModel) else system.head
    assert found.drafter == (0 if weights is None else own_weights(weights, target))
    assert found.drafted == found.alone + found.draft_entries + found.drafter + found.draft_cache


@pytest.mark.parametrize("kind", ["llama", "deepseek", "gemma3", "gemma3n"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_targets_memory_is_that_of_its_tensors(kind: str, dtype: torch.dtype) -> None:
    target = make_target(kind, dtype)
    found = memory_at(described(target), DraftInfo("none", 0, 0, weight_bytes=0, cache_bytes=0, cache_slots=0), 3, 20)
    assert found is not None
    assert found.alone == own_weights(target.model, make_target()) + cached(KVCache.for_target(target, 3, 21))
    assert found.drafted == found.alone


@pytest.mark.parametrize("missing", ["weight_bytes", "cache_bytes", "cache_slots"])
def test_what_was_not_recorded_is_not_guessed(missing: str) -> None:
    target = TargetInfo("t", weight_bytes=100, cache_bytes=10)
    draft = DraftInfo("eagle3", 3, 3, weight_bytes=20, cache_bytes=4, cache_slots=5)
    assert memory_at(target, draft, 2, 7) == Memory(100, 160, 60, 20, 96)
    assert memory_at(target, replace(draft, **{missing: None}), 2, 7) is None
    assert memory_at(target, None, 2, 7) is None
    if missing != "cache_slots":
        assert memory_at(replace(target, **{missing: None}), draft, 2, 7) is None
