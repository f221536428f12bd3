"""What the worst mistakes cost: seconds and memory until the command line has refused each in its sentence."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.eval.measure.machine import environment
from draftsmith.files import write_json
from scripts.bench.faults.bench import save_target
from scripts.bench.faults.kills import in_a_child

MOST_SECONDS, MOST_BYTES = 5.0, 1_000_000_000
"""What a refusal may take: processor time beyond that of a mistyped key, which is the start of the program, and memory."""
MISTYPED = "a mistyped key, for comparison"
DIGITS, DEEP, LONG = "9" * 5000, "[" * 100_000 + "]" * 100_000, "word " * 2_000_000
LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, 10))
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


def _line(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}]})


def _config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "target" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def _write(name: str, text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return spoil


def _nothing(folder: Path) -> None:
    """Spoil no file: the mistake is in the options."""


CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    MISTYPED: (_nothing, ["--data.limt", "3"]),
    "a JSONL line of 10 MB that is cut": (_write("talk.jsonl", _line(LONG)[:-1]), []),
    "prompts of 10 MB": (_write("prompts.jsonl", _line(LONG)), []),
    "a vocabulary of 50,000,000": (_config(vocab_size=50_000_000), []),
    "a million layers": (_config(num_hidden_layers=1_000_000), []),
    "a configuration nested 100,000 deep": (_write("target/config.json", f'{{"a": {DEEP}}}'), []),
    "a conversation nested 100,000 deep": (_write("talk.jsonl", f'{{"messages": {DEEP}}}'), []),
    "a configuration with an integer of 5,000 digits": (_write("target/config.json", f'{{"a": {DIGITS}}}'), []),
    "a conversation with an integer of 5,000 digits": (_write("talk.jsonl", f'{{"messages": {DIGITS}}}'), []),
    "a recipe with an integer of 5,000 digits": (_write("recipe.yaml", f"seed: {DIGITS}"), []),
    "a recipe of a billion laughs": (_write("recipe.yaml", LAUGHS), []),
    "a chat template that doubles a text 60 times": (_write("target/chat_template.jinja", DOUBLING), []),
    "a chat template that asks for 100 GB": (_write("target/chat_template.jinja", "{{ 'a' * 10 ** 11 }}"), []),
    "a chat template that counts to 10^10": (
        _write(
            "target/chat_template.jinja",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        ),
        [],
    ),
    "rows of 10^12 tokens": (_nothing, ["--train.row_tokens", "1000000000000"]),
    "head sizes that are too large together": (
        _nothing,
        ["--head.intermediate_size", "1000000", "--head.num_hidden_layers", "1000", "--head.hidden_size", "65536"],
    ),
}


def measure(folder: Path, spoil: Callable[[Path], None], words: list[str]) -> dict[str, Any]:
    """Spoil a copy of the good input, start `draftsmith run` on it, and return what it cost and said."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.parent / "good", folder)
    spoil(folder)
    command = [sys.executable, "-m", "draftsmith.cli.main", "run", "--recipe", str(folder / "recipe.yaml"), *words]
    # As pip installs it, with its bytecode.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.monotonic()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environ)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    lines = (folder / "said").read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return {
        "exit_code": process.returncode,
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "seconds": round(time.monotonic() - begin, 2),
        "peak_bytes": used.ru_maxrss * 1024,
        "said": (lines or [""])[-1].replace(f"{folder}/", "")[:600],
        "made": (folder / "run").exists(),
    }


def make_good(folder: Path) -> None:
    """Write a target, conversations, prompts and a recipe that run."""
    folder.mkdir(parents=True)
    if in_a_child(lambda: save_target(folder / "target"), folder.parent / "log.txt"):
        raise SystemExit(f"the target cannot be written: {folder.parent / 'log.txt'} says why")
    for name in ("talk", "prompts"):
        (folder / f"{name}.jsonl").write_text("".join(_line(f"question {n}?") + "\n" for n in range(24)))
    copy = folder.with_name("case")  # where it is read
    recipe = {
        "target": {"path": str(copy / "target"), "dtype": "float32"},
        "data": {"sources": [str(copy / "talk.jsonl")], "heldout": 6, "max_length": 96},
        "answers": {"max_new_tokens": 12},
        "head": {"layer_ids": [0, 1, 2]},
        "train": {"row_tokens": 96, "precision": "no"},
        "evaluate": {"prompts": [str(copy / "prompts.jsonl")]},
        "output_dir": str(copy / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML


def main(argv: list[str]) -> int:
    """Run the bench; exit code 1 where a mistake is not refused, leaves something, or takes too much."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.faults refusals", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/refusals"), help="where the inputs go; it is emptied")
    parser.add_argument("--output", type=Path, default=Path("docs/results/refusals.json"))
    own = parser.parse_args(argv)
    folder, facts = own.folder.absolute(), environment()
    shutil.rmtree(folder, ignore_errors=True)
    make_good(folder / "good")
    measure(folder / "case", *CASES[MISTYPED])  # once, for the bytecode
    cases = {}
    for name, (spoil, words) in tqdm(CASES.items(), desc="refusals", unit="case"):
        cases[name] = measure(folder / "case", spoil, words)
        tqdm.write(f"{name}: {cases[name]}")
    facts |= {
        "command": shlex.join(["python", "-m", "scripts.bench.faults", "refusals", *argv]),
        "hardware": asdict(facts["hardware"]),
    }
    write_json(own.output, {**facts, "cases": cases})
    refused = [one["exit_code"] == 2 and not one["made"] for one in cases.values()]
    most = MOST_SECONDS + cases[MISTYPED]["processor_seconds"]
    within = [one["processor_seconds"] <= most and one["peak_bytes"] <= MOST_BYTES for one in cases.values()]
    return int(not all(refused) or not all(within))
