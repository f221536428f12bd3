"""The bench: a sample of mutants of the core, each held against the tests nearest to it.

Works in a copy of the checkout. Libraries are imported once, and every mutant is a forked process that imports the product
and runs pytest. A mutant that no test notices is a survivor; EQUIVALENT names those that change nothing that can be noticed, each
with its reason.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

from tqdm import tqdm

from draftsmith.eval.measure.machine import environment
from draftsmith.files import write_json
from scripts.bench.mutants.mutate import Mutant, mutants

ROOT = Path(__file__).resolve().parents[3]
CORE: dict[str, tuple[str, ...]] = {
    "eval/decode/verify.py": ("tests/eval/decode/test_verify.py", "tests/eval/decode/test_verify_distributions.py"),
    "eval/decode/cache.py": ("tests/eval/decode/test_cache.py", "tests/eval/decode/test_loop.py"),
    "eval/decode/loop.py": ("tests/eval/decode/test_loop.py", "tests/eval/decode/test_decode.py"),
    "eval/decode/growth.py": ("tests/eval/decode/test_growth.py", "tests/eval/decode/test_loop.py"),
    "eval/decode/sampling.py": ("tests/eval/decode/test_sampling.py", "tests/eval/decode/test_penalty.py"),
    "eval/decode/trees.py": ("tests/eval/decode/test_trees.py",),
    "eval/simulate/acceptance.py": ("tests/eval/simulate",),
    "heads/losses/divergences.py": ("tests/heads/losses",),
    "heads/losses/head_loss.py": ("tests/heads/losses",),
    "heads/layers/row_plan.py": ("tests/heads/layers",),
    "data/packing.py": ("tests/data/test_packing.py",),
    "data/features/store.py": ("tests/data/features",),
    "data/conversations/masks.py": ("tests/data/conversations",),
    "data/conversations/spans.py": ("tests/data/conversations",),
    "train/schedule.py": ("tests/train/test_schedule.py", "tests/train/test_loop.py"),
}
"""The core's files, and the tests nearest to each."""
EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
"""Mutants that nobody can notice, by file, line of code, text and substitute: why that is so."""
PRELOADED = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "yaml",
    "rich.console",
)
SECONDS = 240


def test_mutant(copy: Path, file: str, mutant: Mutant) -> str:
    """Return what the tests say of a mutant: "killed", "survived" or "too slow", which is killed as well."""
    path = copy / file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(text), encoding="utf-8")
    try:
        code = _run_tests(copy, CORE[file])
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: "survived", -signal.SIGALRM: "too slow"}.get(code, "killed")


def _run_tests(copy: Path, tests: tuple[str, ...]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(SECONDS)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.chdir(copy)
        # The product anew, from the copy, as no mutant may see another's modules.
        for name in [name for name in sys.modules if name.split(".")[0] in ("draftsmith", "scripts", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        os._exit(int(import_module("pytest").main([*options, *tests])))
    finally:
        os._exit(70)


def main(argv: list[str] | None = None) -> int:
    """Run the bench; exit code 1 where fewer than 95% of the mutants that can be noticed are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants, as many of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", action="append", choices=CORE, help="only mutants of this file; again for more")
    parser.add_argument("--output", type=Path, default=Path("docs/results/mutants.json"))
    own = parser.parse_args(argv)
    copy = Path("runs/mutants").absolute()
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True)
    for name in PRELOADED:
        import_module(name)
    files = own.file or list(CORE)
    broken = [file for file in files if _run_tests(copy, CORE[file])]
    if broken:
        print(f"the tests of {', '.join(broken)} fail without a mutant", file=sys.stderr)
        return 2
    drawn: list[tuple[str, Mutant]] = []
    draw, share = random.Random(own.seed), -(-own.count // len(files))
    of_file = {file: mutants((copy / file).read_text(encoding="utf-8")) for file in files}
    for file, every in of_file.items():
        drawn += [(file, one) for one in sorted(draw.sample(every, min(share, len(every))), key=lambda one: one.start)]
    counts: Counter[str] = Counter()
    survivors = []
    for file, mutant in tqdm(drawn, desc="mutants", unit="mutant"):
        reason = EQUIVALENT.get((file, _line(copy / file, mutant), mutant.before, mutant.after))
        verdict = "equivalent" if reason else test_mutant(copy, file, mutant)
        counts[verdict] += 1
        if verdict == "survived":
            survivors.append(f"{file}, {mutant}: {_line(copy / file, mutant)}")
            tqdm.write(survivors[-1])
    killed = counts["killed"] + counts["too slow"]
    score = killed / max(1, len(drawn) - counts["equivalent"])
    found = {
        "drawn_from": {file: len(every) for file, every in of_file.items()},
        "counts": dict(counts),
        "score": score,
        "survivors": survivors,
    }
    write_json(
        own.output,
        {**environment(), "command": f"python -m scripts.bench.mutants --count {own.count} --seed {own.seed}"} | found,
    )
    print(f"{killed} of {len(drawn) - counts['equivalent']} mutants are noticed ({score:.0%})")
    return int(score < 0.95)


def _line(path: Path, mutant: Mutant) -> str:
    return path.read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
