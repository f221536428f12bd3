"""Engines as data: every rule finds its head and no other, splits are what the engines' own code allows, which layouts an engine
was run with is what was measured, and the pages say of all this what the records say."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.heads.export.export import _check_split, convert_head, export_head
from draftsmith.heads.formats.engines import ENGINES, SERVED, Serving, split_obstacle, start_sglang, start_vllm
from draftsmith.heads.formats.layout import Layout, Rule, layouts, layouts_of
from draftsmith.heads.formats.schema import ModelFiles
from draftsmith.heads.registry import methods, served_method
from draftsmith.target.target import Target, shortened
from scripts.bench.engines.page import PAGES, TABLES, measured, read_results, rendered
from tests.exports import (
    LLAMA3,
    PLAIN,
    VOCAB,
    make_dflash,
    make_dflash2,
    make_domino,
    make_dspark,
    make_eagle1,
    make_eagle3,
    make_hydra,
    make_jetspec,
    make_medusa,
    make_mtp,
    make_peagle,
    make_target,
    make_xpress,
)

RULES: list[tuple[Layout, str, Rule]] = [
    (layout, engine, rule)
    for layout in layouts().values()
    for engine, served in layout.engines.items()
    for rule in served.rules
]
ROOT = Path(__file__).resolve().parents[3]
WRITE = "run python -m scripts.bench.engines.page, which writes it"


def biased(target: Target) -> Target:
    target.head.bias = torch.ones(160)
    return target


def scaled(target: Target) -> Target:
    target.config.rope_parameters = LLAMA3
    return target


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def yarn(target: Target, **more: Any) -> Target:
    target.config.rope_parameters = YARN | (more or {"truncate": False})
    return target


def longrope(target: Target) -> Target:
    factors = {name: [1.5] * (target.config.head_dim // 2) for name in ("long_factor", "short_factor")}
    target.config.rope_parameters = {**YARN, "rope_type": "longrope", **factors}
    return target


@pytest.mark.parametrize(
    ("keys", "otherwise"),
    [
        ({"truncate": True}, False),
        ({"truncate": False}, True),
        ({"attention_factor": 1 + 0.1 * math.log(4)}, False),
        ({"attention_factor": 1.0}, True),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ({"mscale": 0.7, "beta_fast": 16}, False),
    ],
)
def test_yarn_that_llama_cpp_computes_otherwise_is_known(keys, otherwise):
    """ggml_rope_yarn_corr_dims rounds, and llama-context.cpp sets the scale to 1 + 0.1 ln(factor)."""
    target = yarn(make_target(), **keys)
    head = make_eagle3(target)
    files = convert_head(head, target, layout="eagle3")
    rules = layouts()["eagle3_llama_cpp"].engines["llama_cpp"].rules
    assert any(rule.applies(files, target, head) for rule in rules) is otherwise


def capped(target: Target) -> Target:
    target.head.softcap = 30.0
    return target


def foreign(target: Target, make=make_eagle1):
    head = make(target)
    head.embed_tokens.weight = torch.nn.Parameter(head.embed_tokens.weight + 1)
    return head


def trained_embeddings(target: Target):
    head = make_eagle3(target, train_embeddings=True)
    with torch.no_grad():
        head.embed_tokens.weight += 1
    return head


def gelu(target: Target):
    head = make_eagle1(target)
    head.config.hidden_act = "gelu"
    return head


# What has each of the things that rules are about, by the rules' own words.
HEADS = {
    "head.norm_output": lambda t: make_eagle3(t, norm_output=True),
    "head.fc_norm": lambda t: make_eagle3(t, fc_norm=True),
    "head.norm_before_residual": lambda t: make_eagle3(t, norm_before_residual=True),
    "other than three head.layer_ids": lambda t: make_eagle3(t, layer_ids=(1, 3)),
    "layer 0 among head.layer_ids": lambda t: make_eagle3(t, layer_ids=(0, 3, 5)),
    "a single layer in head.layer_ids": lambda t: make_eagle3(t, layer_ids=(3,)),
    "input embeddings that were trained": trained_embeddings,
    "head.num_hidden_layers above 1": lambda t: make_eagle3(t, num_hidden_layers=2),
    "head.sliding_window": lambda t: make_eagle3(t, sliding_window=9),
    "head.hidden_size other than the target's": lambda t: make_eagle3(t, hidden_size=32, train_embeddings=True),
    "P-EAGLE's head.hidden_size other than the target's": lambda t: make_peagle(
        t, hidden_size=32, train_embeddings=True
    ),
    "P-EAGLE's head.fc_norm": lambda t: make_peagle(t, fc_norm=True),
    "layer 0 among head.layer_ids, for DFlash2": lambda t: make_dflash2(t, layer_ids=(0, 3)),
    "layer 0 among head.layer_ids, for Domino": lambda t: make_domino(t, layer_ids=(0, 3)),
    "a draft vocabulary of its own": lambda t: make_dflash(t, VOCAB),
    "a draft vocabulary of its own, for DFlash2": lambda t: make_dflash2(t, VOCAB),
    "a target whose output projection has a bias, for DFlash2": lambda t: make_dflash2(biased(t)),
    "a target with another RoPE scaling than linear or YaRN, for DFlash2": lambda t: make_dflash2(scaled(t)),
    "more candidates (head.selector_top_k) than the target is wide for: k (k + 1) is above its width": lambda t: (
        make_dflash2(t, selector_top_k=8)
    ),
    "a target with another RoPE scaling than linear or YaRN, for DFlash": lambda t: make_dflash(scaled(t)),
    "a target with another RoPE scaling than linear or YaRN, for DSpark": lambda t: make_dspark(scaled(t)),
    "a target with YaRN that is not truncated, or has a scale of its own, for DFlash2": lambda t: make_dflash2(yarn(t)),
    "a target with YaRN that is not truncated, or has a scale of its own, for DFlash": lambda t: make_dflash(yarn(t)),
    "a target with YaRN that is not truncated, or has a scale of its own, for DSpark": lambda t: make_dspark(yarn(t)),
    "a target with YaRN that is not truncated, or has a scale of its own, for EAGLE-3": lambda t: make_eagle3(yarn(t)),
    "a target with the RoPE scaling longrope": lambda t: make_eagle3(longrope(t)),
    "a target whose output projection has a bias, for DFlash": lambda t: make_dflash(biased(t)),
    "a target whose output projection has a bias, for JetSpec": lambda t: make_jetspec(biased(t)),
    "a target whose output projection has a bias, a scale or a softcap, for DFlash": lambda t: make_dflash(capped(t)),
    "a target whose output projection has a bias, a scale or a softcap, for DSpark": lambda t: make_dspark(biased(t)),
    "a draft vocabulary of its own, for Domino": lambda t: make_domino(t, VOCAB),
    "another head.pure_draft_prefix_len than 1": lambda t: make_domino(t, pure_draft_prefix_len=2),
    "a target whose output projection has a bias, a scale or a softcap, for Domino": lambda t: make_domino(capped(t)),
    "a draft vocabulary of its own, for XPress": lambda t: make_xpress(t, VOCAB),
    "a target whose output projection has a bias, a scale or a softcap, for XPress": lambda t: make_xpress(capped(t)),
    "head.target_state before_norm": lambda t: make_mtp(t, target_state="before_norm"),
    "head.target_state vllm": lambda t: make_mtp(t, target_state="vllm"),
    "a bias of `fc`": lambda t: make_eagle1(t, fc_bias=True),
    "input embeddings of its own": foreign,
    "input embeddings of its own, for DFlash": lambda t: foreign(t, make_dflash),
    "input embeddings of its own, for DFlash2": lambda t: foreign(t, make_dflash2),
    "input embeddings of its own, for Domino": lambda t: foreign(t, make_domino),
    "input embeddings of its own, for DSpark": lambda t: foreign(t, make_dspark),
    "a target whose output projection has a bias": lambda t: make_eagle1(biased(t)),
    "another activation than SiLU": gelu,
    "head.num_layers above 1": lambda t: make_medusa(t, num_layers=2),
    "another head.num_heads than 5": lambda t: make_medusa(t, num_heads=3),
    "head.original_lm_head": lambda t: make_medusa(t, original_lm_head=True),
    "head.num_layers above 1 and head.original_lm_head": lambda t: make_medusa(t, num_layers=2, original_lm_head=True),
    "head.original_lm_head, for a target whose output projection has a bias": lambda t: make_medusa(
        biased(t), original_lm_head=True
    ),
    "head.num_layers above 2 without head.tie_blocks": lambda t: make_hydra(t, num_layers=3),
    "a prefix layer of other sizes than the target's layers": lambda t: make_hydra(
        t, prefix_attention=True, num_key_value_heads=4
    ),
    "head.original_lm_head, for a target whose output projection has a bias, a scale or a softcap": lambda t: (
        make_hydra(biased(t), original_lm_head=True)
    ),
}


@pytest.mark.parametrize(
    ("layout", "engine", "rule"), RULES, ids=[f"{engine}-{layout.name}-{rule.what}" for layout, engine, rule in RULES]
)
def test_every_rule_finds_its_head_and_says_what_to_do(layout, engine, rule, tmp_path):
    target = make_target()
    head = HEADS[rule.what](target)
    assert layout.method == head.method
    if layout.refuses(rule):
        words = f"The layout {layout.name} cannot hold this head: .*{ENGINES[engine].title} .*; .+\\.$"
        with pytest.raises(UserError, match=words) as caught:
            export_head(head, target, tmp_path / "out", layout=layout.name, num_speculative_tokens=3)
        assert f"{rule.why}; {rule.instead}." in str(caught.value)
        assert not list(tmp_path.iterdir())
    else:
        files = convert_head(head, target, layout=layout.name, num_speculative_tokens=3)
        assert rule in [one for one in layout.engines[engine].rules if one.applies(files, target, head)]
        assert len({*layout.engines} - {engine}) >= 1


def test_an_engine_that_is_not_known_cannot_be_named():
    layout = layouts()["eagle3"]
    with pytest.raises(AssertionError, match=r"the layout eagle3 names \['nowhere'\], which ENGINES does not have"):
        replace(layout, engines={"nowhere": layout.engines["vllm"]})


def alternatives() -> list[tuple[str, str]]:
    return [
        (rule.what, found) for _, _, rule in RULES for found in re.findall(r"export the layout (\w+)", rule.instead)
    ]


@pytest.mark.parametrize(("what", "layout"), sorted(set(alternatives())))
def test_the_layout_that_a_rule_offers_holds_the_head(what, layout):
    target = make_target()
    head = HEADS[what](target)
    files = convert_head(head, target, layout=layout)
    offered = layouts()[layout]
    rules = [rule for served in offered.engines.values() for rule in served.rules]
    assert not [rule.what for rule in rules if offered.refuses(rule) and rule.applies(files, target, head)]


def linear_shards(config: dict[str, int], gpus: int) -> bool:
    """What vLLM and SGLang assert in LlamaAttention and LlamaMLP (models/llama.py)."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    fits = groups % gpus == 0 if groups >= gpus else gpus % groups == 0
    return heads % gpus == 0 and fits and config["intermediate_size"] % gpus == 0


