"""Medusa-2 from a Medusa-1 head to a report that compares the tuned target with the original, and to both exports."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.eval.results.result import read_result
from draftsmith.target.target import load_target
from tests.workplace import make_workplace

pytestmark = pytest.mark.slow

NAME = "medusa2, tuned target"
# With a penalty, so that it must be the same wherever texts are compared.
ANSWERS = ["--evaluate.max_new_tokens", "12", "--evaluate.repetition_penalty", "1.5"]


def words(workplace: Path, method: str, *more: str) -> list[str]:
    """The arguments for a run of a method of the workplace's recipe, in the folder of its name."""
    text = (workplace / "recipe.yaml").read_text().replace("name: mini", f"name: mini\nmethod: {method}")
    head = text[text.index("head:") : text.index("name:")] if text.index("head:") < text.index("name:") else ""
    own = {"medusa": "{num_heads: 3}", "medusa2": "{num_heads: 3, lora_r: 4, adapter_lr: 1.0}"}[method]
    (workplace / f"{method}.yaml").write_text(text.replace(head, f"head: {own}\n"))
    data = [] if method == "medusa" else ["--data_dir", str(workplace / "medusa")]
    return ["--recipe", str(workplace / f"{method}.yaml"), "--output_dir", str(workplace / method), *data, *more]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage of Medusa-2, started from a Medusa-1 head and compared with it."""
    torch.set_num_threads(1)
    folder = make_workplace(tmp_path_factory.mktemp("medusa2"))
    assert main(["train", *words(folder, "medusa")]) == 0
    more = ["--train.warm_start", str(folder / "medusa"), "--evaluate.beside.plain", str(folder / "medusa")]
    more += ["--train.loss.ramp", "0.5", "--train.lr", "5e-3", "--evaluate.repeats", "1"]
    more += [*ANSWERS, "--evaluate.generate", "false"]
    assert main(["run", "--fail-under", f"{NAME}:tau=1.01", *words(folder, "medusa2", *more)]) == 0
    return folder


@pytest.mark.slow
def test_training_says_how_far_the_target_has_moved(workplace: Path) -> None:
    lines = (workplace / "medusa2" / "train" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["heldout_tuned"]["kl"] == pytest.approx(0.0, abs=1e-4), "the adapter starts from nothing"
    assert records[1]["tuned"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert records[-1]["tuned"]["kl"] > 1e-4
    held = [record for record in records if "tau" in record]
    assert all(0 <= record["heldout_tuned"]["agreement"] <= 1 for record in held)
    first = json.loads((workplace / "medusa" / "train" / "metrics.jsonl").read_text().splitlines()[0])
    assert "tuned" not in first


def test_the_report_compares_with_the_original(workplace: Path) -> None:
    for temperature in (0, 1):
        result = read_result(workplace / "medusa2" / "evaluation" / f"t{temperature}" / "result.json")
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
    report = (workplace / "medusa2" / "evaluation" / "report.md").read_text()
    assert "Tuned targets against the original" in report
    assert "It changes the target" in report
    assert "equal those of the tuned target alone" in report


def test_simulation_lets_the_tuned_target_answer(workplace: Path) -> None:
    more = ["--evaluate.temperatures", "[0.0]", *ANSWERS]
    more += ["--head", str(workplace / "medusa2" / "train" / "best"), "--name", "simulated"]
    run = ["--no-decode", *words(workplace, "medusa2", *more)]
    run[run.index("--output_dir") + 1] = str(workplace / "simulated")
    assert main(["evaluate", *run]) == 0
    simulated = read_result(workplace / "simulated" / "simulation" / "t0" / "result.json").drafters[NAME].overall
    decoded = read_result(workplace / "medusa2" / "evaluation" / "t0" / "result.json").drafters[NAME].overall
    assert simulated.tau_simulated == pytest.approx(decoded.tau, abs=1e-9)
    assert simulated.kl == pytest.approx(decoded.kl, rel=1e-3)
    assert simulated.perplexity == pytest.approx(decoded.perplexity, rel=1e-4)


def test_the_export_is_a_medusa_head_of_a_target_of_its_own(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = workplace / "medusa2" / "export"
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
    decoded = read_result(workplace / "medusa2" / "evaluation" / "t0" / "result.json").drafters[NAME]
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
    run[run.index("--head") + 1] = str(workplace / "medusa2" / "train" / "best")
    capsys.readouterr()
    for command in (["evaluate", *run], ["search-tree", "--output", str(workplace / "tree.json"), *run]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"The weights of the target {export / 'target'} are not those the head" in said
        assert "texts stay exact" not in said
    assert not (workplace / "twice").exists()


def test_the_adapter_can_be_kept(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ["--head", str(workplace / "medusa2" / "train" / "best"), "--export.adapter", "keep"]
    run = words(workplace, "medusa2", *head)
    run[run.index("--output_dir") + 1] = str(workplace / "kept")
    assert main(["export", *run]) == 2
    assert "no engine that reads the layout 'medusa' drafts for a target with an adapter" in capsys.readouterr().err
    assert not (workplace / "kept").exists()
    assert main(["export", *run, "--export.layout", "medusa_vllm"]) == 0
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
