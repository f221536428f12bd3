"""Check a CUDA machine: GPU tests, a random target of 8 billion parameters, then a head of the embedded target from data to result.

`bash scripts/gpu_check.sh` finds a Python for it. Every step is a process with a latest end, so that one which fails or
hangs costs no other its result; what a step leaves of its time goes to the next. gpu_check.json is written again after
each step. Imports nothing beyond the standard library and what comes with transformers, because it installs the rest.

Its own steps, which need torch, are processes that write facts to a JSON file:

    python -m scripts.bench.gpu.check FACTS machine
    python -m scripts.bench.gpu.check FACTS part NAME DEVICE [--small]           # a part of `scripts.bench.gpu.shapes`
    python -m scripts.bench.gpu.check FACTS stage COMMAND --recipe R ...        # a command of draftsmith
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.storage import write_json

ROOT = Path(__file__).resolve().parents[3]
WHEELS = ROOT / "scripts" / "gpu_wheels.txt"
HEADS = ("eagle3",)
PARTS = {"limits": 0.04, "decoding": 0.16, "training": 0.1, "sources": 0.16, "long": 0.08, "numbers": 0.05}
"""What `scripts.bench.gpu.shapes`, and `.rounding`, measure, and the share of the time that each may take."""
RESERVE = 15.0
"""Seconds kept for starting and for writing the results."""
ERROR_LINES = 12
_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")
_ENDED = re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<outcome>[A-Z]+) (?P<test>.+?) *$", re.MULTILINE)
"""A line of `pytest -v -n` about a test that ended."""


@dataclass(frozen=True)
class Step:
    """One process. share: its part of the whole time; what earlier steps leave over is added."""

    name: str
    share: float
    command: tuple[str, ...]


@dataclass
class Outcome:
    """What became of a step. status: passed, failed or timed out. error: its last lines, where it did not pass."""

    name: str
    status: str
    seconds: float
    limit_seconds: float
    command: str
    error: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; 0 where every step passed, 1 where one did not, 2 for a mistake in the call."""
    options, started = _parse(argv), time.monotonic()
    work = options.work or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        work.mkdir(parents=True, exist_ok=True)
        options.output.mkdir(parents=True, exist_ok=True)
        # This checkout, the wheels' packages, no network.
        paths = [str(ROOT), str(install_wheels(options.wheels, work / "packages")), os.environ.get("PYTHONPATH", "")]
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
        # The models are too small to share a matrix product between cores.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        place = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DRAFTSMITH_CACHE": str(work / "cache")}
        # Of a pretended GPU this check says nothing.
        real = {"DRAFTSMITH_GPU_TESTS_ON": "cuda"}
        environment = {**os.environ, **offline, **threads, **place, **real, "PYTHONUNBUFFERED": "1"}
        check = GpuCheck(options, work, environment, started)
        check.run()
    except UserError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(f"\n{options.output / 'gpu_check.json'}")
    return 0 if check.passed else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check draftsmith on a CUDA machine, offline.")
    add = parser.add_argument
    add("--wheels", type=Path, help="folder with the wheels of scripts/gpu_wheels.txt that are missing")
    add(
        "--output", type=Path, default=Path("gpu-check"), help="folder for the results, from the repository (gpu-check)"
    )
    add("--minutes", type=float, default=9.0, help="most minutes that the whole may take (9)")
    add("--device", default="cuda", help="cuda, cuda:1, ... or cpu (cuda)")
    add("--only", nargs="+", choices=("tests", *PARTS, *HEADS), help="parts to run (all), which then share the minutes")
    add("--small", action="store_true", help="a few steps of everything: tries the check itself")
    add("--work", type=Path, help="folder to keep models and hidden states in (else a temporary one)")
    return parser.parse_args(argv)


