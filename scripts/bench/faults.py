"""Kill runs at operations on files and at random times, and spoil their files: python -m scripts.bench.faults --kills 120 --random 80

Every spoilt run is finished by the plain command. Then nothing may be left over, and answers, hidden states, head, export and
every tau must equal those of a run that nothing happened to; a refusal in one sentence counts as named, never as different.
"""

import argparse
import hashlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import sys
import threading
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
from draftsmith.machine import environment_json
from draftsmith.storage import EARLIER, write_json
from draftsmith.train.process import end_with_parent

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
OPERATIONS = ("unlink", "rmdir", "rename", "replace", "mkdir", "fsync", "open")
"""What is counted: each may be the last thing that a process does."""


def save_target(folder: Path) -> int:
    """Write the first layers of the target that ships with us."""
    AutoModelForCausalLM.from_pretrained(SHIPPED, num_hidden_layers=LAYERS).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(folder)
    return 0


def command(run: Path, redo: str = "") -> Callable[[], int]:
    """Return the work of `draftsmith run` in the folder `run`, on the target beside it."""
    texts = ensure_embedded()
    read = ("--data.sources", f'["{texts.conversations}"]', "--evaluate.prompts", f'["{texts.prompts}"]')
    words = ["run", *RECIPE.split(), *read, "--target.path", str(run.parent / "target"), "--output_dir", str(run)]
    return lambda: draftsmith([*words, *(("--redo", redo) if redo else ())])


def outcome(run: Path) -> dict[str, Any]:
    """Return what a finished run is worth: digests of its lasting files, every tau, and what is left over."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    lasting = [path for path in files if path.suffix in (".safetensors", ".jsonl", ".bin") and "step_" not in str(path)]
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
    left = [str(path) for path in files if ".draftsmith-" in str(path) or EARLIER in path.parts]
    return {"digests": digests, "taus": taus, "left over": left}


def missing(run: Path, good: dict[str, str]) -> list[str]:
    """Return the files of a finished run that are nowhere in it any more, after the end of a command that makes some again."""
    there = {hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()}
    return [name for name, digest in good.items() if digest not in there]


def in_a_child(work: Callable[[], int], log: Path) -> int:
    """Run `work` in a forked copy of this process; return its exit code, -9 where it was killed. Its output goes to `log`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            end_with_parent()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
            code = work()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException as error:  # noqa: BLE001 - a traceback is a finding, not an end of the bench
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at(number: int, inside: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that is killed just before its `number`-th operation in the folder `inside`."""

    def killed() -> int:
        _count(inside, lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == number else None)
        return work()

    return killed


def counted(inside: Path, into: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that writes the number of its operations in `inside` to the file `into`."""

    def counting() -> int:
        seen = [0]
        _count(inside, lambda count: seen.__setitem__(0, count))
        code = work()
        into.write_text(str(seen[0]))
        return code

    return counting


def kill_after(seconds: float, inside: Path, work: Callable[[], int]) -> Callable[[], int]:
    """Return `work` as a process does it that is killed after some time, whatever it does in `inside`."""

    def killed() -> int:
        def strike() -> None:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
        return work()

    return killed


def _count(inside: Path, tell: Callable[[int], Any]) -> None:
    """Call `tell` with 1, 2, ... before every operation of this process on a path in the folder `inside`."""
    count = [0]
    folder = str(inside.absolute())

    def wrap(real: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and _within(folder, args[0], kwargs.get("dir_fd")) and writes(*args, **kwargs):
                count[0] += 1
                tell(count[0])
            return real(*args, **kwargs)

        return wrapped

    for name in OPERATIONS[:-1]:
        setattr(os, name, wrap(getattr(os, name), lambda *args, **kwargs: True))
    os.open = wrap(os.open, lambda path, flags, *rest, **kwargs: bool(flags & (os.O_WRONLY | os.O_RDWR)))
    opened = wrap(io.open, lambda path, mode="r", *rest, **kwargs: any(letter in mode for letter in "wax+"))
    io.open = opened


def _within(folder: str, path: Any, dir_fd: int | None) -> bool:
    """Return whether an operation's path, or its open file, lies in the folder."""
    if isinstance(path, int):
        path = f"/proc/self/fd/{path}"
        path = os.readlink(path) if os.path.islink(path) else ""
    elif dir_fd is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))
    return os.path.abspath(os.fsdecode(path)).startswith(folder)


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
    """The end of a command that makes `redo` again: before its `operation`-th operation on files, or after some seconds."""

    redo: str
    operation: int | None
    seconds: float | None

    def wrapped(self, run: Path, work: Callable[[], int]) -> Callable[[], int]:
        """Return `work` as a process does it that is killed so."""
        if self.operation is not None:
            return kill_at(self.operation, run, work)
        return kill_after(self.seconds or 0.0, run, work)

    def __str__(self) -> str:
        when = f"at operation {self.operation}" if self.operation is not None else f"after {self.seconds:.2f} s"
        return f"kill {when} of run{f' --redo {self.redo}' if self.redo else ''}"


