"""What starts engines after a plan."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.planner.decision import Decision, Export, make_decision
from draftsmith.eval.planner.settings import engine_settings
from draftsmith.heads.formats.engines import ENGINES, Again
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.splits import one_gpu
from tests.eval.planner.plans import result, table


def decision(target: str = "models/my-model", method: str = "draft_model", **export: Any) -> Any:
    draft = SimpleNamespace(tree=None, lossy=False, tuned=False, method=method, layer_ids=(2, 4, 6), num_heads=3)
    rules = SimpleNamespace(largest_batch=4, drafter=method, num_speculative_tokens=3, by_batch=())
    settings = SimpleNamespace(dtype="float16")
    found = SimpleNamespace(
        drafters={method: SimpleNamespace(draft=draft)}, target=SimpleNamespace(path=target), settings=settings
    )
    place = {"exports": "export", "settings": "", "again": Again()}
    return SimpleNamespace(served=rules, plan=SimpleNamespace(results=[found]), export=Export(**export), **place)


def planned(section: dict[str, Any], export: Export | None = None) -> Decision:
    results = [replace(result(0, {"overall": 0.8}), recipe={"export": section})]
    found = make_decision(results, table(), "costs.json", export=export)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("target", "engines"),
    [
        ("models/my-model", {"vllm", "sglang", "tensorrt_llm", "llama_cpp", "transformers"}),
        ("models/my.Q4_1.gguf", {"llama_cpp", "transformers"}),
    ],
)
def test_only_engines_that_take_the_target_are_started(target: str, engines: set[str]) -> None:
    found = engine_settings(decision(target))
    assert found.keys() == engines
    name = target.rsplit("/", 1)[-1]
    assert all(any(name in snippet.text for snippet in snippets) for snippets in found.values())


@pytest.mark.parametrize(
    ("target", "engines"), [("models/m", {"vllm", "sglang", "tensorrt_llm"}), ("m.gguf", {"llama_cpp"})]
)
def test_a_head_for_a_gguf_file_is_started_in_llama_cpp(target: str, engines: set[str]) -> None:
    assert engine_settings(decision(target, method="eagle3")).keys() == engines
    assert engine_settings(decision(target, method="medusa")).keys() == (
        set() if target == "m.gguf" else {"medusa_original", "tensorrt_llm"}
    )


@pytest.mark.parametrize("name", layouts())
def test_the_layout_of_the_recipe_decides_which_engines_are_started(name: str) -> None:
    layout = layouts()[name]
    found = engine_settings(decision(method=layout.method, layout=name))
    assert found.keys() == layout.engines.keys()
    for snippets in found.values():
        assert any(f"export/{name}" in snippet.text for snippet in snippets)


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


def test_the_converter_is_told_the_dtype_of_the_export() -> None:
    for export, kind in (({}, "f16"), ({"dtype": "bfloat16"}, "bf16")):
        (snippet,) = engine_settings(decision(**export))["llama_cpp"]
        assert f"--outtype {kind}\n" in snippet.text


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
