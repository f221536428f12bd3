"""What starts engines after a plan, and a tree in it: beside the chains at every batch, named by the verdict and the rules."""

import json
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.decision import (
    Decision,
    Export,
    decision_json,
    engine_settings,
    make_decision,
    write_settings,
)
from draftsmith.eval.planner.routing import describe_rules, read_rules, route
from draftsmith.eval.planner.verdict import Action
from draftsmith.eval.report.report import render_markdown
from draftsmith.eval.results.result import DrafterResult, Measures, Result
from draftsmith.heads.formats.engines import ENGINES, Again, one_gpu
from draftsmith.heads.formats.layout import layouts
from draftsmith.storage import write_json
from tests.eval.planner.plans import measures, result, table


def decision(target: str = "models/my-model", method: str = "draft_model", **export: Any) -> Any:
    draft = DraftInfo(method, 3, 3, layer_ids=(2, 4, 6), num_heads=3)
    rules = SimpleNamespace(largest_batch=4, drafter=method, num_speculative_tokens=3, by_batch=())
    settings = SimpleNamespace(dtype="float16")
    drafters, path = {method: SimpleNamespace(draft=draft)}, SimpleNamespace(path=target)
    one = SimpleNamespace(drafters=drafters, target=path, settings=settings, recipe=None)
    made = SimpleNamespace(results=[one])
    place = {"exports": "export", "settings": "", "again": Again()}
    return SimpleNamespace(served=rules, plan=made, export=Export(**export), **place)


def planned(section: dict[str, Any], export: Export | None = None) -> Decision:
    results = [replace(result(0, {"overall": 0.8}), recipe={"export": section})]
    found = make_decision(results, table(), "costs.json", export=export)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("target", "method", "engines"),
    [
        ("models/my-model", "draft_model", {"vllm", "sglang", "tensorrt_llm", "llama_cpp", "transformers"}),
        ("models/my.Q4_1.gguf", "draft_model", {"llama_cpp", "transformers"}),
        ("models/m", "eagle3", {"vllm", "sglang", "tensorrt_llm"}),
        ("m.gguf", "eagle3", {"llama_cpp"}),
        ("models/m", "medusa", {"medusa_original", "tensorrt_llm"}),
        ("m.gguf", "medusa", set()),
    ],
)
def test_only_engines_that_take_the_target_are_started(target: str, method: str, engines: set[str]) -> None:
    found = engine_settings(decision(target, method))
    assert found.keys() == engines
    name = target.rsplit("/", 1)[-1]
    assert all(any(name in snippet.text for snippet in snippets) for snippets in found.values())


@pytest.mark.parametrize("name", layouts())
def test_the_layout_of_the_recipe_decides_which_engines_are_started(name: str) -> None:
    layout = layouts()[name]
    found = engine_settings(decision(method=layout.method, layout=name))
    assert found.keys() == layout.engines.keys()
    for snippets in found.values():
        assert any(f"export/{name}" in snippet.text for snippet in snippets)


def with_draft(made: Any, **changes: Any) -> Any:
    """The same decision with changes of what is drafted."""
    result = made.plan.results[0]
    (name, drafter), *_ = result.drafters.items()
    result.drafters[name] = SimpleNamespace(draft=replace(drafter.draft, **changes))
    return made


@pytest.mark.parametrize("method", ["dflash", "xpress"])
def test_a_head_of_one_length_is_started_with_it_or_not_at_all(method: str) -> None:
    assert engine_settings(with_draft(decision(method=method), engine_tokens=7)) == {}, "a plan of three tokens"
    made = with_draft(decision(method=method), engine_tokens=7)
    made.served.num_speculative_tokens, made.served.by_batch = 7, ((1, 8, 7), (9, 64, 0))
    (snippet,) = engine_settings(made)["vllm"]
    config = json.loads(re.search(r"\{.*\}", snippet.text)[0])
    assert config["num_speculative_tokens"] == 7
    steps = config.get("num_speculative_tokens_per_batch_size")
    assert steps == (None if method == "xpress" else [[1, 8, 7], [9, 64, 0]])


