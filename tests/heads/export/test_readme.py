"""README.md of an export: its lines parse, hold the real paths and numbers, and leave out what cannot serve the head."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from draftsmith.errors import UserError
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.engines import ENGINES, Serving, one_gpu
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.llama_cpp import start_llama_cpp
from draftsmith.heads.record import RECORD
from tests.exports import PLAIN, make_eagle3, make_medusa, make_target

# What the lines of engines must say for a layout.
VLLM_METHODS = {
    "dflash": "dflash",
    "draft_model": "draft_model",
    "dspark": "dspark",
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "medusa_vllm": "medusa",
    "peagle": "eagle3",
    "xpress": "dflash",
}
BLOCKS = ("dflash2", "domino")
SGLANG_ALGORITHMS = {
    **dict.fromkeys(BLOCKS, "DFLASH"),
    "draft_model": "STANDALONE",
    "eagle1_sglang": "EAGLE",
    "eagle3": "EAGLE3",
}
TENSORRT_LLM_KEYS = {
    "draft_model": {"decoding_type": "DraftTarget"},
    "eagle3": {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 2, 4]},
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of every command in the shell blocks."""
    joined = [block.replace("\\\n", " ").replace(" &&\n", "\n") for block in blocks(text, "bash")]
    return [shlex.split(line) for block in joined for line in block.splitlines() if line]


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def write(folder: Path, layout: str, name: str = "my target", **options) -> str:
    """Export a plain head and return its README. The target is a folder with a space in its name."""
    target = make_target()
    target.path = str(folder.parent / name)
    Path(target.path).mkdir(parents=True, exist_ok=True)
    if layout == "mtp":  # which engines look for in some classes
        target.model.config.architectures = ["Glm4MoeForCausalLM"]
    keywords = {"num_speculative_tokens": 5, "dtype": "bfloat16"} | options
    # The original code makes five Medusa heads, whatever is in the file.
    plain = make_medusa(target, num_heads=5) if layout == "medusa" else PLAIN[layouts()[layout].method](target)
    export_head(plain, target, folder, layout=layout, **keywords)
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", layouts())
def test_every_export_says_how_each_engine_is_started(layout, tmp_path):
    place, target = tmp_path / "an export's", str(tmp_path / "my target")
    splits = {ENGINES[engine].split for engine in layouts()[layout].engines}
    text = write(place, layout, tensor_parallel=1 if one_gpu in splits else 2)
    assert not text.startswith("---"), "converters would read it as metadata"
    found = commands(text)
    for engine in layouts()[layout].engines:
        assert f"### {ENGINES[engine].title}\n" in text
        assert all(f"- {line}\n" in text for line in layouts()[layout].engines[engine].caveats)
        assert f"- {ENGINES[engine].title}: {ENGINES[engine].counters}." in text
    assert any(str(place) in word for words in found for word in words)
    assert {word for words in found for word in words if "my target" in word} <= {target}
    options = {word for words in found for word in words}
    assert ("--speculative-config" in options) >= (layout in VLLM_METHODS)
    assert ("--speculative-algorithm" in options) >= (layout in SGLANG_ALGORITHMS)
    for words in found:
        if "--speculative-config" in words and layout in VLLM_METHODS:
            tokens = 3 if layout in ("medusa_vllm", "dflash", "dspark", "xpress") else 5
            config = json.loads(after(words, "--speculative-config"))
            assert config.pop("parallel_drafting", False) == (layout == "peagle")
            assert config == {"method": VLLM_METHODS[layout], "model": str(place), "num_speculative_tokens": tokens}
            assert words[:3] == ["vllm", "serve", target]
            assert after(words, "--tensor-parallel-size") == "2"
        if layout == "mtp" and words[0] == "vllm":  # it is in the target's own files
            assert json.loads(after(words, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 5}
            assert words[:3] == ["vllm", "serve", str(place)]
        elif layout == "mtp":
            assert after(words, "--model-path") == str(place)
            assert after(words, "--speculative-algorithm") == "EAGLE"
            assert "--speculative-draft-model-path" not in words
        if "--speculative-algorithm" in words and layout in SGLANG_ALGORITHMS:
            assert after(words, "--speculative-algorithm") == SGLANG_ALGORITHMS[layout]
            if layout in BLOCKS:
                assert "--speculative-num-steps" not in words, "it has a block, not steps"
            else:
                assert after(words, "--speculative-num-steps") == "5"
            slots = {"domino": "4", "dflash2": "4"}
            assert after(words, "--speculative-num-draft-tokens") == slots.get(layout, "6")
            assert after(words, "--tp-size") == "2"
        if words[0] == "text-generation-launcher":
            assert (after(words, "--speculate"), after(words, "--num-shard")) == ("3", "2")
    assert bool(blocks(text, "yaml")) == (layout in TENSORRT_LLM_KEYS)
    for block in blocks(text, "yaml"):
        expected = {"max_draft_len": 5, "speculative_model": str(place), **TENSORRT_LLM_KEYS[layout]}
        assert yaml.safe_load(block)["speculative_config"] == expected


def test_llama_cpp_converts_both_in_the_dtype_of_the_export(tmp_path):
    place, target = tmp_path / "out", str(tmp_path / "my target")
    one, two, serve = commands(write(place, "eagle3_llama_cpp", dtype="float32"))
    assert one == ["python", "convert_hf_to_gguf.py", target, "--outfile", "target.gguf", "--outtype", "f32"]
    assert two[:5] == ["python", "convert_hf_to_gguf.py", str(place), "--target-model-dir", target]
    assert after(serve, "--spec-type") == "draft-eagle3"
    assert after(serve, "--spec-draft-n-max") == "5"
    text = write(place, "eagle3_llama_cpp", dtype="bfloat16")
    assert text.count("--outtype bf16") == 2, "an older export is replaced, README and all"


def test_llama_cpp_s_converter_is_given_folders_and_one_command_after_the_other():
    """Of a target on the Hub, too; where one fails no server starts on what an earlier one left."""
    (snippet,) = start_llama_cpp("draft-eagle3")(Serving("/out", "my-org/my model", 5, files="/set tings"))
    assert subprocess.run(["bash", "-n"], input=snippet.text, text=True, check=False).returncode == 0
    lines = snippet.text.replace("\\\n", " ").splitlines()
    assert [line.endswith(" &&") for line in lines] == [True, True, True, False]
    fetch, one, two, serve = (shlex.split(line.removesuffix("&&")) for line in lines)
    assert fetch == ["hf", "download", "my-org/my model", "--local-dir", "/set tings/target"]
    assert one[2] == after(two, "--target-model-dir") == "/set tings/target"
    assert (after(serve, "-m"), after(serve, "-md")) == (after(one, "--outfile"), after(two, "--outfile"))


def test_an_export_for_speculators_drafts_what_the_plan_found(tmp_path):
    """Its config.json starts the engine, so that it, the README and the passport say the same."""
    planned = ((1, 4, 2), (5, 64, 1))
    for layout in ("eagle3_speculators", "peagle_speculators"):
        text = write(place := tmp_path / layout, layout, num_speculative_tokens=5, planned=planned)
        config = json.loads((place / "config.json").read_text())
        (proposal,) = config["speculators_config"]["proposal_methods"]
        assert proposal["speculative_tokens"] == 2
        assert json.loads((place / RECORD).read_text())["num_speculative_tokens"] == 2
        assert "num_speculative_tokens: 2" in text


@pytest.mark.parametrize("layout", layouts())
def test_engines_are_started_on_a_gguf_file_or_say_why_not(layout, tmp_path):
    target = str(tmp_path / "my.Q4_1.gguf")
    text = write(tmp_path / layout, layout, "my.Q4_1.gguf", num_speculative_tokens=3)
    found = commands(text)
    for engine in layouts()[layout].engines:
        refused = (
            f"Not with this export: {ENGINES[engine].title} {ENGINES[engine].no_gguf}; start it on the model" in text
        )
        assert refused == (engine not in ("llama_cpp", "transformers"))
    assert all(words[0] in ("llama-server", "draftsmith", "python") for words in found)
    assert not any("target.gguf" in words for words in found)
    assert all(f'gguf_file="{Path(target).name}"' in block for block in blocks(text, "python"))
    for words in found:
        if words[0] == "llama-server":
            assert after(words, "-m") == target
            made = after(words, "-md")
            assert made == ("draft.gguf" if layout == "draft_model" else f"{tmp_path / layout}.gguf")
    if layout.endswith("_llama_cpp"):
        assert [words[0] for words in found] == ["draftsmith", "llama-server"]
        assert after(found[0], "--export.layout") == layout
    assert f"`{target}`" in text


def test_the_facts_are_those_of_the_head(tmp_path):
    text = write(tmp_path / "out", "eagle3")
    for line in (
        "fingerprint abc",
        "reads: the streams that enter layers 1, 3, 5 of 8",
        "drafts among: 9 of 160 tokens",
        "num_speculative_tokens: 5",
        "weights: bfloat16",
        "tensor parallelism: for one GPU",
    ):
        assert line in text
    assert "reads: the last hidden state\n- drafts among: 160 of 160" in write(tmp_path / "other", "medusa_tgi")
    assert "num_speculative_tokens: 3," in write(tmp_path / "more", "medusa_tgi", num_speculative_tokens=None)
    assert "checked for 2 GPUs" in write(tmp_path / "two", "eagle3", tensor_parallel=2)


def test_an_engine_that_cannot_serve_the_head_gets_no_lines(tmp_path):
    target = make_target()
    export_head(make_eagle3(target, norm_before_residual=True), target, tmp_path / "out", layout="eagle3")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert text.count("Not with this export: ") == 2
    assert "Not with this export: SGLang ignores it in silence and adds the raw state" in text
    assert "Not with this export: TensorRT-LLM ignores it" in text
    assert [words[0] for words in commands(text)] == ["vllm"]
    assert "accept len" not in text


@pytest.mark.parametrize("name", ["eagle3-run", "my-eagle-run", "Eagle-1", "x-DFlash"])
def test_a_path_that_vllm_takes_for_a_method(name, tmp_path):
    assert "move the folder first" in write(tmp_path / name / "out", "medusa_vllm")
    assert "move the folder first" not in write(tmp_path / name / "eagle", "eagle3")
    assert "move the folder first" not in write(tmp_path / "plain", "medusa_vllm")


def test_a_readme_alone_is_not_replaced(tmp_path):
    place = tmp_path / "out"
    place.mkdir()
    (place / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"not a model folder .it holds .'README\.md'"):
        write(place, "medusa_tgi")
    assert (place / "README.md").read_text() == "mine"


def test_prompts_are_rendered_as_they_were_learned(tmp_path: Path) -> None:
    """By the options of an engine; where it has none, each request has to say so."""
    text = write(tmp_path / "out", "eagle3", rendered=('{"enable_thinking": false}', "/my.jinja"))
    assert '- prompts: rendered by /my.jinja with {"enable_thinking": false}' in text
    for words in commands(text):
        if words[:2] == ["vllm", "serve"]:
            assert after(words, "--default-chat-template-kwargs") == '{"enable_thinking": false}'
        if words[0] in ("vllm", "python"):
            assert after(words, "--chat-template") == "/my.jinja"
    vllm, sglang, tensorrt = re.findall(r"### (?:vLLM|SGLang|TensorRT-LLM)\n.*?(?=\n### |\n## )", text, re.DOTALL)
    asked = 'Send `chat_template_kwargs` {"enable_thinking": false} with every request'
    assert [asked in one for one in (vllm, sglang, tensorrt)] == [False, True, True]
    assert ["chat template in `/my.jinja`" in one for one in (vllm, sglang, tensorrt)] == [False, False, True]