def vocabulary_shards(rows: int, gpus: int) -> bool:
    """VocabParallelEmbedding of vLLM: padded to a multiple of 64, then divided."""
    return ((rows + 63) // 64 * 64) % gpus == 0


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("vocab", [None, "drawn"])
def test_splits_are_what_the_engines_assert(gpus, vocab):
    for heads, groups, width in [(4, 2, 96), (4, 4, 96), (8, 1, 128), (8, 2, 60), (4, 1, 90)]:
        target = make_target()
        sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": width, "head_dim": 8}
        head = make_eagle3(target, **sizes) if vocab else make_eagle3(target, None, **sizes)
        files = convert_head(head, target, layout="eagle3")
        fits, rows = linear_shards(files.config, gpus), (160, files.config["draft_vocab_size"])
        whole = gpus == 1
        assert (split_obstacle("sglang", files, gpus) is None) == (fits or whole)
        assert (split_obstacle("tensorrt_llm", files, gpus) is None) == (fits or whole)
        assert (split_obstacle("vllm", files, gpus) is None) == (fits and all(vocabulary_shards(r, gpus) for r in rows))
        assert split_obstacle("llama_cpp", files, gpus) is None


def test_splits_of_medusa():
    target = make_target()
    own, shared = (make_medusa(target, num_heads=5, original_lm_head=shared) for shared in (False, True))
    files = convert_head(own, target, layout="medusa_tgi")
    assert split_obstacle("tgi", files, 5) is None
    with pytest.raises(UserError, match=r"tensor_parallel is 5, but TGI cannot .* 64 units .*original_lm_head false"):
        convert_head(shared, target, layout="medusa_tgi", tensor_parallel=5)
    convert_head(shared, target, layout="medusa_tgi", tensor_parallel=4)
    with pytest.raises(UserError, match=r"vLLM cannot split this head .* pads its 160 tokens to 192 and divides them"):
        convert_head(own, target, layout="medusa_vllm", tensor_parallel=5)
    convert_head(own, target, layout="medusa_vllm", tensor_parallel=3)
    with pytest.raises(UserError, match="knows no tensor parallelism"):
        # TensorRT-LLM could split it, but cannot serve it.
        convert_head(shared, target, layout="medusa", tensor_parallel=2)
    convert_head(own, target, layout="medusa", tensor_parallel=2)
    files = ModelFiles(convert_head(own, target, layout="medusa").config, {}, torch.float32)
    assert "leave export.tensor_parallel at 1" in str(split_obstacle("medusa_original", files, 2))


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        ("eagle3", {"num_attention_heads": 4}, "vLLM .*divides its 4 query heads: serve on fewer GPUs, or train"),
        ("eagle3", {"num_attention_heads": 16, "num_key_value_heads": 1, "intermediate_size": 60}, "vLLM .*60 units"),
        ("eagle3_speculators", {"num_attention_heads": 4}, "vLLM .*query heads"),
    ],
)
def test_a_head_that_cannot_be_split_is_refused(layout, options, words, tmp_path):
    target = make_target()
    head = make_eagle3(target, **options)
    with pytest.raises(UserError, match=f"export.tensor_parallel is 8, but {words}"):
        export_head(head, target, tmp_path / "out", layout=layout, tensor_parallel=8, num_speculative_tokens=3)
    assert not list(tmp_path.iterdir())
    convert_head(head, target, layout=layout, num_speculative_tokens=3)
    convert_head(head, target, layout="eagle3_llama_cpp", tensor_parallel=8)


