"""Stages whose target several processes hold together make what one process makes: answers, stored states, and a head trained online."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, StableLmConfig

from draftsmith.cli import launching
from draftsmith.cli.main import main
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.cost_table import CostPoint
from draftsmith.eval.clocks.costs import measure_table
from draftsmith.eval.results.result import TargetInfo
from draftsmith.stages import evaluation
from draftsmith.target.target import Target
from tests.helpers import save_target
from tests.models import tiny_model
from tests.train.runs import ROOT, launch_several

TWO = str(ROOT / "recipes" / "accelerate" / "ddp-2cpu.yaml")


def make_recipe(folder: Path, **target: Any) -> Path:
    """Write a recipe and what it names; the target is there, or a tiny Llama is made."""
    if not (folder / "target").exists():
        save_target(folder / "target", initializer_range=0.08)
    rows = [{"messages": [{"role": "user", "content": f"question {i}?"}]} for i in range(14)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": {"path": str(folder / "target"), "device": "cpu", **target},
        "data": {"sources": [str(folder / "talk.jsonl")], "heldout": 3, "max_length": 128},
        # Several chunks and passes, which groups share out.
        "answers": {"max_new_tokens": 6, "batch": 1},
        "features": {"batch_tokens": 64},
        "method": "eagle3",
        "train": {
            "row_tokens": 64,
            "rows": 1,
            "max_steps": 2,
            "evaluations": 1,
            "precision": "no",
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def commands(recipe: Path, name: str, *more: str) -> list[list[str]]:
    """Return the commands that store answers and states, and train online from the same answers."""
    data = ["--data_dir", str(recipe.parent / name)]
    own = ["--recipe", str(recipe), *more]
    return [
        ["extract", *own, "--output_dir", str(recipe.parent / name)],
        ["train", *own, *data, "--output_dir", str(recipe.parent / f"{name}-online"), "--features.source", "online"],
    ]


@pytest.mark.slow
def test_two_groups_of_two_processes_make_what_one_does(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    for words in commands(recipe, "one", "--train.accumulation", "4"):
        assert main(words) == 0
    together = tmp_path / "commands.json"
    together.write_text(json.dumps(commands(recipe, "several", "--target.tensor_parallel", "2")))
    environment = {"ACCELERATE_USE_CPU": "true"}
    said = launch_several(4, ["-m", "tests.target.shared", str(together)], environment)
    one, several = (tmp_path / name for name in ("one", "several"))
    assert (several / "answers.jsonl").read_bytes() == (one / "answers.jsonl").read_bytes(), said
    files = [sorted(file.name for file in (made / "features").iterdir()) for made in (one, several)]
    assert files[0] == files[1]
    for file in (one / "features").glob("*.safetensors"):
        ours = load_file(several / "features" / file.name)
        for key, value in load_file(file).items():
            most = 1e-5 * float(value.float().abs().max())
            assert float((ours[key].float() - value.float()).abs().max()) <= most, key
    metrics, heads = [], []
    for made in ("one-online", "several-online"):
        folder = tmp_path / made / "train"
        assert (folder / "summary.json").exists(), said
        metrics.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
        heads.append(load_file(folder / "best" / "model.safetensors"))
    for name in ("loss", "heldout_loss"):
        values = [[one[name] for one in lines if name in one] for lines in metrics]
        assert values[1] == pytest.approx(values[0], rel=1e-5), name
        assert values[0]
    assert all(float((heads[1][key] - value).abs().max()) < 1e-5 for key, value in heads[0].items())


@pytest.mark.parametrize(
    ("command", "options", "why"),
    [
        ("extract", [], "target.tensor_parallel is 2, but this is one process: `draftsmith run`, `regenerate`, `extract`, `train` and"),
        ("inspect", [], "target.tensor_parallel is 2, but this is one process"),
        ("evaluate", ["--launch", TWO, "--target.tensor_parallel", "1"], "measures in one process, and in several only where these share"),
        ("extract", ["--launch", TWO, "--target.tensor_parallel", "3"], "ddp-2cpu.yaml has num_processes: 2: take a multiple of 3."),
        ("train", ["--target.gpus", "2"], "target.gpus is 2: but target.tensor_parallel takes a GPU for each process: leave one of the two out."),
        ("train", ["--method", "medusa2"], "heads of method: medusa2 take the target's layers whole: set target.gpus in its place."),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_sentence(
    command: str,
    options: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "run_launcher", None)
    recipe = make_recipe(tmp_path, tensor_parallel=2)
    assert main([command, "--recipe", str(recipe), "--output_dir", str(tmp_path / "run"), *options]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert len(said) == 1
    assert why in said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_target_that_cannot_be_split_leaves_the_disk_as_it_is(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vocab_size = json.loads((tmp_path / "target" / "config.json").read_text())["vocab_size"]
    config = StableLmConfig(num_key_value_heads=2, vocab_size=vocab_size, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    together = tmp_path / "commands.json"
    (extract, _) = commands(make_recipe(tmp_path), "several", "--target.tensor_parallel", "2")
    together.write_text(json.dumps([extract]))
    said = launch_several(2, ["-m", "tests.target.shared", str(together)], {"ACCELERATE_USE_CPU": "true"})
    assert said.count("transformers has no plan for models of type 'stablelm'") >= 1
    assert not (tmp_path / "several").exists()


def test_costs_are_those_of_rank_0_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    point = CostPoint(1, 8, {"1": 5.0, "64": 7.0}, {}, {}, {"": 1.0})
    told = {dict: asdict(point), int: 3, bool: False}  # a point, how often it is timed, whether the next one fits
    monkeypatch.setattr(Target, "agreed", lambda self, make: told[type(make())])
    target, places = Target(tiny_model("llama"), path="tiny", fingerprint="0"), {(1, 8), (2, 8)}
    table = measure_table(target, TargetInfo("tiny"), [], [3, 5], [Sampling()], places=places, command="", seconds=0.01)
    assert (table.points, table.too_large) == ((point,), ((2, 8),))


def test_others_than_rank_0_read_its_journal_and_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = SimpleNamespace(rank=1, size=2, tell=lambda make: {"picks": [["eagle3", 2]]})
    monkeypatch.setattr(evaluation, "team", lambda: others)
    journal = evaluation._journal(tmp_path / "result.json")
    assert journal.get("picks") == [["eagle3", 2]]
    journal.add("costs", {})
    assert not list(tmp_path.iterdir())
