"""For which classes of targets engines draft: the lists, what they mean for a layout, and that installed engines say the same."""

import os
import re
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.engines import ENGINES, SERVED
from draftsmith.heads.formats.layout import (
    TARGETS,
    drafts_for,
    engines_notice,
    layouts,
    target_obstacle,
    version_notice,
)
from scripts.bench.engines.targets import main
from tests.exports import PLAIN, make_target

CACHE = Path(os.environ.get("DRAFTSMITH_ENGINES", Path.home() / ".cache" / "draftsmith" / "engines"))


@pytest.mark.parametrize("engine", TARGETS)
def test_a_list_is_of_the_version_that_the_record_names(engine):
    assert TARGETS[engine]["version"] == ENGINES[engine].version, "ask again: python -m scripts.bench.engines.targets"
    for need in TARGETS[engine].keys() - {"version", "asked"}:
        found = TARGETS[engine][need]
        assert found["yes"]
        assert not set(found["yes"]) & set(found["no"])


@pytest.mark.parametrize(
    ("engine", "needs", "kind", "expected"),
    [
        ("vllm", "states", "LlamaForCausalLM", True),
        ("vllm", "states", "Qwen3MoeForCausalLM", True),
        ("vllm", "states", "MixtralForCausalLM", False),
        ("vllm", "states", "Gemma3ForCausalLM", False),
        ("vllm", "states", "NobodysForCausalLM", None),
        ("vllm", "", "MixtralForCausalLM", True),
        ("vllm", "mtp", "Glm4MoeForCausalLM", True),
        ("vllm", "mtp", "LlamaForCausalLM", False),
        ("sglang", "states", "Gemma3ForCausalLM", True),
        ("sglang", "states", "Phi3ForCausalLM", True),  # which inherits a Llama's
        ("sglang", "states", "MixtralForCausalLM", False),
        ("sglang", "states", "Qwen2MoeForCausalLM", False),  # which keeps its embeddings to itself
        ("sglang", "ends", "Exaone4ForCausalLM", True),
        ("llama_cpp", "states", "GptOssForCausalLM", True),  # llama.cpp calls it otherwise in two places
        ("llama_cpp", "states", "MixtralForCausalLM", True),  # which it converts to a Llama
        ("llama_cpp", "states", "Qwen2ForCausalLM", False),
        ("llama_cpp", "states", "NobodysForCausalLM", False),
        ("tensorrt_llm", "states", "Qwen2ForCausalLM", False),
        ("tensorrt_llm", "states", "Olmo2ForCausalLM", None),
        ("tgi", "states", "LlamaForCausalLM", None),
    ],
)
def test_an_engine_drafts_for_a_class_or_not_or_nobody_knows(engine, needs, kind, expected):
    assert drafts_for(engine, needs, [kind]) is expected
    assert drafts_for(engine, needs, None) is (None if needs else True)


@pytest.mark.parametrize(
    ("layout", "version", "expected"),
    [
        ("medusa_vllm", "vllm=0.32.1", None),
        ("medusa_vllm", "vllm=0.33.0", "vLLM 0.33.0 does not load the layout medusa_vllm, which vLLM reads up to 0.32"),
        ("medusa_vllm", "vllm=v1.0", "reads up to 0.32"),
        ("dflash2", "vllm=0.9.2", "reads from 0.28 on"),
        ("dflash2", "vllm=0.28", None),
        ("eagle3", "sglang=0.5.23", None),
    ],
)
def test_a_version_that_does_not_load_a_layout_is_warned_of(layout, version, expected):
    notice = version_notice(layouts()[layout], version)
    assert notice is None if expected is None else expected in notice


def test_a_version_that_failed_with_a_layout_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"0.9.0": {"eagle3": True}, "1.0.0": {"eagle3": False, "eagle1": True}}
    monkeypatch.setitem(SERVED, "vllm", versions)
    notice = version_notice(layouts()["eagle3"], "vllm=1.0.0")
    assert notice is not None
    assert "vLLM 1.0.0 was run with heads of the layout eagle3 and did not serve them" in notice
    assert (
        version_notice(layouts()["eagle3"], "vllm=0.9.0") is version_notice(layouts()["eagle1"], "vllm=1.0.0") is None
    )
    assert layouts()["eagle3"].was_run("vllm")
    del versions["0.9.0"]
    assert not layouts()["eagle3"].was_run("vllm")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.33.0", "name the engine and its version"),
        ("vllm", "name the engine and its version"),
        ("tgi=2.0", "is read by vllm: name that engine, or set export.layout"),
    ],
)
def test_a_version_of_no_engine_is_refused(version, words):
    with pytest.raises(UserError, match=f"export.engine_version is '{version}'.*{words}"):
        version_notice(layouts()["medusa_vllm"], version)