class Bench:
    """One finished run to copy from, and a table of what happened to the others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        self.whole = folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "link").symlink_to("run")
        self._ways = cycle((Path.absolute, lambda run: Path(os.path.relpath(run)), lambda run: run.with_name("link")))
        if in_a_child(lambda: save_target(folder / "target"), self.log):
            raise SystemExit(f"the target cannot be written: {self.log} says why")
        if in_a_child(command(self.whole), self.log):
            raise SystemExit(f"the run that nothing happens to fails: {self.log} says why")
        self.good = outcome(self.whole)
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, str]] = []

    def operations(self, redo: str) -> tuple[int, float]:
        """Return how many operations on files a command has, and the seconds that it takes."""
        run, number, begin = self._copy(redo), self.folder / "operations", time.monotonic()
        assert in_a_child(counted(run, number, command(run, redo)), self.log) == 0
        return int(number.read_text()), time.monotonic() - begin

    def kill(self, one: Kill) -> None:
        """Kill one command, finish the run, and judge it."""
        run = self._copy(one.redo)
        killed = in_a_child(one.wrapped(run, command(run, one.redo)), self.log) == -9
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
        """Run the command again, with each way to name the folder in turn; return its exit code and last line."""
        code = in_a_child(command(next(self._ways)(run), redo), self.log)
        return code, (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]


def draw_kills(draw: random.Random, found: dict[str, tuple[int, float]], kills: int, at_times: int) -> list[Kill]:
    """Return kills at operations and at random times of commands, of which `found` says how many operations and seconds they
    have, in any order."""
    every = [(redo, number) for redo, (points, _) in found.items() for number in range(1, points + 1)]
    drawn = [Kill(redo, number, None) for redo, number in draw.sample(every, min(kills, len(every)))]
    for redo in draw.choices(REDOS, k=at_times):
        drawn.append(Kill(redo, None, draw.uniform(0.05, found[redo][1])))
    draw.shuffle(drawn)
    return drawn


def main(argv: list[str]) -> int:
    """Run the bench; exit code 1 where anything is different or left over."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.faults", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="where the runs go; it is emptied")
    parser.add_argument("--output", type=Path, default=Path("docs/results/faults.json"))
    parser.add_argument("--kills", type=int, default=120, help="kills at operations on files")
    parser.add_argument("--random", type=int, default=80, help="kills at random times")
    parser.add_argument("--minutes", type=float, default=1440, help="after which no other kill is begun")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args(argv)
    draw, begin = random.Random(own.seed), time.monotonic()
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    bench = Bench(own.folder)
    found = {redo: bench.operations(redo) for redo in REDOS}
    for one in tqdm(draw_kills(draw, found, own.kills, own.random), desc="kills", unit="kill"):
        if time.monotonic() - begin > own.minutes * 60:
            break
        bench.kill(one)
    files = [
        str(p.relative_to(bench.whole)) for p in sorted(bench.whole.rglob("*")) if p.is_file() and p.name != ".lock"
    ]
    for file, way in tqdm([(file, way) for file in files for way in WAYS], desc="damage", unit="file"):
        bench.damage(file, way)
    for file in FOREIGN:
        bench.foreign(file)
    write_json(
        own.output,
        {
            **environment_json(),
            "command": shlex.join(["python", "-m", "scripts.bench.faults", *argv]),
            "operations": {redo or "first run": n for redo, (n, _) in found.items()},
            "counts": bench.counts,
            "findings": bench.findings,
        },
    )
    print(json.dumps(bench.counts, indent=2))
    return int(any(not finding["verdict"].startswith("named") for finding in bench.findings))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