def test_one_engine_that_can_split_is_enough():
    """The README leaves out the other. 64 rows are no multiple of 128."""
    target = make_target()
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 128}
    files = convert_head(make_eagle3(target, **sizes), target, layout="eagle3")
    files.config.update(num_attention_heads=128)
    assert "pads its 9 tokens to 64" in str(split_obstacle("vllm", files, 128))
    layout = layouts()["eagle3"]
    _check_split(layout, ["vllm", "sglang"], files, 128)
    with pytest.raises(UserError, match="pads its 9 tokens"):
        _check_split(layout, ["vllm"], files, 128)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert text == rendered(text), WRITE
    if page.name == "export.md":
        assert set(re.findall("<!-- table: (.+?) -->", text)) == TABLES.keys()


def test_what_was_run_is_what_was_measured_in_the_version_that_was_read():
    assert measured() == SERVED, WRITE
    versions = {(row["engine"].replace(".", "_"), row["version"]) for row in read_results()}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions.add(("transformers", re.search(r"^transformers==(.+)$", constraints, re.MULTILINE)[1]))
    for engine, version in versions:
        read = ENGINES[engine].version.removeprefix("commit ")
        assert read[:7] in version, f"{engine} was run as {version}: read its source again, and say so in ENGINES"


def test_every_method_can_be_exported():
    exported = {served_method(name) for name in methods() if layouts_of(name)}
    assert {layout.method for layout in layouts().values()} == exported == set(PLAIN)


