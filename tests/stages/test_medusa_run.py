"""Medusa from data to export, compared with an EAGLE-3 head and the baselines, on the same answers and hidden states."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.data.features.store import FeatureStore
from draftsmith.eval.results.result import read_result
from draftsmith.heads.formats.layout import layouts
from draftsmith.target.target import load_target
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import digests, make_workplace, options

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


@pytest.mark.slow
def test_answers_and_hidden_states_are_shared(workplace: Path, eagle: Path, finished: Path) -> None:
    made = sorted(path.name for path in finished.iterdir() if not path.name.startswith("."))
    assert made == ["evaluation", "export", "run.json", "train"]
    assert set(json.loads((finished / "run.json").read_text())) == {"train", "evaluate", "export"}
    assert (eagle / "features").exists()


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


def test_the_default_export_is_medusas_own_and_others_go_beside_it(
    workplace: Path, eagle: Path, finished: Path
) -> None:
    first = finished / "export" / "medusa" / "medusa_lm_head.safetensors"
    before = first.read_bytes()
    words = medusa(workplace, finished, "--data_dir", str(eagle))
    assert main(["export", *words, "--export.layout", "medusa_vllm"]) == 0
    assert first.read_bytes() == before
    target = load_target(str(workplace / "target"))
    head = layouts()["medusa_vllm"].load(finished / "export" / "medusa_vllm", target)
    assert head.drafts.max_speculative_tokens == 3
    assert main(["export", *words, "--export.layout", "medusa_vllm"]) == 0, "a second time it is reused"


def test_medusa_alone_stores_no_aux_layers(workplace: Path, eagle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workplace / "alone"
    answers = ["--answers.max_new_tokens", "6"]
    assert main(["train", *medusa(workplace, run, *answers)]) == 0
    store = FeatureStore(run / "features")
    assert store.get(0, ()).aux.shape[1] == 0
    assert (run / "train" / "best" / "model.safetensors").exists()
    # An EAGLE-3 head cannot use that store, and is refused before anything changes.
    before = digests(run)
    words = ["--data_dir", str(run), *answers]
    assert main(["train", *options(workplace, workplace / "late"), *words]) == 2
    assert "layer_ids was [], is [2, 4, 6]" in capsys.readouterr().err
    assert digests(run) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--evaluate.drafts", "[{tree: {work}/wide.json}]"],
            "The tree wide proposes rank 900000 (the most likely token has 0)",
        ),
        (
            ["--evaluate.max_new_tokens_by_slice", "{poetry: 5}"],
            "max_new_tokens_by_slice names the slice poetry, but the",
        ),
        (
            ["--evaluate.example_slices", "[chat, prose]"],
            "evaluate.example_slices names the slice prose, but the prompts have",
        ),
        (["--evaluate.beside.medusa", "{eagle}"], "the name of the run's own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named_and_change_nothing(
    words: list[str],
    message: str,
    workplace: Path,
    eagle: Path,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "wide.json").write_text('{"name": "wide", "choices": [[0], [900000]]}')
    before = digests(finished)
    given = [word.replace("{eagle}", str(eagle)).replace("{work}", str(workplace)) for word in words]
    assert main(["run", *medusa(workplace, finished, "--data_dir", str(eagle), *given)]) == 2
    assert message in capsys.readouterr().err
    assert digests(finished) == before


def test_inspect_shows_the_recipes_own_answers_or_the_data(
    workplace: Path, eagle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *options(workplace, eagle), "--count", "1"]) == 0
    printed, replaced = capsys.readouterr(), "the target's own answers will replace those shown here"
    assert "question" in printed.out
    assert replaced not in printed.err
    other = tmp_path / "other.jsonl"
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Something else."}]}]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", *options(workplace, eagle), "--data.sources", f"[{other}]", "--count", "1"]) == 0
    printed = capsys.readouterr()
    assert "Something else." in printed.out
    assert "data: " in printed.err
    assert replaced in printed.err
    given = ["--data.sources", f"[{other}]", "--answers.regenerate", "false"]
    assert main(["inspect", *options(workplace, eagle), *given, "--count", "1"]) == 0
    assert replaced not in capsys.readouterr().err
