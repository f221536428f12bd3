"""A miniature of everything that a run needs: target, data, prompts, a recipe and an untrained head."""

import hashlib
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.cli.main import main
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3 import head as eagle3
from draftsmith.target.target import load_target
from tests.helpers import save_target, write_rows


def make_workplace(folder: Path, prompts: int = 4) -> Path:
    """Put a tiny target with a tokenizer, conversations in two slices, prompts, and a recipe for them into `folder`."""
    save_target(folder / "target", initializer_range=0.08)
    for name, count in (("chat", 40), ("code", 40)):
        rows = [
            {"id": f"{name}-{i}", "messages": [{"role": "user", "content": f"{name} question {i}: why {i * 7}?"}]}
            for i in range(count)
        ]
        write_rows(folder / f"{name}.jsonl", *rows)
    asked = [
        {"id": f"p{i}", "slice": ("chat", "code")[i % 2], "messages": [{"role": "user", "content": f"number {i}?"}]}
        for i in range(prompts)
    ]
    asked[0]["reference"] = "0?"
    write_rows(folder / "prompts.jsonl", *asked)
    recipe = {
        "name": "mini",
        "target": {"path": str(folder / "target"), "device": "cpu"},
        "data": {
            "sources": [str(folder / "chat.jsonl"), str(folder / "code.jsonl")],
            "max_length": 128,
            "heldout": 10,
        },
        "answers": {"max_new_tokens": 12, "batch": 4},
        "features": {"shard_mb": 1, "batch_tokens": 256},
        "head": {"layer_ids": [2, 4, 6], "ttt_steps": 3, "draft_vocab_size": 200},
        "train": {
            "epochs": 2,
            "row_tokens": 128,
            "rows": 2,
            "optimizer": "muon",
            "precision": "no",
            "evaluations": 3,
            "checkpoint_minutes": 0.0,
        },
        "evaluate": {
            "prompts": [str(folder / "prompts.jsonl")],
            "num_speculative_tokens": 3,
            "max_k": 4,
            "max_new_tokens": 16,
            "repeats": 2,
            "plan_batches": [],
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def options(workplace: Path, run: Path) -> list[str]:
    """The command-line options of a run in a directory of its own."""
    return ["--recipe", str(workplace / "recipe.yaml"), "--output_dir", str(run)]


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of every file of a run that holds no clock times."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in ("summary.json",) and "step_" not in str(path)
    }


def save_untrained(workplace: Path) -> Path:
    """Save an EAGLE-3 head for the workplace's target that has learnt nothing; return its folder."""
    target = load_target(str(workplace / "target"))
    torch.manual_seed(0)
    save_head(eagle3.build(Eagle3Options([2, 4, 6]), target, None), workplace / "head", target)
    return workplace / "head"


def fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one sentence; return it."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("draftsmith: ")]
    return line
