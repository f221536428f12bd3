"""The bench: a sample of mutants of the core, each held against the tests nearest to it.

Works in a copy of the checkout's last commit, on one core. A mutant that no test notices is a survivor; equivalent.json names those
that change nothing that can be noticed, each with its reason.

Why not a library: mutmut (3.8) finds no test for a module that is imported through a link, as draftsmith.data is; cosmic-ray (8.7)
starts Python and torch anew for each of five times as many mutants, many of them in annotations, and changes no tensor operation.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.foreign.json import read_object
from draftsmith.machine import environment_json
from draftsmith.storage import write_json
from scripts.bench.mutants.mutate import Mutant, mutants
from scripts.bench.mutants.nearest import ROOT, load_libraries, survey, verdict

CORE: dict[str, tuple[str, ...]] = {
    "draftsmith/decoder/verify.py": ("tests/decoder/test_verify.py", "tests/decoder/test_verify_distributions.py"),
    "draftsmith/decoder/cache.py": ("tests/decoder/test_cache.py",),
    "draftsmith/decoder/loop.py": ("tests/decoder/test_loop.py",),
    "draftsmith/decoder/growth.py": ("tests/decoder/test_growth.py",),
    "draftsmith/decoder/sampling.py": ("tests/decoder/test_sampling.py", "tests/decoder/test_penalty.py"),
    "draftsmith/decoder/trees.py": ("tests/decoder/test_trees.py",),
    "eval/simulate/acceptance.py": ("tests/eval/simulate",),
    "heads/losses/divergences.py": ("tests/heads/losses/test_divergences.py",),
    "heads/losses/head_loss.py": ("tests/heads/losses/test_head_loss.py", "tests/heads/losses/test_spec.py"),
    "heads/layers/row_plan.py": ("tests/heads/layers/test_row_plan.py",),
    "data/packing.py": ("tests/data/test_packing.py",),
    "data/features/store.py": ("tests/data/features/test_store.py",),
    "data/conversations/masks.py": ("tests/data/conversations/test_masks.py", "tests/data/conversations/test_spans.py"),
    "data/conversations/spans.py": (
        "tests/data/conversations/test_spans.py",
        "tests/data/conversations/test_families.py",
    ),
    "data/conversations/renderer.py": (
        "tests/data/conversations/test_spans.py",
        "tests/data/conversations/test_families.py",
    ),
    "data/conversations/left_out.py": ("tests/data/conversations/test_families.py",),
    "train/schedule.py": ("tests/train/test_schedule.py",),
}
"""The core's files, and the tests nearest to each."""
EQUIVALENT = {
    (one["file"], one["without"], one["with"]): one["why"]
    for one in json.loads(Path(__file__).with_name("equivalent.json").read_text(encoding="utf-8"))
}
"""Mutants that nobody can notice, by file and line of code, without and with the fault: why that is so."""


def main(argv: list[str] | None = None) -> int:
    """Run the bench; exit code 1 where fewer than 95% of the mutants that can be noticed are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants, as many of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", action="append", choices=CORE, help="only mutants of this file; again for more")
    parser.add_argument("--again", type=Path, help="an earlier result: only its survivors, once tests are mended")
    parser.add_argument("--output", type=Path, default=Path("docs/results/mutants.json"))
    own = parser.parse_args(argv)
    earlier = None if own.again is None else read_object(own.again, "name a result of this bench")
    command = f"python -m scripts.bench.mutants --count {own.count} --seed {own.seed}"
    command += "".join(f" --file {file}" for file in own.file or ())
    begun = environment_json() | {"command": command}
    if earlier is not None:
        begun["command"] = f"{earlier['command'].partition(';')[0]}; then its survivors, --again"
        begun["first"] = earlier.get("first", {key: earlier[key] for key in ("commit", "counts", "score")})
        begun |= {key: earlier[key] for key in ("earlier_samples",) if key in earlier}
    copy = Path("runs/mutants").absolute()
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True)
    every = {file: mutants((copy / file).read_text(encoding="utf-8")) for file in own.file or CORE}
    drawn = draw(every, own.count, own.seed) if earlier is None else survivors_of(earlier, every, copy)
    before = {} if earlier is None else earlier["counts"]
    counts = Counter({says: count for says, count in before.items() if says != "survived"})
    alive = {
        file: [one for one in some if (file, *_lines(copy, file, one)) not in EQUIVALENT]
        for file, some in drawn.items()
    }
    counts["equivalent"] += sum(map(len, drawn.values())) - sum(map(len, alive.values()))
    return _report(
        copy, alive, counts, begun | {"drawn_from": {file: len(some) for file, some in every.items()}}, own.output
    )


def draw(every: dict[str, list[Mutant]], count: int, seed: int) -> dict[str, list[Mutant]]:
    """Draw `count` mutants, as many of each file."""
    random_order, share = random.Random(seed), -(-count // len(every))
    drawn = {file: random_order.sample(some, min(share, len(some))) for file, some in every.items()}
    return {file: sorted(some, key=lambda one: one.start) for file, some in drawn.items()}


def survivors_of(earlier: dict[str, Any], every: dict[str, list[Mutant]], copy: Path) -> dict[str, list[Mutant]]:
    """Find the survivors of an earlier result; their lines may have moved, but must be there."""
    found: dict[str, list[Mutant]] = {}
    for name in earlier["survivors"]:
        file, line, change = re.fullmatch(r"([^:]+):(\d+): (.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        same = [one for one in every[file] if " -> ".join(_lines(copy, file, one)) == change]
        # Of lines that say the same, the one that has not moved.
        same = [one for one in same if one.line == int(line)] or same
        assert len(same) == 1, f"the line of {name} has changed: run the whole again"
        found.setdefault(file, []).extend(same)
    return found


def _report(
    copy: Path, drawn: dict[str, list[Mutant]], counts: Counter[str], begun: dict[str, Any], output: Path
) -> int:
    """Run the tests of every mutant, write the result and return the exit code."""
    load_libraries()
    files = [file for file, some in drawn.items() if some]
    surveys = {file: survey(copy, file, CORE[file]) for file in tqdm(files, desc="tests without a mutant", unit="file")}
    if broken := [file for file, known in surveys.items() if known is None]:
        print(f"The tests of {', '.join(broken)} fail without a mutant.", file=sys.stderr)
        return 2
    survivors = []
    pairs = [(file, one) for file in files for one in drawn[file]]
    for file, mutant in tqdm(pairs, desc="mutants", unit="mutant"):
        known = surveys[file]
        assert known is not None
        says = verdict(copy, file, mutant, CORE[file], known)
        counts[says] += 1
        if says == "survived":
            survivors.append(f"{file}:{mutant.line}: {' -> '.join(_lines(copy, file, mutant))}")
            tqdm.write(survivors[-1])
    killed, can_be = counts["killed"] + counts["too slow"], counts.total() - counts["equivalent"]
    score = killed / max(1, can_be)
    write_json(output, begun | {"counts": dict(counts), "score": score, "survivors": survivors})
    print(f"{killed} of {can_be} mutants are noticed ({score:.0%})")
    return int(score < 0.95)


def _lines(copy: Path, file: str, mutant: Mutant) -> tuple[str, str]:
    return mutant.lines((copy / file).read_text(encoding="utf-8"))
