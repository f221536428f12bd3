"""The plan against sums by hand: every place, the best draft, and what is left out."""

import itertools
from dataclasses import replace

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.planner.plan import PAYS, Plan, break_even_tokens, by_batch, check_one_evaluation
from draftsmith.eval.results.result import Costs, DrafterResult, Measures
from tests.eval.planner.plans import KS, busier, plan, result, served_table, table

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
