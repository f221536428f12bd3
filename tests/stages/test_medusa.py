"""Medusa from data to export, compared with an EAGLE-3 head and the baselines, on the same answers and hidden states; and Medusa-2
from that head to a report that compares the tuned target with the original, and to both exports."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.cli.main import main
from draftsmith.data.features.store import FeatureStore
from draftsmith.eval.results.result import read_result
from draftsmith.heads.formats.layout import layouts
from draftsmith.target.target import load_target
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import digests, make_workplace, options

pytestmark = pytest.mark.slow

NAME = "medusa2, tuned target"
# With a penalty, so that it must be the same wherever texts are compared.
ANSWERS = ["--evaluate.max_new_tokens", "12", "--evaluate.repetition_penalty", "1.5"]
HEADS = {"medusa": {"num_heads": 3}, "medusa2": {"num_heads": 3, "lora_r": 4, "adapter_lr": 1.0}}
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


def words(workplace: Path, method: str, *more: str) -> list[str]:
    """The same recipe for another method, on EAGLE-3's answers and hidden states, in the folder of its name."""
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text()) | {"method": method, "head": HEADS[method]}
    (workplace / f"{method}.yaml").write_text(yaml.safe_dump(recipe))
    own = ["--output_dir", str(workplace / method), "--data_dir", str(workplace / "eagle")]
    return ["--recipe", str(workplace / f"{method}.yaml"), *own, *more]


@pytest.fixture(scope="module")
def finished(workplace: Path, eagle: Path) -> Path:
    """Every stage of Medusa on EAGLE-3's answers and hidden states, compared with EAGLE-3."""
    bush = str(workplace / "bush.json")
    (workplace / "bush.json").write_text(json.dumps({"choices": TREE}))
    drafts = [{"tree": "chain"}, {"tree": bush}, {"tree": bush, "children": "drawn"}]
    drafts += [{"tree": bush, "acceptance": "typical"}, {"tree": "dynamic", "depth": 3, "total_tokens": 12}]
    tokenizer = tiny_tokenizer()
    tiny_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer) + 8).save_pretrained(workplace / "small")
    tokenizer.save_pretrained(workplace / "small")
    baselines = [{"kind": "prompt_lookup"}, {"kind": "draft_model", "path": str(workplace / "small")}]
    own = ["--evaluate.drafts", json.dumps(drafts), "--evaluate.beside.eagle3", str(eagle)]
    own += ["--evaluate.baselines", json.dumps(baselines), "--evaluate.min_p", "0.02"]
    own += ["--evaluate.repeats", "1", "--evaluate.max_new_tokens", "12", "--evaluate.generate", "false"]
    assert main(["run", *words(workplace, "medusa", *own)]) == 0
    return workplace / "medusa"


def test_stages_are_shared_and_exports_stay_beside_each_other(workplace: Path, eagle: Path, finished: Path) -> None:
    made = sorted(path.name for path in finished.iterdir() if not path.name.startswith("."))
    assert made == ["evaluation", "export", "run.json", "train"]
    assert set(json.loads((finished / "run.json").read_text())) == {"train", "evaluate", "export"}
    assert (eagle / "features").exists()
    before = digests(finished / "export" / "medusa")
    for _ in range(2):  # a second time it is reused
        assert main(["export", *words(workplace, "medusa", "--export.layout", "medusa_vllm")]) == 0
        assert digests(finished / "export" / "medusa") == before
    target = load_target(str(workplace / "target"))
    head = layouts()["medusa_vllm"].load(finished / "export" / "medusa_vllm", target)
    assert head.drafts.max_speculative_tokens == 3


