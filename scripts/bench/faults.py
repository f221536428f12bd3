"""Kill runs at operations on files and at random times, and spoil their files: python -m scripts.bench.faults --kills 120 --random 80

Every spoilt run is finished by the plain command. Then nothing may be left over, and answers, hidden states, head, export and
every tau must equal those of a run that nothing happened to; a refusal in one sentence counts as named, never as different.
With --processes 2 a rank of `draftsmith train` is killed, the other is ended as launchers do, and every other time one process goes
on with the answers and hidden states before two train: to docs/results/faults-processes.json.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.cli.main import main as draftsmith
from draftsmith.data.embedded import SHIPPED, ensure_embedded
from draftsmith.storage import EARLIER
from scripts.bench.commands import facts_of, keep
from scripts.bench.killing import counted, in_children, kill_after, kill_at

RECIPE = (
    "--target.dtype float32 --data.limit 24 --data.max_length 96 --data.heldout 6 --answers.max_new_tokens 12 --answers.batch 6 "
    "--features.dtype float32 --head.layer_ids [0,1,2] --head.ttt_steps 2 --train.epochs 2 --train.row_tokens 96 --train.rows 2 "
    "--train.precision no --train.evaluations 2 --train.checkpoint_minutes 0.001 --evaluate.per_slice 1 --evaluate.repeats 1 "
    "--evaluate.max_new_tokens 8 --evaluate.max_k 2 --evaluate.num_speculative_tokens 2 --evaluate.dtype float32 "
    "--evaluate.generate false --evaluate.plan_batches [1]"
)
PRELOADED = ("draftsmith.stages.pipeline", "draftsmith.train.loop", "deepspeed")
"""What is imported once, before children are forked; the last is what Accelerate imports where it is installed."""
REDOS = ("", "answers", "features", "train", "evaluate", "export")
"""What the killed command makes again, "" for a first run."""
FOREIGN = ("train/best/mine.md", "evaluation/t0/mine.md", "export/eagle3/mine.md")
"""Files of the user's, in folders that stages make as a whole."""
LAYERS = 4
"""Of the target that ships with us, which has four times as many and takes four times as long."""


def save_target(folder: Path) -> int:
    """Write the first layers of the target that ships with us."""
    AutoModelForCausalLM.from_pretrained(SHIPPED, num_hidden_layers=LAYERS).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(folder)
    return 0


def command(run: Path, redo: str = "", name: str = "run") -> Callable[[], int]:
    """Return the work of `draftsmith NAME` in the folder `run`, on the target beside it."""
    texts = ensure_embedded()
    read = ("--data.sources", f'["{texts.conversations}"]', "--evaluate.prompts", f'["{texts.prompts}"]')
    words = [name, *RECIPE.split(), *read, "--target.path", str(run.parent / "target"), "--output_dir", str(run)]
    return lambda: draftsmith([*words, *(("--redo", redo) if redo else ())])


