"""costs.json: there and back, what lies between two sizes, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import (
    CostPoint,
    CostTable,
    Drafting,
    check_fits,
    read_cost_table,
    write_cost_table,
)
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.decision import make_decision
from draftsmith.eval.results.result import TargetInfo
from tests.eval.planner.plans import result, served_table, table

SAMPLED = Drafting({"eagle3": {"1": 2.0, "4": 9.0}}, {"": 1.5, "eagle3": 2.0})


def with_sampled() -> CostTable:
    """A table of temperature 0 and of one above it."""
    made = table()
    return replace(made, points=tuple(replace(p, sampled=SAMPLED) for p in made.points), temperatures=(0.0, 0.7))


@pytest.mark.parametrize("made", [table(), with_sampled(), served_table({3: 14.0})], ids=["here", "both", "servers"])
def test_there_and_back(made: CostTable, tmp_path: Path) -> None:
    write_cost_table(tmp_path / "costs.json", made)
    assert read_cost_table(tmp_path / "costs.json") == made


def at_context(made: CostTable, context: int, **changes: Any) -> CostTable:
    """A table with other costs at batch 1 and one context."""
    points = tuple(replace(p, **changes) if (p.batch, p.context) == (1, context) else p for p in made.points)
    return replace(made, points=points)


def served_at(context: int, ms: float) -> CostTable:
    one = served_table({4: 15.0}, batches=(1,))
    slow = replace(one.points[0], context=context, round_ms={"": {"0": 10.0}, "eagle3": {"4": ms}})
    return replace(one, points=(*one.points, slow))


def test_above_temperature_0_drafts_and_the_rest_cost_what_they_do_there() -> None:
    point, greedy = with_sampled().points[0], table().points[0]
    assert point.at(0.0) == point
    warm = point.at(1.0)
    assert (warm.verify_ms, warm.admit_ms) == (greedy.verify_ms, greedy.admit_ms)
    assert (warm.draft_ms, warm.overhead_ms) == (SAMPLED.draft_ms, SAMPLED.overhead_ms)
    assert warm.alone_ms == greedy.alone_ms - greedy.overhead_ms[""] + 1.5
    assert greedy.at(1.0) == greedy, "where one temperature was timed it stands for all"
    assert point.total_ms == greedy.total_ms + warm.total_ms


SLOW = {str(n): 14.0 for n in range(1, 9)}


@pytest.mark.parametrize(
    ("made", "contradicted"),
    [
        (table(), []),
        (at_context(table(), 64, overhead_ms={"": 11.0, "eagle3": 63.0}), [(1, 64)]),
        (at_context(table(), 128, overhead_ms={"": 0.5, "eagle3": 63.0}), [(1, 128)]),
        (at_context(table(), 256, overhead_ms={"": 0.5, "eagle3": 63.0}), [(1, 256)]),
        (at_context(table(), 256, overhead_ms={"": 0.5, "eagle3": 3.0}), []),
        (at_context(table(), 64, verify_ms=SLOW), [(1, 64)]),
        (at_context(table(), 128, verify_ms=SLOW), [(1, 128)]),
        (at_context(table(), 256, verify_ms=SLOW), []),
        (at_context(table(), 256, verify_ms=SLOW, overhead_ms={"": 0.5, "eagle3": 5.0}), []),
        (at_context(table(), 64, draft_ms={"eagle3": {str(k): 6.0 * k for k in range(1, 5)}}), [(1, 64)]),
        (served_at(64, 20.0), [(1, 64)]),
        (served_at(64, 18.0), []),
        (served_at(256, 40.0), []),
    ],
)
def test_costs_of_two_contexts_that_cannot_both_be_right(made: CostTable, contradicted: list[tuple[int, int]]) -> None:
    """The dearer one was held up: more tokens take no less, and what a round spends besides does not grow on its own."""
    assert [*made.contradictions] == contradicted


def test_what_contradicts_is_measured_again_and_the_cheaper_one_kept() -> None:
    made = at_context(table(), 64, verify_ms=SLOW)
    right = next(point for point in table().points if (point.batch, point.context) == (1, 64))
    asked = []

    def measure(batch: int, context: int) -> CostPoint:
        asked.append((batch, context))
        return right

    assert made.settled(measure, [(1, 128)]) == made
    assert made.settled(measure, [(1, 64), (1, 128)]) == table()
    assert asked == [(1, 64)]
    dearer = replace(right, verify_ms=dict.fromkeys(SLOW, 99.0))
    assert made.settled(lambda *_: dearer, [(1, 64)]) == made
    table().settled(lambda *_: pytest.fail("nothing contradicts"), [(1, 64)])


def test_between_two_sizes_costs_are_straight_lines() -> None:
    point = replace(table().points[0], verify_ms={"1": 4.0, "3": 5.0, "9": 11.0})
    assert [point.verify(n) for n in (1, 2, 3, 6, 9)] == [4.0, 4.5, 5.0, 8.0, 11.0]
    assert point.alone_ms == 4.5


OF_A_MACHINE: list[Any] = [
    (lambda v: v.update(schema_version=3), "'schema_version' is 3 but this draftsmith reads 4 alone"),
    (lambda v: v.update(points=[]), "'points' is empty"),
    (lambda v: v.pop("dtype"), "'dtype' is missing"),
    (lambda v: v["points"][0].update(batch=0), "batch 0 and context 64"),
    (lambda v: v["points"][1]["verify_ms"].update({"2": -1.0}), r"verify_ms of 2 takes -1 ms, which is no time"),
    (lambda v: v["points"][1]["verify_ms"].update({"two": 1.0}), "verify_ms by 'two'"),
    (lambda v: v["points"][1]["verify_ms"].clear(), "has no verify_ms"),
    (lambda v: v["points"][1]["verify_ms"].pop("1"), "lacks the costs of the target alone"),
    (lambda v: v["points"][0]["draft_ms"]["eagle3"].clear(), r"has no draft_ms\.eagle3"),
    (lambda v: v["points"][0]["admit_ms"].clear(), "lacks admit_ms of eagle3"),
    (lambda v: v["points"][0]["overhead_ms"].update(eagle3=-2), "overhead_ms of 'eagle3' is -2 ms, below zero"),
    (lambda v: v.update(bandwidth=0), "'bandwidth' is 0"),
    (lambda v: v["points"][0]["verify_ms"].update({"2": "fast"}), r"verify_ms\.2"),
    (lambda v: v.update(hardware=None), "is of a machine or of 'servers', one of the two"),
    (lambda v: v["points"][0].update(round_ms={"": {"0": 3.0}}), r"'points\[0\]' must have no round_ms"),
]
OF_SERVERS: list[Any] = [
    (lambda v: v["points"][1].update(verify_ms={"1": 3.0}), r"'points\[1\]' must have round_ms alone"),
    (lambda v: v["points"][0]["round_ms"].clear(), "must have round_ms alone"),
    (lambda v: v["points"][0]["round_ms"].pop(""), "lacks the costs of the target alone"),
    (lambda v: v["points"][0]["round_ms"]["eagle3"].update({"0": 1.0}), r"round_ms\.eagle3 by '0'"),
    (lambda v: v["points"][0]["round_ms"]["eagle3"].clear(), r"has no round_ms\.eagle3"),
    (lambda v: v["points"][0]["round_ms"][""].update({"0": 0}), "round_ms of 0 takes 0 ms, which is no time"),
    (lambda v: v["points"][0]["admit_ms"].clear(), "lacks admit_ms of eagle3"),
    (lambda v: v["servers"].clear(), "is of a machine or of 'servers'"),
]


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [
        *((table(), *row) for row in OF_A_MACHINE),
        (
            with_sampled(),
            lambda v: v["points"][0]["sampled"]["draft_ms"]["eagle3"].update({"4": 0}),
            "of 4 takes 0 ms, which is no time",
        ),
        *((served_table({3: 14.0}), *row) for row in OF_SERVERS),
    ],
)
def test_what_nothing_costs_is_one_sentence(made: CostTable, change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_cost_table(path, made)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=message) as caught:
        read_cost_table(path)
    assert str(path) in str(caught.value)


EAGLE3 = DraftInfo("eagle3", 4, 4, parameters=1000, vocabulary=2048)


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (EAGLE3, None),
        (replace(EAGLE3, num_speculative_tokens=2, nodes=2), None),
        (replace(EAGLE3, parameters=None, vocabulary=None), None),
        (None, None),
        (replace(EAGLE3, vocabulary=6144), "2048 tokens to draft among and not 6144"),
        (replace(EAGLE3, vocabulary=0), "2048 tokens to draft among and not all"),
        (replace(EAGLE3, parameters=3000), "1000 parameters and not 3000"),
        (replace(EAGLE3, method="peagle", parameters=9), "the method eagle3 and not peagle, 1000 parameters and not 9"),
        (replace(EAGLE3, weights="int8"), "weights unrounded and not int8"),
        (replace(EAGLE3, tree="wide", nodes=20), "a chain and not the tree wide"),
        (replace(EAGLE3, engine_tokens=8, trained_length=4096, weight_bytes=9), None),
    ],
)
def test_costs_of_another_drafter_of_the_same_name_are_refused(draft: DraftInfo | None, said: str | None) -> None:
    refuses_another(EAGLE3, draft, said)


WIDE = replace(EAGLE3, tree="wide", nodes=20)


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (WIDE, None),
        (replace(WIDE, nodes=0), None),
        (replace(WIDE, nodes=12), "20 drafted tokens and not 12"),
        (replace(WIDE, num_speculative_tokens=3, nodes=20), "4 levels and not 3"),
        (replace(WIDE, tree="deep"), "the tree wide and not the tree deep"),
        (EAGLE3, "the tree wide and not a chain"),
    ],
)
def test_costs_of_another_tree_of_the_same_name_are_refused(draft: DraftInfo, said: str | None) -> None:
    """A chain can be cut, so that costs of another length are of the same drafter; a tree is drafted whole."""
    refuses_another(WIDE, draft, said)


def refuses_another(own: DraftInfo, draft: DraftInfo | None, said: str | None) -> None:
    """Plan a result of `draft` with the costs of `own`."""
    timed = replace(table(), drafts={"eagle3": own})
    found = result(0, {"overall": 0.8})
    results = [replace(found, drafters={"eagle3": replace(found.drafters["eagle3"], draft=draft)})]
    if said is None:
        assert make_decision(results, timed, "h.json") is not None
        return
    with pytest.raises(
        UserError, match=f"h.json holds the costs of another eagle3 than the result's: it has {said}. Measure"
    ):
        make_decision(results, timed, "h.json")


def test_costs_of_another_target_dtype_or_drafter_are_refused() -> None:
    one = result(0, {"overall": 0.8})
    half = replace(one, settings=replace(one.settings, dtype="bfloat16"))
    check_fits(table(), "h.json", one)
    check_fits(served_table({3: 14.0}), "h.json", half)  # no server says its dtype
    for other, said in (
        (replace(one, target=TargetInfo("other", "f2")), r"h\.json holds the costs of another target"),
        (half, "costs in float32, but the result was measured in bfloat16"),
        (result(0, {"overall": 0.8}, name="medusa"), "costs of eagle3, but the result is of medusa"),
    ):
        with pytest.raises(UserError, match=said):
            check_fits(table(), "h.json", other)


def timed_at(*temperatures: float) -> CostTable:
    return replace(with_sampled() if len(temperatures) > 1 else table(), temperatures=temperatures)


@pytest.mark.parametrize(
    ("timed", "temperature", "said"),
    [
        (
            (0.0,),
            0.7,
            r"at temperature 0 alone, but the result is of temperature 0\.7, .*temperatures '\[0\.0, 0\.7\]'",
        ),
        ((0.7,), 0, r"at temperature 0\.7 alone, but the result is of temperature 0, .*temperatures '\[0, 0\.7\]'"),
        ((0.0,), 0, None),
        ((0.7,), 1.0, None),
        ((0.0, 0.7), 1.0, None),
        ((0.0, 0.7), 0, None),
        ((), 0.7, None),
    ],
)
def test_costs_of_temperature_0_plan_nothing_above_it(
    timed: tuple[float, ...], temperature: float, said: str | None
) -> None:
    """Nor those above it for 0: a draft and the verdict cost more where tokens are drawn. Earlier tables do not say."""
    results = [result(temperature, {"overall": 0.8})]
    if said is None:
        assert make_decision(results, timed_at(*timed), "h.json") is not None
        return
    with pytest.raises(UserError, match=f"h.json was timed {said}"):
        make_decision(results, timed_at(*timed), "h.json")