def test_medusa_alone_stores_no_aux_layers(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An EAGLE-3 head cannot use that store, and is refused before anything changes."""
    alone, shared = workplace / "alone", ["--data_dir", str(workplace / "alone"), "--answers.max_new_tokens", "6"]
    assert main(["extract", *words(workplace, "medusa", "--output_dir", str(alone), *shared)]) == 0
    assert FeatureStore(alone / "features").get(0, ()).aux.shape[1] == 0
    before = digests(alone)
    assert main(["train", *options(workplace, workplace / "late"), *shared]) == 2
    assert "layer_ids was [], is [2, 4, 6]" in capsys.readouterr().err
    assert digests(alone) == before


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


@pytest.fixture(scope="module")
def medusa2(workplace: Path, finished: Path) -> Path:
    """Every stage of Medusa-2, started from the Medusa-1 head and compared with it."""
    more = ["--train.warm_start", str(finished), "--evaluate.beside.plain", str(finished)]
    more += ["--train.loss.ramp", "0.5", "--train.lr", "5e-3", "--evaluate.repeats", "1"]
    more += [*ANSWERS, "--evaluate.generate", "false"]
    assert main(["run", "--fail-under", f"{NAME}:tau=1.01", *words(workplace, "medusa2", *more)]) == 0
    return workplace / "medusa2"


def test_training_says_how_far_the_target_has_moved(workplace: Path, medusa2: Path) -> None:
    lines = (medusa2 / "train" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["heldout_tuned"]["kl"] == pytest.approx(0.0, abs=1e-4), "the adapter starts from nothing"
    assert records[1]["tuned"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert records[-1]["tuned"]["kl"] > 1e-4
    held = [record for record in records if "tau" in record]
    assert all(0 <= record["heldout_tuned"]["agreement"] <= 1 for record in held)
    first = json.loads((workplace / "medusa" / "train" / "metrics.jsonl").read_text().splitlines()[0])
    assert "tuned" not in first


def test_the_report_compares_with_the_original(workplace: Path, medusa2: Path) -> None:
    for temperature in (0, 1):
        result = read_result(medusa2 / "evaluation" / f"t{temperature}" / "result.json")
        assert list(result.drafters) == [NAME, "plain"]
        tuned, plain = (result.drafters[name] for name in (NAME, "plain"))
        assert tuned.draft is not None
        assert plain.draft is not None
        assert (tuned.draft.method, tuned.draft.tuned, plain.draft.tuned) == ("medusa2", True, False)
        m = tuned.overall
        assert 0 < (m.agreement or 0) <= 1
        assert (m.kl or 0) > 0
        assert (m.perplexity or 0) > 1
        assert (m.perplexity_baseline or 0) > 1
        assert (plain.overall.agreement, plain.overall.kl, plain.overall.perplexity) == (None, None, None)
        assert m.baseline_tok_s == plain.overall.baseline_tok_s, "the original alone is the baseline of both"
        for one in (m, plain.overall):
            if temperature == 0:
                assert one.tau == pytest.approx(one.tau_simulated, abs=1e-9)
                assert one.lossless is not None
                assert one.lossless.equal == one.lossless.checked == 4
    report = (medusa2 / "evaluation" / "report.md").read_text()
    assert "Tuned targets against the original" in report
    assert "It changes the target" in report
    assert "equal those of the tuned target alone" in report


def test_simulation_lets_the_tuned_target_answer(workplace: Path, medusa2: Path) -> None:
    more = ["--evaluate.temperatures", "[0.0]", *ANSWERS]
    more += ["--head", str(medusa2 / "train" / "best"), "--name", "simulated"]
    run = ["--no-decode", *words(workplace, "medusa2", *more)]
    run[run.index("--output_dir") + 1] = str(workplace / "simulated")
    assert main(["evaluate", *run]) == 0
    simulated = read_result(workplace / "simulated" / "simulation" / "t0" / "result.json").drafters[NAME].overall
    decoded = read_result(medusa2 / "evaluation" / "t0" / "result.json").drafters[NAME].overall
    assert simulated.tau_simulated == pytest.approx(decoded.tau, abs=1e-9)
    assert simulated.kl == pytest.approx(decoded.kl, rel=1e-3)
    assert simulated.perplexity == pytest.approx(decoded.perplexity, rel=1e-4)


def test_the_export_is_a_medusa_head_of_a_target_of_its_own(
    workplace: Path, medusa2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = medusa2 / "export"
    assert sorted(path.name for path in export.iterdir()) == ["medusa", "target"]
    config = json.loads((export / "medusa" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(export / "target")
    assert "serve that one, not the original" in (export / "medusa" / "README.md").read_text()
    record = json.loads((export / "medusa" / "draftsmith.json").read_text())["target"]
    assert record["fingerprint"] == load_target(str(export / "target")).fingerprint
    plain = ["--target.path", str(export / "target"), "--head", str(export / "medusa"), "--evaluate.repeats", "1"]
    plain += ["--evaluate.temperatures", "[0.0]", *ANSWERS, "--evaluate.generate", "false"]
    run = words(workplace, "medusa", *plain)
    run[run.index("--output_dir") + 1] = str(workplace / "served")
    assert main(["evaluate", "--fail-under", "medusa, tuned target:tau=1.01", *run]) == 0
    served = read_result(workplace / "served" / "evaluation" / "t0" / "result.json")
    decoded = read_result(medusa2 / "evaluation" / "t0" / "result.json").drafters[NAME]
    # The record of the heads names this target, whose own record names the original: as before the export, but for rounding.
    assert not served.warnings
    assert served.target.path == str((workplace / "target").resolve())
    exported = served.drafters["medusa, tuned target"]
    assert exported.draft is not None
    assert exported.draft.tuned
    assert exported.overall.tau == pytest.approx(decoded.overall.tau)
    for what in ("perplexity", "perplexity_baseline", "agreement", "kl"):
        assert getattr(exported.overall, what) == pytest.approx(getattr(decoded.overall, what), rel=1e-3), what
    assert exported.overall.lossless is not None
    assert exported.overall.lossless.equal == exported.overall.lossless.checked == 4
    # Finished, it stays though the original is gone.
    (workplace / "target").rename(workplace / "gone")
    capsys.readouterr()
    assert main(["evaluate", *run]) == 0
    assert "evaluate: reusing" in capsys.readouterr().err
    (workplace / "gone").rename(workplace / "target")
    # Simulated too; and where the original shall not be loaded, the report says what it lacks.
    assert main(["evaluate", "--no-decode", *run]) == 0
    simulated = read_result(workplace / "served" / "simulation" / "t0" / "result.json").drafters["medusa, tuned target"]
    assert simulated.overall.tau_simulated == pytest.approx(decoded.overall.tau)
    assert simulated.overall.kl == pytest.approx(decoded.overall.kl, rel=1e-3)
    assert main(["evaluate", "--no-decode", "--redo", "simulate", *run, "--evaluate.original", "false"]) == 0
    alone = read_result(workplace / "served" / "simulation" / "t0" / "result.json")
    (printed,) = alone.warnings
    assert f"the original ({(workplace / 'target').resolve()}), as evaluate.original is false" in printed
    assert (alone.target.path, alone.drafters["medusa"].overall.kl) == (str(export / "target"), None)
    # The adapter is in this target's weights already.
    run[run.index("--output_dir") + 1] = str(workplace / "twice")
    run[run.index("--head") + 1] = str(medusa2 / "train" / "best")
    capsys.readouterr()
    for command in (["evaluate", *run], ["search-tree", "--output", str(workplace / "tree.json"), *run]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"The weights of the target {export / 'target'} are not those the head" in said
        assert "texts stay exact" not in said
    assert not (workplace / "twice").exists()


def test_the_adapter_can_be_kept(workplace: Path, medusa2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ["--head", str(medusa2 / "train" / "best"), "--export.adapter", "keep"]
    run = words(workplace, "medusa2", *head)
    run[run.index("--output_dir") + 1] = str(workplace / "kept")
    assert main(["export", *run]) == 2
    assert "no engine that reads the layout 'medusa' drafts for a target with an adapter" in capsys.readouterr().err
    assert not (workplace / "kept").exists()
    assert main(["export", *run, "--export.layout", "medusa_vllm", "--export.engine_version", "vllm=0.33.0"]) == 0
    assert "warning: vLLM 0.33.0 does not load the layout medusa_vllm" in capsys.readouterr().err
    export = workplace / "kept" / "export"
    assert sorted(path.name for path in export.iterdir()) == ["adapter", "medusa_vllm"]
    config = json.loads((export / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((workplace / "target").resolve())
    text = (export / "medusa_vllm" / "README.md").read_text()
    assert "with the adapter in `../adapter`" in text
    assert f"--enable-lora --max-lora-rank 8 --lora-modules tuned={export / 'adapter'}" in text, "the rank is 4"
    assert "Requests must name the model `tuned`" in text
    capsys.readouterr()
    run = words(workplace, "medusa", "--export.adapter", "keep")
    for command in ("export", "run"):
        assert main([command, *run]) == 2
        said = capsys.readouterr().err
        assert "export.adapter is 'keep', but medusa heads come with no adapter: leave it out." in said
        run[run.index("--output_dir") + 1] = str(workplace / "never")
    assert not (workplace / "never").exists(), "refused before anything is made"