class GpuCheck:
    """Run the steps of a check, and keep what they have found so far."""

    def __init__(self, options: argparse.Namespace, work: Path, environment: dict[str, str], started: float) -> None:
        self.options, self.work, self.environment = options, work, environment
        self.log = options.output / "gpu_check.log"
        self.log.write_text("", encoding="utf-8")
        self.outcomes: list[Outcome] = []
        self.started = started
        self.share = 0.0

    @property
    def passed(self) -> bool:
        """Whether every step passed."""
        return all(outcome.status == "passed" for outcome in self.outcomes)

    def run(self) -> None:
        """Run all steps. Raises UserError where the machine has not the device that was asked for."""
        tests = ["pytest", "-vm", "gpu", "tests/gpu", "-n", str(min(8, os.cpu_count() or 1)), "-p", "no:cacheprovider"]
        self._step(Step("machine", 0.05, self._part("machine", "machine")))
        if self.options.device.startswith("cuda") and self._facts("machine") and "gpu" not in self._facts("machine"):
            raise UserError("torch sees no GPU here: check the driver with nvidia-smi, or add --device cpu --small.")
        size = ["--small"] if self.options.small else []
        steps = [Step("tests", 0.17, (sys.executable, "-m", *tests))]
        steps += [Step(n, s, self._part(n, "part", n, self.options.device, *size)) for n, s in PARTS.items()]
        for head in HEADS:
            words = self._recipe(head)
            steps.append(Step(f"{head} train", 0.07, self._part(f"{head}-train", "stage", "train", *words)))
            # What is trained already is reused: this evaluates, exports and reports.
            steps.append(Step(f"{head} evaluate", 0.14, self._part(f"{head}-evaluate", "stage", "run", *words)))
        only = self.options.only
        wanted = [step for step in steps if not only or step.name.split()[0] in only]
        whole = sum(step.share for step in wanted)
        for step in wanted:
            self._step(replace(step, share=0.95 * step.share / whole))

    def _part(self, facts: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "scripts.bench.gpu.check", str(self.work / f"{facts}.facts"), *words)

    def _facts(self, name: str) -> dict[str, Any]:
        path = self.work / f"{name}.facts"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _recipe(self, head: str) -> list[str]:
        """The recipe of a head, in bf16 on the device, within the time."""
        keys: dict[str, Any] = {"target.device": self.options.device, "evaluate.generate": "false"}
        keys |= {f"{key}.dtype": "bfloat16" for key in ("target", "features", "evaluate", "export")}
        keys["train.precision"] = "bf16"
        keys |= {"output_dir": self.work / head, "data_dir": self.work / "data"}
        if self.options.small:
            keys |= {"data.limit": 40, "data.heldout": 8, "answers.max_new_tokens": 12, "train.epochs": 1}
            keys |= {"evaluate.per_slice": 1, "evaluate.repeats": 1, "evaluate.max_new_tokens": 8}
        else:
            keys |= {
                "answers.batch": 256,
                "evaluate.per_slice": 3,
                "evaluate.repeats": 2,
                "evaluate.plan_batches": "[1]",
            }
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        return ["--recipe", str(ROOT / "recipes" / head / "tiny.yaml"), *words]

    def _step(self, step: Step) -> None:
        """Run a step up to its latest end, and write down what is known by then."""
        total = 60 * self.options.minutes - RESERVE
        self.share += step.share
        limit = max(1.0, self.share * total - (time.monotonic() - self.started))
        print(f"{step.name}: at most {limit:.0f} s ...", flush=True)
        outcome = run_step(step, limit, self.environment, self.log)
        self.outcomes.append(outcome)
        print(f"{step.name}: {outcome.status} in {outcome.seconds:.0f} s", *outcome.error[-3:], sep="\n  ", flush=True)
        results = {}
        for head in HEADS:
            for path in sorted((self.work / head / "evaluation").glob("t*/result.json")):
                result = json.loads(path.read_text(encoding="utf-8"))
                kept = ("settings", "drafters", "costs")
                results[f"{head}-{path.parent.name}"] = {key: result[key] for key in kept}
        content = {
            "schema_version": 1,
            "command": shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]]),
            **self._facts("machine"),
            **{key: getattr(self.options, key) for key in ("device", "small", "minutes")},
            "seconds": round(time.monotonic() - self.started, 1),
            "passed": self.passed,
            "steps": [asdict(outcome) for outcome in self.outcomes],
            "tests": read_tests(self.log),
            **{name: self._facts(name) for name in PARTS},
            "stages": {name: read_stages(self.work / name / "run.json") for name in ("data", *HEADS)},
            "peak_memory_bytes": {f"{h} train": self._facts(f"{h}-train").get("peak_memory_bytes") for h in HEADS},
            "results": results,
        }
        write_json(self.options.output / "gpu_check.json", content)