def test_a_head_of_one_length_is_planned_with_it_alone() -> None:
    """Where it was simulated that long; else with what was."""
    for tokens, lengths in ((3, {3}), (None, {1, 2, 3, 4}), (9, {1, 2, 3, 4})):
        one = result(0, {"overall": 0.6})
        (name, drafter), *_ = one.drafters.items()
        assert drafter.draft is not None
        fixed = replace(drafter, draft=replace(drafter.draft, engine_tokens=tokens))
        found = make_decision([replace(one, drafters={**one.drafters, name: fixed})], table(), "costs.json")
        assert found is not None
        assert {
            o.num_speculative_tokens for cell in found.plan.cells() for o in cell.options if o.drafter == name
        } == lengths


@pytest.mark.parametrize("changes", [{"exported": False}, {"weights": "int4"}, {"lossy": True}, {"tuned": True}])
def test_what_an_export_does_not_hold_is_not_started(changes: dict[str, Any]) -> None:
    assert engine_settings(with_draft(decision(), **changes)) == {}


def test_engines_that_do_not_compute_the_head_are_not_started() -> None:
    made = with_draft(decision(method="eagle3"), engines_without=("eagle3/sglang", "eagle3_llama_cpp/llama_cpp"))
    assert engine_settings(made).keys() == {"vllm", "tensorrt_llm"}


@pytest.mark.parametrize(("dtype", "started"), [("bfloat16", True), ("float16", False), ("auto", False)])
def test_weights_that_the_export_has_are_started(dtype: str, started: bool) -> None:
    """The drafter has another name then, also where it is not the first."""
    made = with_draft(decision(dtype=dtype), weights="bfloat16")
    drafters, name = made.plan.results[0].drafters, "draft_model, bfloat16"
    assert bool(engine_settings(made)) is started, "the first, whatever its name"
    plain = DraftInfo("draft_model", 3, 3, layer_ids=(2, 4, 6), num_heads=3)
    drafters[name], drafters["draft_model"] = drafters["draft_model"], SimpleNamespace(draft=plain)
    made.served.drafter = name
    assert bool(engine_settings(made)) is started


def test_a_layout_of_another_method_does_not_apply() -> None:
    assert engine_settings(decision(layout="medusa_tgi")) == engine_settings(decision())


@pytest.mark.parametrize("name", layouts())
def test_engines_are_started_on_as_many_gpus_as_the_recipe_exports_for(name: str) -> None:
    """And those that know one GPU alone are not."""
    flags = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size", "tensorrt_llm": "--tp_size", "tgi": "--num-shard"}
    layout = layouts()[name]
    one, four = (engine_settings(decision(method=layout.method, layout=name, tensor_parallel=n)) for n in (1, 4))
    assert four.keys() == {engine for engine in one if ENGINES[engine].split is not one_gpu}
    for engine, snippets in four.items():
        alone, several = ("".join(snippet.text for snippet in some) for some in (one[engine], snippets))
        if engine in flags:
            assert flags[engine] not in alone
            assert f"{flags[engine]} 4" in several
        else:
            assert several == alone


