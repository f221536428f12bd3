"""What starts engines after a plan."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.planner.decision import Decision, Export, make_decision
from draftsmith.eval.planner.settings import engine_settings, write_settings
from draftsmith.heads.formats.engines import ENGINES, Again, one_gpu
from draftsmith.heads.formats.layout import layouts
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


def replace_in(found: Any, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(found), **changes})


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
    write_settings(
        tmp_path / "settings",
        replace_in(made, exports=str(run / "export"), settings=str(tmp_path / "settings"), again=again),
    )
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
            assert words[at - 1 : at + 6] == [
                str(run),
                "draftsmith",
                "export",
                "--recipe",
                "my recipe.yaml",
                "--output_dir",
                "runs/a",
            ]
            assert words[words.index("--gguf") + 1] == str(tmp_path / "a tree")


def test_a_target_whose_class_gets_no_drafts_starts_no_such_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    assert engine_settings(decision(str(tmp_path), "eagle3")).keys() == {"sglang"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert engine_settings(decision(str(tmp_path), "eagle3")).keys() == {"vllm", "sglang", "tensorrt_llm"}


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
