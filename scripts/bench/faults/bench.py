"""The bench: kills at operations on files and at random times, and damage of every kind of file, in runs of one tiny recipe.

Every spoilt run is finished by the plain command. Then nothing may be left over, and answers, hidden states, head, export and
every tau must equal those of a run that nothing happened to; a refusal in one sentence counts as named, never as different.
"""

import argparse
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.cli.main import main as draftsmith
from draftsmith.eval.measure.machine import environment
from draftsmith.files import write_json
from scripts.bench.faults.damage import WAYS
from scripts.bench.faults.kills import counted, in_a_child, kill_after, kill_at

RECIPE = (
    *("--target.path", "embedded", "--target.dtype", "float32", "--data.limit", "24", "--data.max_length", "96"),
    *("--data.heldout", "6", "--answers.max_new_tokens", "12", "--answers.batch", "6", "--features.dtype", "float32"),
    *("--head.layer_ids", "[2,8,13]", "--head.ttt_steps", "2", "--train.epochs", "2", "--train.row_tokens", "96"),
    *(
        "--train.rows",
        "2",
        "--train.precision",
        "no",
        "--train.evaluations",
        "2",
        "--train.checkpoint_minutes",
        "0.001",
    ),
    *(
        "--evaluate.per_slice",
        "1",
        "--evaluate.repeats",
        "1",
        "--evaluate.max_new_tokens",
        "8",
        "--evaluate.max_k",
        "2",
    ),
    *("--evaluate.num_speculative_tokens", "2", "--evaluate.dtype", "float32", "--evaluate.generate", "false"),
)
REDOS = ("", "answers", "features", "train", "evaluate", "export")
"""What the killed command makes again, "" for a first run."""


def command(run: Path, redo: str = "") -> Callable[[], int]:
    """Return the work of `draftsmith run` in the folder `run`."""
    return lambda: draftsmith(["run", *RECIPE, "--output_dir", str(run), *(("--redo", redo) if redo else ())])


def outcome(run: Path) -> dict[str, Any]:
    """Return what a finished run is worth: digests of its lasting files, every tau, and what is left over."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    lasting = [path for path in files if path.suffix in (".safetensors", ".jsonl") and "step_" not in str(path)]
    digests = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in lasting
        if path.name != "metrics.jsonl"  # it holds speeds
    }
    taus = {
        f"{path.parent.name} {name}": (drafter["overall"]["tau"], drafter["overall"]["tau_simulated"])
        for path in sorted(run.glob("evaluation/*/result.json"))
        for name, drafter in json.loads(path.read_text())["drafters"].items()
    }
    return {"digests": digests, "taus": taus, "left over": [str(p) for p in files if ".draftsmith-" in str(p)]}


class Bench:
    """One finished run to copy from, and a table of what happened to the others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        self.whole = folder / "whole"
        if in_a_child(command(self.whole), self.log):
            raise SystemExit(f"the run that nothing happens to fails: {self.log} says why")
        self.good = outcome(self.whole)
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []

    def operations(self, redo: str) -> int:
        """Return how many operations on files a command has."""
        run, number = self._copy(redo), self.folder / "operations"
        assert in_a_child(counted(run, number, command(run, redo)), self.log) == 0
        return int(number.read_text())

    def kill(self, redo: str, how: str, wrap: Callable[[Path, Callable[[], int]], Callable[[], int]]) -> None:
        """Kill one command, finish the run, and judge it."""
        run = self._copy(redo)
        killed = in_a_child(wrap(run, command(run, redo)), self.log) == -9
        self.counts["kills" if killed else "too late to kill"] += 1
        self._judge(run, f"{how} of run{f' --redo {redo}' if redo else ''}", refusal_is_fine=False)

    def damage(self, file: str, way: str) -> None:
        """Spoil one file of the finished run, run the command again, and judge it."""
        run = self._copy("damage")
        WAYS[way](run / file)
        self.counts["damages"] += 1
        self._judge(run, f"{file}: {way}", refusal_is_fine=True)

    def _copy(self, redo: str) -> Path:
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        if redo:
            shutil.copytree(self.whole, run)
        return run

    def _judge(self, run: Path, what: str, refusal_is_fine: bool) -> None:
        code = in_a_child(command(run), self.log)
        said = (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        verdict = "named" if code == 2 and refusal_is_fine else f"exit code {code}"
        if code == 0:
            now, verdict = outcome(run), "equal"
            for key in self.good:
                if now[key] != self.good[key]:
                    verdict, said = f"different {key}", f"{now[key]}, not {self.good[key]}"
        self.counts[verdict] += 1
        if verdict != "equal":
            said = said.replace(f"{run}/", "")
            self.findings.append({"what": what, "verdict": verdict, "said": said})
            tqdm.write(f"{what}: {verdict}: {said[:300]}")


def main(argv: list[str]) -> int:
    """Run the bench; exit code 1 where anything is different or left over."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.faults", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="where the runs go")
    parser.add_argument("--output", type=Path, default=Path("docs/results/faults.json"))
    parser.add_argument("--kills", type=int, default=120, help="kills at operations on files")
    parser.add_argument("--random", type=int, default=80, help="kills at random times")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args(argv)
    draw = random.Random(own.seed)
    own.folder.mkdir(parents=True, exist_ok=True)
    import_module("draftsmith.stages.pipeline")  # once, before the children are forked
    bench = Bench(own.folder)
    points = {redo: bench.operations(redo) for redo in REDOS}
    every = [(redo, number) for redo in REDOS for number in range(1, points[redo] + 1)]
    for redo, number in tqdm(draw.sample(every, min(own.kills, len(every))), desc="kills", unit="kill"):
        bench.kill(redo, f"kill at operation {number}", partial(kill_at, number))
    for _ in tqdm(range(own.random), desc="random kills", unit="kill"):
        redo, seconds = draw.choice(REDOS), draw.uniform(0.05, 6)
        bench.kill(redo, f"kill after {seconds:.2f} s", partial(kill_after, seconds))
    files = [
        str(p.relative_to(bench.whole)) for p in sorted(bench.whole.rglob("*")) if p.is_file() and p.name != ".lock"
    ]
    for file, way in tqdm([(file, way) for file in files for way in WAYS], desc="damage", unit="file"):
        bench.damage(file, way)
    facts = environment()
    command = f"python -m scripts.bench.faults --kills {own.kills} --random {own.random} --seed {own.seed}"
    facts |= {"command": command, "hardware": asdict(facts["hardware"])}
    write_json(own.output, {**facts, "operations": points, "counts": bench.counts, "findings": bench.findings})
    print(json.dumps(bench.counts, indent=2))
    return int(any(finding["verdict"] != "named" for finding in bench.findings))
