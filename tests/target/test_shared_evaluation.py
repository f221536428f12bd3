"""Processes that share a target measure what one process measures, and end together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

import draftsmith
from draftsmith.cli.main import main
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.registry import methods
from draftsmith.train.process import INTERRUPTED
from tests.helpers import hearing_signals, save_target
from tests.target.test_shared_stages import TWO, make_recipe
from tests.train.runs import ROOT, launch_several

pytestmark = pytest.mark.slow

SHARED = ["--target.tensor_parallel", "2"]
COUNTED = [
    "prompts",
    "tokens",
    "rounds",
    "tau",
    "tau_simulated",
    "acceptance_rate",
    "acceptance_at",
    "acceptance_at_simulated",
    "looping",
]


@pytest.fixture(scope="module", name="recipe")
def _recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with prompts to measure a head on, which lies beside it in `head`."""
    folder = tmp_path_factory.mktemp("measured")
    save_target(folder / "target", initializer_range=0.08, num_hidden_layers=4)  # each takes two exchanges a pass
    file = make_recipe(folder)
    recipe = yaml.safe_load(file.read_text())
    prompts = [{"id": i, "slice": i, "messages": [{"role": "user", "content": f"question {i}?"}]} for i in "ab"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    recipe["evaluate"] = {
        "prompts": [str(folder / "prompts.jsonl")],
        "max_new_tokens": 8,
        "temperatures": [0.0, 0.7],
        "num_speculative_tokens": 2,
        "max_k": 2,
        "repeats": 1,
        # Decisions by a clock: how often steps are timed, and the draft length that costs make the fastest.
        "plan_contexts": [16],
        "plan_batches": [1],
    }
    file.write_text(yaml.safe_dump(recipe))
    target = draftsmith.load_target(folder / "target")
    method = methods()["eagle3"]
    save_head(method.build(method.options_class(layer_ids=[1, 2, 3]), target, None), folder / "head", target)
    return file


def words(recipe: Path, name: str, *more: str) -> list[str]:
    own = ["--recipe", str(recipe), "--head", str(recipe.parent / "head"), "--output_dir", str(recipe.parent / name)]
    return ["evaluate", *own, *more]


def results(recipe: Path, name: str) -> list[dict[str, Any]]:
    files = sorted((recipe.parent / name / "evaluation").glob("*/result.json"))
    return [json.loads(file.read_text()) for file in files]


def texts(result: dict[str, Any]) -> list[list[str]]:
    return [[piece["text"] for piece in example["pieces"]] for example in result["examples"]]


def test_two_processes_measure_what_one_does(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of the two has
    assert main(words(recipe, "one")) == 0
    torch.set_num_threads(threads)
    capfd.readouterr()
    assert main(words(recipe, "two", *SHARED, "--launch", TWO, "--fail-under", "eagle3:tau_simulated@T0.7=1.0001")) == 0
    said = capfd.readouterr()
    folder = recipe.parent / "two" / "evaluation"
    assert said.out.splitlines()[-2:] == [str(folder / heat / "result.json") for heat in ("t0", "t0.7")]
    assert "gate: passed" in said.err
    assert "target shared by" in (folder / "report.md").read_text()
    ones, twos = results(recipe, "one"), results(recipe, "two")
    assert [x["settings"]["temperature"] for x in twos] == [0.0, 0.7]
    for one, two in zip(ones, twos, strict=True):
        assert (two["target"], two["settings"]) == (one["target"], one["settings"])
        assert texts(two) == texts(one) != []
        (ours,), (theirs,) = two["drafters"].values(), one["drafters"].values()
        for name in COUNTED:
            assert ours["overall"][name] == pytest.approx(theirs["overall"][name], rel=1e-5), name
        assert ours["overall"]["lossless"] == theirs["overall"]["lossless"]
        assert two["costs"]["verify_ms"].keys() == one["costs"]["verify_ms"].keys()
    assert json.loads((folder / "costs.json").read_text())["points"]
    assert not list(folder.glob("*/parts.journal"))


def test_one_process_exports_without_sharing(recipe: Path) -> None:
    assert main(["export", *words(recipe, "exported", *SHARED)[1:]]) == 0
    assert (recipe.parent / "exported" / "export" / "eagle3" / "model.safetensors").is_file()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_ends_both_with_its_sentence(rank: int, recipe: Path) -> None:
    commands, name = recipe.parent / f"commands-{rank}.json", f"failed-{rank}"
    commands.write_text(json.dumps([words(recipe, name, *SHARED, "--evaluate.plan_batches", "[]")]))
    environment, began = {"ACCELERATE_USE_CPU": "true", "FAIL": str(rank)}, time.monotonic()
    said = launch_several(2, ["-m", "tests.target.shared", str(commands)], environment)
    assert time.monotonic() - began < 120  # the operations that it leaves the other in wait for half an hour
    assert said.count("draftsmith: The second group of prompts is damaged: mend it.") == 1, said
    folder = recipe.parent / name / "evaluation" / "t0"
    assert [file.name for file in folder.iterdir()] == ["parts.journal"]  # what rank 0 goes on from


@hearing_signals()
def test_ctrl_c_ends_all_processes(recipe: Path) -> None:
    command = words(recipe, "stopped", *SHARED, "--launch", TWO, "--evaluate.repeats", "50")
    started = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli.main", *command, "--evaluate.plan_batches", "[]"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    journal = recipe.parent / "stopped" / "evaluation" / "t0" / "parts.journal"
    deadline = time.monotonic() + 300
    while not journal.exists():
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    others = psutil.Process(started.pid).children(recursive=True)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert [line for line in said.replace("\r", "\n").splitlines() if line.startswith("draftsmith: ")] == [
        f"draftsmith: {INTERRUPTED}"
    ]
    assert not psutil.wait_procs(others, timeout=10)[1]
