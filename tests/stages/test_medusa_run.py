"""Medusa from data to export, compared with an EAGLE-3 head and the baselines, on the same answers and hidden states."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.eval.results.result import read_result
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import make_workplace, options

pytestmark = pytest.mark.slow

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_workplace(tmp_path_factory.mktemp("medusa"))
    prompts = made / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace('"slice": "code"', '"slice": "json"'))
    return made


@pytest.fixture(scope="module")
def eagle(workplace: Path) -> Path:
    """A run of EAGLE-3 up to its head."""
    torch.set_num_threads(1)
    assert main(["train", *options(workplace, workplace / "eagle")]) == 0
    return workplace / "eagle"


def medusa(workplace: Path, run: Path, *words: str) -> list[str]:
    """The same recipe for Medusa."""
    text = (workplace / "recipe.yaml").read_text().replace("name: mini", "name: mini\nmethod: medusa")
    head = text[text.index("head:") : text.index("name:")] if text.index("head:") < text.index("name:") else ""
    text = text.replace(head, "head: {num_heads: 3}\n")
    (workplace / "medusa.yaml").write_text(text)
    return ["--recipe", str(workplace / "medusa.yaml"), "--output_dir", str(run), *words]


@pytest.fixture(scope="module")
def finished(workplace: Path, eagle: Path) -> Path:
    """Every stage of Medusa on EAGLE-3's answers and hidden states, compared with EAGLE-3."""
    run = workplace / "finished"
    bush = str(workplace / "bush.json")
    (workplace / "bush.json").write_text(json.dumps({"choices": TREE}))
    drafts = [{"tree": "chain"}, {"tree": bush}, {"tree": bush, "children": "drawn"}]
    drafts += [{"tree": bush, "acceptance": "typical"}, {"tree": "dynamic", "depth": 3, "total_tokens": 12}]
    tokenizer = tiny_tokenizer()
    tiny_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer) + 8).save_pretrained(workplace / "small")
    tokenizer.save_pretrained(workplace / "small")
    baselines = [{"kind": "prompt_lookup"}, {"kind": "draft_model", "path": str(workplace / "small")}]
    words = ["--data_dir", str(eagle), "--evaluate.drafts", json.dumps(drafts), "--evaluate.beside.eagle3", str(eagle)]
    words += ["--evaluate.baselines", json.dumps(baselines), "--evaluate.min_p", "0.02"]
    words += ["--evaluate.repeats", "1", "--evaluate.max_new_tokens", "12", "--evaluate.generate", "false"]
    assert main(["run", *medusa(workplace, run, *words)]) == 0
    return run


def test_all_drafters_are_measured_in_one_run(finished: Path) -> None:
    greedy = read_result(finished / "evaluation" / "t0" / "result.json").drafters
    dynamic = "eagle3 dynamic 3x8, 12 tokens"
    chains, trees, baselines = (
        ["medusa", "eagle3"],
        ["medusa bush", "eagle3 bush"],
        ["prompt lookup", "draft model small"],
    )
    assert set(greedy) == {*chains, *trees, *baselines, dynamic}, "at temperature 0 the others would repeat these"
    for name, drafter in greedy.items():
        m = drafter.overall
        assert m.lossless is not None
        assert m.lossless.equal == m.lossless.checked == 4
        if name == dynamic:
            assert m.tau_simulated is None
            assert (m.tau or 0) >= 1
        else:
            assert m.tau == pytest.approx(m.tau_simulated, abs=1e-9), name
            assert m.lossless.tau == pytest.approx(m.lossless.tau_simulated, abs=1e-9), name
        assert m.speedup is not None
        assert m.ms_per_round is not None
    assert (greedy["medusa bush"].overall.tau or 0) >= (greedy["medusa"].overall.tau or 9)
    sampled = read_result(finished / "evaluation" / "t1" / "result.json")
    ways = ["", " bush", " bush, drawn", " bush, typical (lossy)"]
    medusas, eagles = ([f"{name}{way}" for way in ways] for name in ("medusa", "eagle3"))
    assert list(sampled.drafters) == [*medusas, *eagles, dynamic, *baselines]
    assert (sampled.settings.min_p, sampled.settings.repetition_penalty) == (0.02, None)
    draft = sampled.drafters["medusa bush"].draft
    assert draft is not None
    assert (draft.method, draft.num_speculative_tokens, draft.nodes, draft.tree) == ("medusa", 3, 7, "bush")
    assert sampled.costs is not None
    assert sampled.costs.nodes["medusa bush"] == {"1": 4, "2": 7, "3": 8}
    for name in (*trees, "prompt lookup"):
        for m in (sampled.drafters[name].overall, *sampled.drafters[name].slices.values()):
            assert m.tau == pytest.approx(m.tau_simulated), "given the text, acceptance is certain"
    for name in ("medusa bush, drawn", "eagle3 bush, drawn", dynamic):
        m = sampled.drafters[name].overall
        assert (m.tau_simulated, m.k_sweep) == (None, None)
        assert m.ideal_speedup is not None
    assert sampled.drafters["prompt lookup"].overall.ideal_speedup is None
    points = sampled.drafters["medusa"].overall.k_sweep or ()
    assert [p.num_speculative_tokens for p in points] == [1, 2, 3], "three heads draft no further"


def test_acceptance_by_context_adds_up_and_is_as_simulated(finished: Path) -> None:
    for name, drafter in read_result(finished / "evaluation" / "t0" / "result.json").drafters.items():
        assert drafter.draft is not None
        assert (drafter.draft.trained_length is not None) == (name.split()[0] in ("medusa", "eagle3")), name
        for m in (drafter.overall, *drafter.slices.values()):
            for groups in (m.contexts, m.training_split) if drafter.draft.trained_length else (m.contexts,):
                assert groups
                assert sum(g.rounds or 0 for g in groups) == m.rounds
                assert sum((g.rounds or 0) * (g.tau or 0) for g in groups) == pytest.approx(m.tokens)
                if m.tau_simulated is not None:
                    for g in groups:
                        assert (g.rounds_simulated, g.tau_simulated) == pytest.approx((g.rounds, g.tau)), name


def test_a_lossy_drafter_is_labelled_and_judged(finished: Path) -> None:
    drafters = read_result(finished / "evaluation" / "t1" / "result.json").drafters
    lossy, exact = drafters["medusa bush, typical (lossy)"], drafters["medusa bush"]
    assert lossy.draft is not None
    assert exact.draft is not None
    assert (lossy.draft.lossy, exact.draft.lossy) == (True, False)
    assert lossy.overall.tau_simulated is None
    assert lossy.overall.k_sweep is None
    assert (lossy.overall.tau or 0) >= 1
    assert (lossy.overall.perplexity or 0) > 1
    assert (lossy.overall.perplexity_baseline or 0) > 1
    assert exact.overall.perplexity is None
    assert (lossy.overall.referenced, exact.overall.referenced) == (1, None), "of the prompts one has a reference"
    assert lossy.overall.exact_match in (0, 1)
    assert lossy.overall.exact_match_baseline in (0, 1)
    assert (lossy.overall.json_answers, exact.overall.json_answers) == (2, None)
    assert lossy.slices["json"].valid_json == lossy.overall.valid_json == 0, "the target has learnt nothing"
    assert lossy.slices["json"].valid_json_baseline == 0
    assert (lossy.slices["chat"].json_answers, lossy.slices["chat"].valid_json) == (None, None)
    report = (finished / "evaluation" / "report.md").read_text()
    assert "Lossy drafters: their texts under the target" in report
    assert "medusa bush, typical (lossy)" in report
