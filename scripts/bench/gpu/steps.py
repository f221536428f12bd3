"""Run a part of the GPU check that needs torch, in a process of its own, and write a JSON file of facts.

python -m scripts.bench.gpu.steps FACTS machine
python -m scripts.bench.gpu.steps FACTS part NAME DEVICE [--small]           # a part of `scripts.bench.gpu.shapes`
python -m scripts.bench.gpu.steps FACTS stage COMMAND --recipe R ...        # a command of draftsmith
"""

import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from draftsmith.storage import write_json

PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


def machine() -> dict[str, Any]:
    """Describe the machine: hardware, driver, versions, commit and date."""
    from draftsmith.machine import environment_json

    facts = environment_json()
    facts["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    if torch.cuda.is_available():
        properties, driver = torch.cuda.get_device_properties(0), None
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
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


def main() -> None:
    """Run one part and write what it finds as it finds it, with the seconds so far and the peak of GPU memory."""
    facts, what, *rest = sys.argv[1:]
    started = time.perf_counter()
    found: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        found.update(more, seconds=time.perf_counter() - started)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        write_json(Path(facts), found)

    if what == "machine":
        keep(**machine())
    elif what == "part":
        from scripts.bench.gpu import shapes

        name, device, *small = rest
        shape = shapes.SMALL if small else shapes.EIGHT_BILLION
        for piece, value in shapes.PARTS[name](torch.device(device), shape):
            print(f"{piece}: {time.perf_counter() - started:.1f} s", flush=True)
            keep(**{piece: value})
    else:
        from draftsmith.cli.main import main as run_command

        code = run_command(rest)
        keep()
        raise SystemExit(code)


if __name__ == "__main__":
    main()