def run_step(step: Step, limit: float, environment: dict[str, str], log: Path) -> Outcome:
    """Run a step's process for at most `limit` seconds, its output appended to `log`; what it started ends with it."""
    started, command = time.monotonic(), shlex.join(step.command)
    with log.open("a+", encoding="utf-8", errors="replace", newline="") as file:
        file.write(f"\n===== {step.name}: {command}\n")
        file.flush()
        begin = file.tell()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(step.command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            status = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            # With all it started. No step needs to be asked politely, as files are written whole.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(begin)
        # A progress bar overwrites its line.
        lines = [line.rstrip().rsplit("\r", 1)[-1] for line in file.read().split("\n")]
    error = [] if status == "passed" else [line for line in lines if line][-ERROR_LINES:]
    return Outcome(step.name, status, round(time.monotonic() - started, 1), round(limit, 1), command, error)


def read_tests(log: Path) -> dict[str, Any] | None:
    """Count the tests of a log of `pytest -v -n`, and name those that failed; None where none has ended."""
    ended: dict[str, str] = {}
    for found in _ENDED.finditer(log.read_text(encoding="utf-8", errors="replace")):
        # A test whose fixture fails behind it has a second line.
        ended[found["test"]] = {"PASSED": "passed", "XPASS": "passed", "SKIPPED": "skipped", "XFAIL": "skipped"}.get(
            found["outcome"], "failed"
        )
    if not ended:
        return None
    count = {outcome: list(ended.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}
    return {**count, "failures": [name for name, outcome in ended.items() if outcome == "failed"]}


def read_stages(path: Path) -> dict[str, Any]:
    """Return the figures that a run directory's finished stages reported, with tokens per second."""
    if not path.exists():
        return {}
    found = {}
    for name, record in json.loads(path.read_text(encoding="utf-8")).items():
        facts = dict(record["facts"])
        tokens = facts.get("output_tokens", facts.get("tokens"))
        if tokens and facts.get("seconds"):
            facts["tokens_per_second"] = tokens / facts["seconds"]
        found[name] = {"state": record["state"], **facts}
    return found


def install_wheels(wheels: Path | None, packages: Path) -> Path:
    """Install what is missing of gpu_wheels.txt, in any version, into the folder `packages`, from wheels alone.

    Raises UserError with what pip says of what has no wheel.
    """
    lines = (line.partition("#")[0].strip() for line in WHEELS.read_text(encoding="utf-8").splitlines())
    here = {_wheel_name(str(found.name)) for found in metadata.distributions()}
    needed = [line for line in lines if line and _wheel_name(line.partition("==")[0]) not in here]
    if needed:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--find-links", str(wheels)] if wheels else []
        done = subprocess.run(
            [*command, "--upgrade", "--target", str(packages), *needed], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(
                f"This python lacks {', '.join(needed)}, and pip cannot install that from {wheels or 'nowhere, without --wheels'} "
                f"({' '.join(done.stderr.split())[-400:]}): fetch the wheels where there is a network, as "
                f"{WHEELS.relative_to(ROOT)} says, and give their folder with --wheels."
            )
    return packages


def _wheel_name(name: str) -> str:
    return name.lower().replace("-", "_")


def machine() -> dict[str, Any]:
    """Describe the machine: hardware, driver, versions, commit and date."""
    import torch

    from draftsmith.machine import environment_json

    facts = environment_json()
    facts["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
    if torch.cuda.is_available():
        properties, driver = torch.cuda.get_device_properties(0), None
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            driver = found.stdout.split("\n")[0]
        facts["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": driver,
            "cuda": torch.version.cuda,
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
        }
    return facts


def write_facts(facts: str, what: str, *rest: str) -> int:
    """Take a step of our own, and write what it finds as it finds it, with the seconds so far and the peak of GPU memory."""
    import torch

    started = time.perf_counter()
    found: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        found.update(more, seconds=time.perf_counter() - started)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        write_json(Path(facts), found)

    code = 0
    if what == "machine":
        keep(**machine())
    elif what == "part":
        from scripts.bench.gpu import shapes
        from scripts.bench.gpu.rounding import numbers

        name, device, *small = rest
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)  # which Accelerate and the counts of memory go by
        shape = shapes.SMALL if small else shapes.EIGHT_BILLION
        for piece, value in {**shapes.PARTS, "numbers": numbers}[name](torch.device(device), shape):
            print(f"{piece}: {time.perf_counter() - started:.1f} s", flush=True)
            keep(**{piece: value})
    else:
        from draftsmith.cli.main import main as run_command

        code = run_command(list(rest))
        keep()
    return code


if __name__ == "__main__":
    raise SystemExit(write_facts(*sys.argv[1:]))
