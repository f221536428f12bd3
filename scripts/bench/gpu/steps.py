"""The parts of the GPU check that need torch: each runs in a process of its own and leaves a JSON file of facts.

python -m scripts.bench.gpu.steps FACTS machine
python -m scripts.bench.gpu.steps FACTS target DEVICE CACHE [--small]
python -m scripts.bench.gpu.steps FACTS stage COMMAND --recipe R ...        # a command of draftsmith
"""

import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from draftsmith.files import write_json

PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


def machine() -> dict[str, Any]:
    """Who measures: hardware, driver, versions, commit and date."""
    from draftsmith.eval.measure.machine import environment

    facts = environment()
    facts["hardware"] = asdict(facts["hardware"])
    facts["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
        }
    return facts


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def make_target(device: str, cache: Path, small: bool) -> dict[str, Any]:
    """Train a target such as the embedded default's on `device`; `small` makes one of a few steps that has learned little."""
    from draftsmith.data.embedded.default import ensure_embedded
    from scripts.bench.embedded.make import EmbeddedSettings, make_target

    settings = EmbeddedSettings()
    if small:
        settings = EmbeddedSettings(
            conversations=300, vocab_size=400, hidden=32, ffn=64, heads=2, kv_heads=1,
            row_tokens=256, rows=2, shallow_steps=4, steps=4,
        )  # fmt: skip
    folder = cache / "target"
    make_target(folder, settings, dtype=torch.float32, device=device)
    texts = ensure_embedded(cache)
    return {
        "target": str(folder),
        "conversations": str(texts.conversations),
        "prompts": str(texts.prompts),
        "steps": settings.shallow_steps + settings.steps,
    }


def run_stage(words: list[str]) -> dict[str, Any]:
    """Run a command of draftsmith; a failure is an exception."""
    from draftsmith.cli.main import main

    if code := main(words):
        raise SystemExit(code)
    return {}


def main() -> None:
    """Run one part and write its facts, its seconds and the GPU memory it took at most."""
    facts, what, *rest = sys.argv[1:]
    started = time.perf_counter()
    if what == "machine":
        found = machine()
    elif what == "target":
        found = make_target(rest[0], Path(rest[1]), "--small" in rest)
    else:
        found = run_stage(rest)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    write_json(Path(facts), found | {"seconds": seconds, "peak_memory_bytes": peak})


if __name__ == "__main__":
    main()
