"""A tree in the plan: beside the chains at every batch, named by the verdict and the rules, and what engines are started with then."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.decision import Decision, decision_json, make_decision
from draftsmith.eval.planner.routing import describe_rules, read_rules, route, write_rules
from draftsmith.eval.planner.settings import engine_settings
from draftsmith.eval.planner.verdict import Action
from draftsmith.eval.report.report import render_markdown
from draftsmith.eval.results.result import DrafterResult, Measures, Result
from tests.eval.planner.plans import measures, result, table

NAME = "eagle3 bushy"
TOKENS = {"1": 3, "2": 5, "3": 8}


def both(chain: float, tree: float, *, tree_first: bool = False) -> Result:
    """A result of chains and of a tree with three levels, which accept like chains of these alphas."""

    def three(found: Measures) -> Measures:
        return replace(found, k_sweep=(found.k_sweep or ())[:3])

    alphas = {"overall": tree, "code": tree, "rag": 0.02}
    bushy = DrafterResult(
        three(measures(tree)),
        {name: three(measures(alpha)) for name, alpha in alphas.items() if name != "overall"},
        DraftInfo("eagle3", 3, 7, tree="bushy"),
    )
    one = result(0, {"overall": chain, "code": chain, "rag": 0.02})
    drafters = {**one.drafters, NAME: bushy}
    return replace(one, drafters=dict(reversed(drafters.items())) if tree_first else drafters)


def costs(level_ms: float = 1.0) -> CostTable:
    """A level of the tree costs as much as a drafted token of the chain, or another time."""
    one = table()
    points = (
        replace(
            point,
            draft_ms={**point.draft_ms, NAME: {str(k): level_ms * k for k in (1, 2, 3)}},
            admit_ms={**point.admit_ms, NAME: 30.0},
            overhead_ms={**point.overhead_ms, NAME: 1.0},
        )
        for point in one.points
    )
    return replace(one, points=tuple(points), nodes={NAME: TOKENS})


def decide(chain: float, tree: float, level_ms: float = 1.0, *, tree_first: bool = False) -> Decision:
    found = make_decision([both(chain, tree, tree_first=tree_first)], costs(level_ms), "costs.json")
    assert found is not None
    return found


def test_a_tree_is_planned_at_every_batch_beside_the_chains() -> None:
    for cell in decide(0.6, 0.95).plan.cells():
        found = {(o.drafter, o.num_speculative_tokens): o for o in cell.options}
        assert found.keys() == {*(("eagle3", k) for k in (1, 2, 3, 4)), *((NAME, k) for k in (1, 2, 3))}
        for k, tokens in TOKENS.items():
            assert found[NAME, int(k)].cost.verify == pytest.approx(10 * max(1, tokens * cell.batch / 16))


def test_the_verdict_and_the_rules_name_the_tree(tmp_path: Path) -> None:
    decision = decide(0.6, 0.95)
    verdict, rules = decision.verdict, decision.rules
    assert verdict.action == Action.DEPLOY
    assert verdict.headline.startswith(f"Deploy {NAME} with 7 drafted tokens on 3 levels: ")
    assert (rules.drafter, rules.tree, rules.num_speculative_tokens) == (NAME, "bushy", 3)
    # A server drafts the tree whole or not at all, whatever a smaller one would bring at larger batches and on a slice.
    assert {k for *_, k in rules.by_batch} == {3, 0}
    assert rules.slices == {"code": 3, "rag": 0}
    assert describe_rules(rules)[:2] == [
        f"Speculate with {NAME} and up to 3 levels of its tree, at temperatures up to 0.",
        "Levels of its tree by batch: 3 at batch 1 to 4, none at batch 5 to 16.",
    ]
    assert route(rules, temperature=0, batch=2, slice_name="code").num_speculative_tokens == 3
    rows = decision_json(decision)["draft_lengths"]
    assert [row["drafted_tokens"] for row in rows if row["drafter"] == NAME] == [2, 4, 7]
    path = tmp_path / "routing.json"
    write_rules(path, rules)
    assert read_rules(path) == rules


def test_engines_are_started_with_the_fastest_chain_where_a_tree_is_faster() -> None:
    decision = decide(0.6, 0.95)
    chain = next(o for o in decision.plan.over_temperatures(1) if o.drafter == "eagle3")
    k = chain.num_speculative_tokens
    said = f"their lines are of eagle3 with {k} drafted tokens, {chain.speedup:.2f}x at temperature 0 (predicted)."
    assert said in decision.verdict.reasons[-1]
    assert said in render_markdown(decision.plan.results, decision)
    words = engine_settings(decision)["vllm"][0].text
    config = json.loads(words[words.index("{") : words.rindex("}") + 1])
    assert config["num_speculative_tokens"] == k
    assert config.get("num_speculative_tokens_per_batch_size", [[1, 16, k]])[0][2] == k


def test_no_engine_is_started_where_the_tree_alone_pays() -> None:
    decision = decide(0.05, 0.95)
    assert decision.verdict.option.drafter == NAME
    assert engine_settings(decision) == {}
    assert "no chain of this head was found to pay" in decision.verdict.reasons[-1]


def test_a_tree_with_levels_that_do_not_pay_is_cut() -> None:
    decision = decide(0.05, 0.5, level_ms=4.0)
    assert decision.verdict.action == Action.CHANGE_K
    assert decision.verdict.headline.startswith(f"Cut {NAME} to 2 drafted tokens on 1 level and deploy it: ")
    assert "times as fast as with 3." in decision.verdict.headline


@pytest.mark.parametrize("tree_first", [False, True])
def test_a_chain_that_is_faster_than_the_tree_is_deployed_as_ever(tree_first: bool) -> None:
    decision = decide(0.9, 0.3, tree_first=tree_first)
    assert decision.verdict.headline.startswith("Deploy eagle3 with 4 drafted tokens: ")
    assert decision.rules.tree is None
    assert decision.served is decision.rules
    assert "export/eagle3" in engine_settings(decision)["vllm"][0].text