@pytest.mark.parametrize(
    ("method", "layout", "target"),
    [
        ("eagle3", "eagle3", "target"),
        ("eagle3", "eagle3_llama_cpp", "target"),
        ("eagle3", "eagle3_llama_cpp", "target.gguf"),
        ("medusa", "medusa", "target"),
        ("medusa", "medusa_tgi", "my-org/my-model"),
    ],
)
def test_start_scripts_run_from_any_folder(method: str, layout: str, target: str, tmp_path: Path) -> None:
    """The commands are stubs that write down where they were called with what."""
    programs, run, elsewhere = tmp_path / "bin", tmp_path / "the run", tmp_path / "elsewhere"
    for folder in (programs, run, elsewhere, tmp_path / "target"):
        folder.mkdir()
    for name in ("vllm", "python", "trtllm-serve", "llama-server", "text-generation-launcher", "draftsmith"):
        (programs / name).write_text(f'#!/bin/sh\npwd >>"$LOG"\nprintf "%s\\n" {name} "$@" "" >>"$LOG"\n')
        (programs / name).chmod(0o755)
    path = target if "/" in target else str(tmp_path / target)
    made = decision(path, method, layout=layout)
    made.served.by_batch = ((1, 4, 5), (5, 64, 3))
    again = Again(str(run), ("--recipe", "my recipe.yaml", "--output_dir", "runs/a"))
    vars(made).update(exports=str(run / "export"), settings=str(tmp_path / "settings"), again=again)
    write_settings(tmp_path / "settings", made)
    scripts = list((tmp_path / "settings").glob("*/start.sh"))
    assert {script.parent.name for script in scripts} == layouts()[layout].engines.keys()
    for script in scripts:
        log = script.with_suffix(".log")
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(log)}
        trees = {"LLAMA_CPP": str(tmp_path / "a tree"), "TENSORRT_LLM": str(tmp_path / "a tree")}
        names = [name for name in trees if f"${name}" in script.read_text() or f"${{{name}:" in script.read_text()]
        for named in names:
            alone = subprocess.run(["bash", script], cwd=elsewhere, env=environment, capture_output=True, text=True)
            assert alone.returncode
            assert f"{named}: set it to the folder with its sources" in alone.stderr
            assert not log.exists()
        done = subprocess.run(["bash", script], cwd=elsewhere, env=environment | trees, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        words = log.read_text().split("\n")
        words += [json.loads(word)["model"] for word in words if word.startswith("{")]  # of vLLM
        files = [w for w in words if re.search(r"\.(json|ya?ml|py|gguf)$|export/", w) and not w.startswith("{")]
        assert files
        assert all(Path(word).is_absolute() for word in files if word != "my recipe.yaml")
        assert all(Path(word).is_file() for word in files if word.endswith(("adaptive.json", "trtllm.yaml")))
        if "my recipe.yaml" in words:
            at = words.index("draftsmith")
            typed = ["draftsmith", "export", "--recipe", "my recipe.yaml", "--output_dir", "runs/a"]
            assert words[at - 1 : at + 6] == [str(run), *typed]
            assert words[words.index("--gguf") + 1] == str(tmp_path / "a tree")


def test_a_target_whose_class_gets_no_drafts_starts_no_such_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    assert engine_settings(decision(str(tmp_path), "eagle3")).keys() == {"sglang"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert engine_settings(decision(str(tmp_path), "eagle3")).keys() == {"vllm", "sglang", "tensorrt_llm"}


def test_the_converter_is_told_the_dtype_of_the_export() -> None:
    for export, kind in (({}, "f16"), ({"dtype": "bfloat16"}, "bf16")):
        (snippet,) = engine_settings(decision(**export))["llama_cpp"]
        assert f"--outtype {kind} &&\n" in snippet.text


def test_costs_of_one_device_are_said_where_several_serve() -> None:
    alone, several = planned({}), planned({"tensor_parallel": 4})
    assert several.verdict.reasons[:-1] == alone.verdict.reasons
    assert "costs are of one device, but 4 GPUs are to serve (export.tensor_parallel)" in several.verdict.reasons[-1]
    assert "--tensor-parallel-size 4" in engine_settings(several)["vllm"][0].text
    words = engine_settings(alone)["vllm"][0].text
    assert "parallel" not in words
    assert json.loads(words[words.index("{") : words.rindex("}") + 1])["model"] == "export/eagle3"


def test_the_recipe_at_hand_counts_before_that_of_the_results() -> None:
    found = planned({"layout": "eagle3_llama_cpp"})
    assert engine_settings(found).keys() == {"llama_cpp"}
    assert "vllm" in engine_settings(planned({"layout": "eagle3_llama_cpp"}, Export()))
    with pytest.raises(UserError, match=r"recipe, export: 'tensor_parallel' .*many"):
        planned({"tensor_parallel": "many"})


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
    write_json(path, asdict(rules))
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


@pytest.mark.parametrize(("dtype", "started"), [("auto", "eagle3"), ("bfloat16", "eagle3, bfloat16")])
def test_engines_are_started_with_the_exports_weights_where_others_are_faster(dtype: str, started: str) -> None:
    one, costs = result(0, {"overall": 0.6}), table()
    (drafter,) = one.drafters.values()
    assert drafter.draft is not None
    name = "eagle3, bfloat16"
    drafters = {**one.drafters, name: replace(drafter, draft=replace(drafter.draft, weights="bfloat16"))}
    points = (
        replace(
            point,
            draft_ms={**point.draft_ms, name: {k: ms / 2 for k, ms in point.draft_ms["eagle3"].items()}},
            admit_ms={**point.admit_ms, name: 30.0},
            overhead_ms={**point.overhead_ms, name: 1.0},
        )
        for point in costs.points
    )
    found = make_decision(
        [replace(one, drafters=drafters)],
        replace(costs, points=tuple(points)),
        "costs.json",
        export=Export(dtype=dtype),
    )
    assert found is not None
    assert (found.rules.drafter, found.served.drafter) == (name, started)
    assert engine_settings(found)["vllm"]
    said = "Engines are started with weights in float32, as the export has them: their lines are of eagle3 with "
    assert any(reason.startswith(said) for reason in found.verdict.reasons) is (started == "eagle3")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3, window 64", {"exported": False}),
        ("eagle3, typical (lossy)", {"lossy": True}),
        ("other", {"method": "medusa"}),
    ],
)
def test_engines_are_started_with_the_runs_own_head_where_what_they_lack_is_faster(
    name: str, changes: dict[str, Any]
) -> None:
    one, costs = result(0, {"overall": 0.6}), table()
    (drafter,) = one.drafters.values()
    assert drafter.draft is not None
    best = DrafterResult(measures(0.8), drafter.slices, replace(drafter.draft, **changes))
    points = (
        replace(
            p,
            draft_ms={**p.draft_ms, name: p.draft_ms["eagle3"]},
            admit_ms={**p.admit_ms, name: 30.0},
            overhead_ms={**p.overhead_ms, name: 1.0},
        )
        for p in costs.points
    )
    given = replace(one, drafters={**one.drafters, name: best})
    found = make_decision([given], replace(costs, points=tuple(points)), "costs.json")
    assert found is not None
    assert (found.rules.drafter, found.served.drafter) == (name, "eagle3")
    assert engine_settings(found)["vllm"]
    said = "Engines are started with the head as it is exported: their lines are of eagle3 with "
    assert any(reason.startswith(said) for reason in found.verdict.reasons)