def test_engines_that_change_the_draft_length_with_the_batch_are_given_the_table():
    """vLLM's ranges begin at 1, follow each other and stay within the start's length; so do SGLang's candidate steps."""
    steps = ((1, 4, 5), (5, 16, 3), (17, 64, 0))
    planned = Serving("draft", "target", 5, layer_ids=(1, 2, 3), by_batch=steps)
    (line,) = start_vllm("eagle3")(planned)
    config = json.loads(shlex.split(line.text.replace("\\\n", " "))[-1])
    assert config["num_speculative_tokens_per_batch_size"] == [list(step) for step in steps]
    assert config["num_speculative_tokens"] == max(k for *_, k in steps)
    (line,) = layouts()["peagle"].engines["vllm"].start(planned)
    assert "per_batch_size" not in line.text, "vLLM's parallel drafts have room for the largest length alone"
    (line,) = start_vllm("medusa")(planned)
    assert "per_batch_size" not in line.text, "vLLM was not read to change the length of such drafts"
    table, line = start_sglang("EAGLE3")(planned)
    assert (table.language, table.file) == ("json", "adaptive.json")
    assert json.loads(table.text) == {
        "1": {"candidate_steps": [5]},
        "5": {"candidate_steps": [3]},
        "17": {"candidate_steps": [0]},
    }
    assert "--speculative-adaptive-config adaptive.json" in line.text
    assert "--speculative-num-steps 5" in line.text
    one = replace(planned, by_batch=((1, 64, 5),))
    for start in (start_vllm("eagle3"), start_sglang("EAGLE3")):
        assert start(one) == start(replace(planned, by_batch=())), "one length for all batches needs no table"


