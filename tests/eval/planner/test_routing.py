"""Rules applied to requests, and what is refused."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.planner.plan import by_batch
from draftsmith.eval.planner.routing import Rules, describe_rules, make_rules, read_rules, route
from draftsmith.storage import write_json
from tests.eval.planner.plans import plan, result

RULES = Rules("eagle3", 5, ((1, 4, 5), (5, 16, 3), (17, 64, 0)), 0.7, 6, {"chat": 5, "code": 4, "rag": 0})


@pytest.mark.parametrize(
    ("request_of", "k", "why"),
    [
        ({"temperature": 0}, 5, "batch 1"),
        ({"temperature": 0.7, "batch": 4, "max_tokens": 6}, 5, "batch 4"),
        ({"temperature": 0.7, "batch": 5}, 3, "batch 5"),
        ({"temperature": 0.71}, 0, "temperature 0.71"),
        ({"temperature": 0, "max_tokens": 5}, 0, "at most 5 tokens"),
        ({"temperature": 0, "batch": 17}, 0, "batch 17"),
        ({"temperature": 0, "batch": 65}, 0, "batch 65"),
        ({"temperature": 0, "slice_name": "rag"}, 0, "slice rag"),
        ({"temperature": 0, "slice_name": "code"}, 4, "slice code"),
        ({"temperature": 0, "slice_name": "code", "batch": 8}, 3, "batch 8"),
        ({"temperature": 0, "slice_name": "chat"}, 5, "batch 1"),
    ],
)
def test_a_request_goes_where_the_rules_say(request_of: dict, k: int, why: str) -> None:
    found = route(RULES, **request_of)
    assert found.num_speculative_tokens == k
    assert why in found.why


def test_a_slice_nobody_measured_is_one_sentence() -> None:
    with pytest.raises(UserError, match="'poems' was not measured: the rules know chat, code, rag; leave it out"):
        route(RULES, temperature=0, slice_name="poems")


def test_where_nothing_pays_nothing_is_drafted() -> None:
    never = replace(RULES, largest_temperature=None)
    assert route(never, temperature=0).num_speculative_tokens == 0
    assert describe_rules(never) == ["Leave speculation off: the target alone is faster."]


def test_rules_are_those_of_the_plan() -> None:
    made = plan(
        result(0, {"overall": 0.8, "code": 0.9, "rag": 0.02}), result(1, {"overall": 0.02, "code": 0.3, "rag": 0.0})
    )
    first = plan(result(0, {"overall": 0.8, "code": 0.9, "rag": 0.02}))
    rules = make_rules(first, first.over_temperatures(1)[0])
    assert rules.num_speculative_tokens == 4
    assert rules.by_batch == tuple(by_batch(first, first.over_temperatures(1)[0]))
    assert rules.slices == {"code": 4, "rag": 0}
    assert rules.largest_temperature == 0
    assert rules.largest_batch == 4
    long = next(o for o in made.over_temperatures(1) if o.num_speculative_tokens == 4)
    both = make_rules(made, long)
    assert both.largest_temperature == 0, "at temperature 1 nearly nothing is accepted"
    assert both.by_batch == rules.by_batch, "which says nothing against it at temperature 0"
    assert (both.slices, both.smallest_max_tokens) == (rules.slices, rules.smallest_max_tokens)


def test_words_say_what_the_rules_say() -> None:
    text = " ".join(describe_rules(RULES))
    for part in (
        "eagle3",
        "up to 5",
        "up to 0.7",
        "5 at batch 1 to 4",
        "3 at batch 5 to 16",
        "none at batch 17",
        "6 tokens",
    ):
        assert part in text
    assert "Not for rag." in text
    assert "4 for code" in text


def test_rules_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    write_json(path, asdict(RULES))
    assert read_rules(path) == RULES
    path.write_text(path.read_text().replace('"rag": 0', '"rag": -1'))
    with pytest.raises(UserError, match="negative number of drafted tokens"):
        read_rules(path)
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(UserError, match="'schema_version' is 1 but this draftsmith reads 2 alone; evaluate again"):
        read_rules(path)
    path.write_text("[]")
    with pytest.raises(UserError, match=r"routing\.json"):
        read_rules(path)


def test_a_slice_is_judged_by_the_length_that_the_server_drafts_and_by_its_clock() -> None:
    """One drafted token would pay on rag, the four of the server do not; a slower clock counts before costs."""
    one = result(0, {"overall": 0.8, "code": 0.9, "rag": 0.28})
    (drafter,) = one.drafters.values()
    made = plan(one)
    best = made.over_temperatures(1)[0]
    assert max(made.speedups(o, 1, "rag")[0] for o in made.served_with(best, 1, "rag")) > 1.05
    assert make_rules(made, best).slices == {"code": 4, "rag": 0}
    slices = drafter.slices | {"code": replace(drafter.slices["code"], speedup=0.8)}
    timed = plan(replace(one, drafters={"eagle3": replace(drafter, slices=slices)}))
    assert make_rules(timed, best).slices == {"code": 0, "rag": 0}