def test_a_speculators_folder_drafts_as_many_tokens_as_its_recipe() -> None:
    made = decision(method="eagle3", layout="eagle3_speculators")
    assert engine_settings(made).keys() == {"vllm", "speculators"}
    for tokens, started in ((3, {"vllm", "speculators"}), (4, {"speculators"})):
        made.plan.results[0].recipe = {"evaluate": {"num_speculative_tokens": tokens}}
        assert engine_settings(made).keys() == started


def test_an_export_has_the_dtype_of_its_target() -> None:
    """Where the recipe says it; costs of another one are named."""
    one = result(0, {"overall": 0.8})
    assert Export().dtype_of(one) == "float32"
    for dtype, expected in (("auto", "float32"), ("bfloat16", "bfloat16")):
        assert Export().dtype_of(replace(one, recipe={"target": {"dtype": dtype}})) == expected
    found = make_decision([replace(one, recipe={"target": {"dtype": "bfloat16"}})], table(), "costs.json")
    assert found is not None
    assert any(
        reason.startswith("Costs are of float32, but the export and its target are bfloat16")
        for reason in found.verdict.reasons
    )


def test_no_engine_is_started_where_the_tree_alone_pays() -> None:
    decision = decide(0.05, 0.95)
    assert decision.verdict.option.drafter == NAME
    assert engine_settings(decision) == {}
    assert "no such chain of this head was found to pay" in decision.verdict.reasons[-1]


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


def test_the_order_of_results_decides_nothing() -> None:
    """What keeps speculation off is told of the lowest temperature."""
    cold, warm = (result(t, {"overall": alpha, "chat": alpha}) for t, alpha in ((0.0, 0.3), (1.0, 0.02)))
    first, second = (make_decision(pair, table(draft_ms=8.0), "costs.json") for pair in ((cold, warm), (warm, cold)))
    assert first is not None
    assert second is not None
    assert first.verdict == second.verdict
    assert not first.verdict.headline.startswith("Deploy")