@pytest.mark.parametrize("name", layouts())
def test_drafts_that_read_layers_say_so_of_every_engine(name):
    """What reads layers of the target needs its class to hand them out, in every engine that serves."""
    layout = layouts()[name]
    reads_layers = bool(PLAIN[layout.method](make_target()).reads.layer_ids)
    for engine, served in layout.engines.items():
        assert (served.needs in ("states", "blocks")) == (reads_layers and ENGINES[engine].split is not None), engine


@pytest.mark.parametrize(
    ("layout", "kind", "expected"),
    [
        ("eagle3", "LlamaForCausalLM", None),
        ("eagle3", "NobodysForCausalLM", None),
        (
            "eagle3",
            "Gemma3ForCausalLM",
            "in the layout eagle3 such heads draft for no target of the class Gemma3ForCausalLM in vLLM 0.32.0 and TensorRT-LLM .*: "
            "serve it with SGLang\\.",
        ),
        (
            "eagle3",
            "MixtralForCausalLM",
            r"no engine that reads the layout eagle3 drafts .* class MixtralForCausalLM \(vLLM 0.32.0, SGLang 0.5.23 and TensorRT-LLM "
            r"commit 00679c66c\): export the layout eagle3_llama_cpp for llama.cpp\.",
        ),
        (
            "eagle3_speculators",
            "Gemma3ForCausalLM",
            "no engine that reads the layout eagle3_speculators .*: export the layout eagle3 for SGLang\\.",
        ),
        ("eagle3_llama_cpp", "Qwen2ForCausalLM", "export the layout eagle3 for vLLM or SGLang\\."),
        ("dflash", "MixtralForCausalLM", "no engine .* dflash .*: export the layout dflash_llama_cpp for llama.cpp\\."),
        ("eagle1_sglang", "MixtralForCausalLM", "no engine .*: export the layout eagle1 for vLLM\\."),
        (
            "peagle",
            "Gemma3ForCausalLM",
            "no engine .* peagle .*: train the method draft_model, which vLLM, SGLang, TensorRT-LLM and llama.cpp serve",
        ),
        (
            "eagle3",
            "Cohere2ForCausalLM",
            "no target of the class Cohere2ForCausalLM in .*, and of TensorRT-LLM it is not known: ",
        ),
        ("draft_model", "MixtralForCausalLM", None),
        ("medusa_vllm", "MixtralForCausalLM", None),
    ],
)
def test_a_sentence_before_training_says_which_engines_will_not_draft(layout, kind, expected):
    found = engines_notice(layouts()[layout], "models/my-model", [kind])
    assert found is None if expected is None else re.search(expected, found)


def test_other_obstacles_count_where_no_engine_is_left():
    layout = layouts()["eagle3"]
    blocked = {"vllm": "stops; train again", "sglang": "stops; train again", "tensorrt_llm": "stops; train again"}
    found = engines_notice(layout, "models/my-model", ["LlamaForCausalLM"], blocked)
    assert found.startswith("no engine that reads the layout eagle3 serves this head: vLLM stops; train again; SGLang")
    del blocked["vllm"]
    assert engines_notice(layout, "models/my-model", ["LlamaForCausalLM"], blocked) is None
    assert "reads GGUF files with a plugin alone" in engines_notice(layout, "my.Q4_1.gguf", ["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("kind", "refused", "unknown"),
    [
        ("LlamaForCausalLM", [], []),
        ("Gemma3ForCausalLM", ["vllm", "tensorrt_llm"], []),
        ("Cohere2ForCausalLM", ["vllm", "sglang"], ["tensorrt_llm"]),
    ],
)
def test_the_readme_starts_no_engine_that_will_not_draft(kind, refused, unknown, tmp_path):
    target = make_target()
    target.model.config.architectures = [kind]
    export_head(PLAIN["eagle3"](target), target, tmp_path / "out", layout="eagle3", num_speculative_tokens=3)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for engine in layouts()["eagle3"].engines:
        title = ENGINES[engine].title
        why = target_obstacle(layouts()["eagle3"], engine, "models/tiny", [kind])
        assert (f"Not with this export: {title} {why}." in text) == (engine in refused)
        assert (f"Nobody has asked {title} whether it drafts" in text) == (engine in unknown)
    assert ("vllm serve" in text) == ("vllm" not in refused)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "folders"), [("vllm", "vllm-*"), ("llama-cpp", "llama-cpp-python-*")])
def test_installed_engines_say_what_the_lists_say(engine, folders):
    made = [folder.parent for folder in CACHE.glob(f"{folders}/finished")]
    if not made:
        pytest.skip(f"bash scripts/test_engines.sh makes {engine}")
    assert main([f"--{engine}", str(made[0]), "--check"]) == 0