RENDERS: dict[str, tuple[str | None, str]] = {
    "vllm": ("--default-chat-template-kwargs", "--chat-template"),
    "sglang": (None, "--chat-template"),
    "llama_cpp": ("--chat-template-kwargs", "--chat-template-file"),
}


def test_engines_are_started_no_longer_than_a_target_keeps_its_frequencies() -> None:
    """With more room vLLM and llama.cpp take LongRoPE's long factors from the first token on."""
    long = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = SimpleNamespace(max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling=long)
    assert shortened(config) == 4096
    assert shortened(SimpleNamespace(max_position_embeddings=4096, rope_scaling=None)) == 0
    words = {
        "vllm": "--max-model-len",
        "sglang": "--context-length",
        "tensorrt_llm": "--max_seq_len",
        "llama_cpp": "-c",
    }
    for layout in layouts().values():
        for engine, served in layout.engines.items():
            asked = Serving("draft", "target", 3, context=shortened(config))
            text = "".join(one.text for one in served.start(asked))
            plain = "".join(one.text for one in served.start(replace(asked, context=0)))
            if engine in words and "convert_checkpoint" not in text:
                assert f"{words[engine]} 4096" in text, (layout.name, engine)
            assert "4096" not in plain
            kwargs = '{"enable_thinking": false}'
            asked = replace(asked, rendered=(kwargs, "/my template.jinja"))
            text = "".join(one.text for one in served.start(asked))
            options = RENDERS.get(engine, ()) if "convert_checkpoint" not in text else ()
            words_of = shlex.split(text.replace("\\\n", " "))
            for option, value in zip(options, (kwargs, "/my template.jinja"), strict=False):
                assert option is None or words_of[words_of.index(option) + 1] == value, (layout.name, engine)
            assert (shlex.quote(kwargs) in text) == bool(options and options[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [("is_neox_style", False), ("rope_is_neox_style", False), ("use_gemma_norm", True), ("input_embedding_scale", 2.0)],
)
def test_keys_by_which_an_engine_computes_otherwise_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    target = make_target()
    folder = export_head(make_dflash(target), target, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"is a block drafter with {key} .*, which is not computed here"):
        layouts()["dflash"].load(folder, target)


def test_embeddings_of_another_width_are_the_heads_own_in_every_engine() -> None:
    target = make_target()
    head = make_eagle3(target, hidden_size=32, train_embeddings=True)
    files = convert_head(head, target, layout="eagle3")
    assert not layouts()["eagle3"].blocking_rules(files, target, head)