def outcome(run: Path) -> dict[str, Any]:
    """Return what a finished run is worth: digests of its lasting files, every tau, and what is left over."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    lasting = [path for path in files if path.suffix in (".safetensors", ".jsonl", ".bin") and "step_" not in str(path)]
    kept = [path for path in lasting if path.name != "metrics.jsonl"]  # which holds speeds
    digests = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}
    taus = {
        f"{path.parent.name} {name}": (drafter["overall"]["tau"], drafter["overall"]["tau_simulated"])
        for path in sorted(run.glob("evaluation/*/result.json"))
        for name, drafter in json.loads(path.read_text())["drafters"].items()
    }
    left = [str(path) for path in files if ".draftsmith-" in str(path) or EARLIER in path.parts]
    return {"digests": digests, "taus": taus, "left over": left}


def missing(run: Path, good: dict[str, str]) -> list[str]:
    """Return the files of a finished run that are nowhere in it any more, after the end of a command that makes some again."""
    there = {hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()}
    return [name for name, digest in good.items() if digest not in there]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x41
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "a byte flipped": _flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": Path.unlink,
    "a folder": _folder,
}
"""Ways to spoil a file, by the name in the report."""


@dataclass(frozen=True)
class Kill:
    """The end of a command that makes `redo` again: before the `operation`-th operation on files of its `rank`, or after some
    seconds."""

    redo: str
    operation: int | None
    seconds: float | None
    rank: int = 0

    def wrapped(self, run: Path, work: Callable[[], int]) -> Callable[[], int]:
        """Return `work` as a process does it that is killed so."""
        if self.operation is not None:
            return kill_at(self.operation, run, work)
        return kill_after(self.seconds or 0.0, work)

    def __str__(self) -> str:
        when = f"at operation {self.operation}" if self.operation is not None else f"after {self.seconds:.2f} s"
        return f"kill {when} of rank {self.rank}{f' --redo {self.redo}' if self.redo else ''}"


class Bench:
    """One finished run to copy from, and a table of what happened to the others."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._processes, self._name = processes, "run" if processes == 1 else "train"
        self.folder, self.log = folder, folder / "log.txt"
        self.whole = folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "link").symlink_to("run")
        self._ways = cycle((Path.absolute, lambda run: Path(os.path.relpath(run)), lambda run: run.with_name("link")))
        self._alone = cycle((True, False))
        if in_children(self.log, lambda: save_target(folder / "target")):
            raise SystemExit(f"the target cannot be written: {self.log} says why")
        if in_children(self.log, *self._works(self.whole)):
            raise SystemExit(f"the run that nothing happens to fails: {self.log} says why")
        self.good = outcome(self.whole)
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []

    def _works(self, run: Path, redo: str = "") -> list[Callable[[], int]]:
        """Return the work of each process of the command."""
        return [command(run, redo, self._name)] * self._processes

    def operations(self, redo: str) -> tuple[int, float]:
        """Return how many operations on files rank 0 of a command has, and the seconds that it takes."""
        run, number, begin = self._copy(redo), self.folder / "operations", time.monotonic()
        first, *others = self._works(run, redo)
        assert in_children(self.log, counted(run, number, first), *others) == 0
        return int(number.read_text()), time.monotonic() - begin

    def kill(self, one: Kill) -> None:
        """Kill one command, finish the run, and judge it."""
        run = self._copy(one.redo)
        works = self._works(run, one.redo)
        works[one.rank] = one.wrapped(run, works[one.rank])
        killed = in_children(self.log, *works) == -9
        self.counts["kills" if killed else "too late to kill"] += 1
        if one.redo and (lost := missing(run, self.good["digests"])):
            self._note(str(one), "missing", ", ".join(lost))
        self._judge(run, str(one))

    def damage(self, file: str, way: str) -> None:
        """Spoil one file of the finished run, run the command again, and judge it."""
        run = self._copy("damage")
        WAYS[way](run / file)
        self.counts["damages"] += 1
        self._judge(run, f"{file}: {way}", spoilt=file)

    def foreign(self, file: str) -> None:
        """Put a file of the user's into a folder that is made as a whole; --redo must name it and change nothing."""
        run = self._copy("foreign")
        (run / file).write_text("mine")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
        code, said = self._finish(run, "train")
        same = before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
        self.counts["files of others"] += 1
        if code == 2 and same and file in said:
            self.counts["named"] += 1
        else:
            self._note(f"{file} of the user's", f"exit code {code}, {'nothing' if same else 'something'} changed", said)

    def _note(self, what: str, verdict: str, said: str) -> None:
        self.counts[verdict] += 1
        self.findings.append({"what": what, "verdict": verdict, "said": said})
        tqdm.write(f"{what}: {verdict}: {said[:300]}")

    def _copy(self, redo: str) -> Path:
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        if redo:
            shutil.copytree(self.whole, run)
        return run

    def _judge(self, run: Path, what: str, spoilt: str | None = None) -> None:
        """Finish a run and count what it is worth then. A spoilt file must be named, or made again; one that no stage had to read
        stays, as hidden states whose head is trained, and must be named where one does."""
        code, said = self._finish(run)
        verdict = "named" if code == 2 and spoilt else f"exit code {code}"
        if code == 0:
            now, verdict = outcome(run), "equal"
            for key in self.good:
                if now[key] != self.good[key]:
                    verdict, said = f"different {key}", f"{now[key]}, not {self.good[key]}"
            if spoilt and now == self.good | {"digests": self.good["digests"] | {spoilt: now["digests"].get(spoilt)}}:
                code, said = (0, said) if verdict == "equal" else self._finish(run, "train")
                verdict = "named when it is read" if code == 2 else verdict
        if verdict == "equal":
            self.counts[verdict] += 1
        else:
            self._note(what, verdict, said.replace(f"{run}/", ""))

    def _finish(self, run: Path, redo: str = "") -> tuple[int, str]:
        """Run the command again, with each way to name the folder in turn; return its exit code and its sentence, else the last line."""
        way, code = next(self._ways)(run), 0
        way = way if way.exists() else run  # a link to nothing is refused
        if self._processes > 1 and next(self._alone):
            code = in_children(self.log, command(way, name="extract"))
        code = code or in_children(self.log, *self._works(way, redo))
        lines = self.log.read_text(errors="replace").strip().splitlines() or [""]
        return code, next((line for line in reversed(lines) if line.startswith("draftsmith: ")), lines[-1])


def main(argv: list[str]) -> int:
    """Run the bench; exit code 1 where anything is different or left over."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.faults", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="where the runs go; it is emptied")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="several are killed while they make data and train")
    parser.add_argument("--kills", type=int, default=120, help="kills at operations on files")
    parser.add_argument("--random", type=int, default=80, help="kills at random times")
    parser.add_argument("--minutes", type=float, default=1440, help="after which no other kill is begun")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args(argv)
    draw, begin = random.Random(own.seed), time.monotonic()
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    bench, several = Bench(own.folder, own.processes), own.processes > 1
    found = {redo: bench.operations(redo) for redo in (REDOS[:4] if several else REDOS)}
    # Kills at operations and at random times of commands, in any order.
    every = [(redo, number) for redo, (points, _) in found.items() for number in range(1, points + 1)]
    drawn = [Kill(redo, number, None) for redo, number in draw.sample(every, min(own.kills, len(every)))]
    for redo in draw.choices([*found], k=own.random):
        seconds = draw.uniform(0.05, found[redo][1])
        drawn.append(Kill(redo, None, seconds, draw.randrange(own.processes) if own.processes > 1 else 0))
    draw.shuffle(drawn)
    for one in tqdm(drawn, desc="kills", unit="kill"):
        if time.monotonic() - begin > own.minutes * 60:
            break
        bench.kill(one)
    paths = () if several else sorted(bench.whole.rglob("*"))  # whatever processes made them
    files = [str(p.relative_to(bench.whole)) for p in paths if p.is_file() and p.name != ".lock"]
    for file, way in tqdm([(file, way) for file in files for way in WAYS], desc="damage", unit="file"):
        bench.damage(file, way)
    for file in () if several else FOREIGN:
        bench.foreign(file)
    facts = facts_of("faults", argv) | {"operations": {redo or "first run": n for redo, (n, _) in found.items()}}
    output = own.output or Path(f"docs/results/faults{'-processes' if several else ''}.json")
    keep(output, facts | {"counts": bench.counts, "findings": bench.findings}, bench.counts)
    return int(any(not finding["verdict"].startswith("named") for finding in bench.findings))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
