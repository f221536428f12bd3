"""A tiny run for tests of several processes: prepared once, trained by one process, to be trained by two."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from draftsmith.cli.main import main
from draftsmith.heads.registry import methods
from draftsmith.train.checkpoints import latest_checkpoint
from tests.helpers import save_target
from tests.models import SMALL_HEADS

ROOT = Path(__file__).resolve().parents[2]
_CHANCE = {
    "dflash": {"anchors": 3},
    "dflash2": {"anchors": 3},
    "domino": {"anchors": 3},
    "xpress": {"anchors": 3},
    "dspark": {"anchors": 3},
    "eagle1": {"aligned_passes": 2, "noise": 0.1},
    "hydra": {"dropout": 0.2},
    "jetspec": {"anchors": 3},
    "medusa2": {"lora_dropout": 0.2},
    "mtp": {"qk_norm": False},
}
"""What leaves something to chance, which must not depend on the number of processes; MTP's layer is made like the target's."""
_LOSSES = {"dflash": {"kind": "hard_ce", "slot_weights": "dpace", "normalize": "weights"}}
"""A loss that is divided once all passes of a step are done."""
HEADS = {method: SMALL_HEADS.get(method, {}) | _CHANCE.get(method, {}) for method in methods()}


@dataclass(frozen=True)
class TinyRun:
    """`folder`/one is the run of one process with accumulation 2; `method` and its recipe are fixed."""

    folder: Path
    method: str

    def words(self, name: str) -> list[str]:
        """Return the arguments that train run `name`."""
        return ["--recipe", str(self.folder / "recipe.yaml"), "--output_dir", str(self.folder / name)]

    def copy(self, name: str) -> None:
        """Give run `name` the answers and hidden states of `one`, but no training."""
        shutil.copytree(self.folder / "one", self.folder / name)
        shutil.rmtree(self.folder / name / "train")

    def launch(self, name: str, script: list[str], environment: Mapping[str, str]) -> str:
        """Train run `name` in two processes with accumulation 1; return what they said. The files are the judge."""
        return launch_two([*script, *self.words(name)], environment)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the metrics of run `name`."""
        file = self.folder / name / "train" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def progress(self, name: str) -> dict[str, Any]:
        """Return what the last checkpoint of run `name` says."""
        folder = latest_checkpoint(self.folder / name / "train")
        assert folder is not None
        return json.loads((folder / "progress.json").read_text(encoding="utf-8"))

    def check_same(self, name: str) -> None:
        """The losses, taus and best head of run `name` are those of one process."""
        one, two = self.metrics("one"), self.metrics(name)
        # Sums in another order differ by 1e-5 after 32 steps on some processors; a row or a rate that is wrong by far more.
        assert [x["loss"] for x in two] == pytest.approx([x["loss"] for x in one], rel=5e-5)
        taus = [[x["tau"]["overall"] for x in metrics if "tau" in x] for metrics in (one, two)]
        assert taus[1] == pytest.approx(taus[0], rel=5e-5)
        heads = [load_file(self.folder / run / "train" / "best" / "model.safetensors") for run in ("one", name)]
        assert heads[0].keys() == heads[1].keys()
        for key, value in heads[0].items():
            assert heads[1][key].dtype == value.dtype, key
            assert float((heads[1][key] - value).abs().max()) < 5e-5, key

    def check_heldout(self, name: str) -> None:
        """Bit by bit, the figures of held-out answers that two processes share are those of one, and each makes half the passes."""
        ranks = [json.loads((self.folder / name / f"heldout-{rank}.json").read_text()) for rank in (0, 1)]
        calibrations = ["calibrate_best"] if self.method == "dspark" else []
        for noted in zip(*ranks, strict=True):
            (first, every), (second, _) = (one["passes"] for one in noted)
            assert first + second == every > 1
            assert first - second in (0, 1)
            assert noted[0]["shared"] == noted[0]["alone"] == noted[1]["shared"] == noted[1]["alone"]
        assert [one["what"] for one in ranks[0]][-1 - len(calibrations) :] == ["evaluate_heldout", *calibrations]
        last = self.metrics(name)[-1]
        held = ranks[0][-1 - len(calibrations)]["shared"]
        assert (last["heldout_loss"], last["tau"]["overall"]) == (held["loss"], held["tau"])


def launch_two(script: list[str], environment: Mapping[str, str]) -> str:
    """Run a script in two processes; return the end of what they said."""
    return launch_several(2, script, environment)


def launch_several(processes: int, script: list[str], environment: Mapping[str, str]) -> str:
    """Run a script in so many processes; return the end of what they said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=480, capture_output=True, text=True, check=False)
    return done.stderr[-4000:]


def make_run(folder: Path, method: str = "eagle3") -> TinyRun:
    """Make answers and hidden states, and train `folder`/one."""
    folder.mkdir(exist_ok=True)
    save_target(folder / "target", initializer_range=0.08)
    rows = [{"messages": [{"role": "user", "content": f"question {i}?"}]} for i in range(40)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": {"path": str(folder / "target"), "device": "cpu"},
        "data": {"sources": [str(folder / "talk.jsonl")], "heldout": 8, "max_length": 128},
        "answers": {"max_new_tokens": 12, "batch": 8},
        "features": {"layer_ids": [2, 4, 6]},
        "method": method,
        "head": HEADS[method],
        # An odd number of micro-batches, so that a filler completes the last window; gradients that are clipped to the
        # size of AdamW's epsilon, as it would undo any milder clipping.
        "train": {
            "epochs": 2,
            "row_tokens": 64,
            "rows": 1,
            "lr": 1e-3,
            "clip": 1e-5,
            "precision": "no",
            "evaluations": 2,
            "loss": _LOSSES.get(method, {}),
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = TinyRun(folder, method)
    assert main(["train", *run.words("one"), "--train.accumulation", "2"]) == 0
    return run
