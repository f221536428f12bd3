"""Two processes give the trajectory of one with twice the accumulation, through the real command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.cli import main
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_are_one_with_twice_the_accumulation(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.08).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": [{"role": "user", "content": f"question {i}?"}]} for i in range(40)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": {"path": str(tmp_path / "target"), "device": "cpu"},
        "data": {"sources": [str(tmp_path / "talk.jsonl")], "heldout": 8, "max_length": 128},
        "answers": {"max_new_tokens": 12, "batch": 8},
        "head": {"layer_ids": [2, 4, 6], "ttt_steps": 3},
        # An odd number of micro-batches, so that a filler completes the last window; checkpoints all the time.
        "train": {
            "epochs": 2,
            "row_tokens": 64,
            "rows": 1,
            "lr": 1e-3,
            "precision": "no",
            "evaluations": 2,
            "checkpoint_minutes": 0.001,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--recipe", str(tmp_path / "recipe.yaml"), "--output_dir"]
    assert main(["train", *words, str(tmp_path / "one"), "--train.accumulation", "2"]) == 0

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launch, "train/eagle.py", *words, str(tmp_path / "two")]
    # Gloo sometimes aborts when the interpreters exit, after all is done: the files are the judge.
    subprocess.run(command, cwd=ROOT, env=environment, timeout=240, capture_output=True, check=False)
    one, two = (
        [json.loads(line) for line in (tmp_path / run / "train" / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    )
    windows = [json.loads((tmp_path / run / "train" / "summary.json").read_text())["window"] for run in ("one", "two")]
    assert windows == [2, 2], "two processes with accumulation 1, or one with 2"
    assert [x["loss"] for x in two] == pytest.approx([x["loss"] for x in one], rel=1e-5)
    assert [x["tau"] for x in two if "tau" in x] == [x["tau"] for x in one if "tau" in x]
