"""Write a feature store of a million tiny samples and open it: python -m scripts.bench.store --output docs/results/store.json

Says how many bytes of index and token ids were written against their final size, and what opening takes in time and memory in a fresh process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from tqdm import tqdm

from draftsmith.data.batch import Tokenized
from draftsmith.data.features import store, writing
from draftsmith.data.features.columns import IDS, MASKS, NAMES, SAMPLES
from draftsmith.data.features.index import CHECKSUMS, SHARDS, StoreSpec
from draftsmith.machine import environment_json
from draftsmith.storage import write_json

LAYERS = (2, 16, 29)
COLUMNS = (NAMES, SAMPLES, IDS, MASKS, CHECKSUMS, SHARDS)


def write(folder: Path, samples: int, per_shard: int) -> int:
    """Write a store of samples of one token, `per_shard` of them in a shard; return the bytes written to its index and columns."""
    size = store.estimate_bytes(1, 1, len(LAYERS), "bfloat16")
    spec = StoreSpec("f" * 16, "bfloat16", LAYERS, "bfloat16", 1, 50, "s" * 16, per_shard * size, 1, ("chat", "code"))
    process, written = psutil.Process(), 0
    word, state = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bfloat16)
    rows = {"ids": word.int(), "mask": word.bool(), "last": state, "top1": word.int(), "logsumexp": word.float()}
    rows |= {f"aux.{k}": state for k in LAYERS}
    texts = [
        Tokenized(word, word.bool(), f"conversation-{number:08d}", spec.slices[number % 2], f"talk-{number // 2:08d}")
        for number in range(samples)
    ]

    def counting(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal written
        before = process.io_counters().write_chars  # what the system was given to write
        result = function(*arguments)
        written += process.io_counters().write_chars - before
        return result

    append = partial(counting, writing.append_shard)
    with mock.patch.object(writing, "append_shard", append), mock.patch("os.fsync"):
        counting(writing.begin_store, folder, spec, texts)
        writer = writing.FeatureWriter(folder)
        for number, numbers in enumerate(tqdm(writer.shards, unit="shard")):
            writer.write(number, [rows] * len(numbers))
            writer.merge()
        counting(writer.finish)
    return written


def open_store(folder: Path) -> dict[str, float]:
    """Open a store in this process and return the seconds and the bytes of memory, mapped files included."""
    process = psutil.Process()
    before, started, used = process.memory_info().rss, time.perf_counter(), time.process_time()
    opened = store.FeatureStore(folder)
    used = time.process_time() - used
    assert opened.samples[len(opened) - 1].conversation is not None  # token ids are there without a tokenizer
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "megabytes": (process.memory_info().rss - before) / 1e6,
        "samples": len(opened),
    }


def main(argv: list[str]) -> int:
    """Run the bench; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.store", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument(
        "--per_shard", type=int, default=16, help="samples in a shard; 16 of 1,000 tokens fill 512 MB for an 8B target"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--open", type=Path, help="only open the store in this folder")
    own = parser.parse_args(argv)
    if own.open:
        print(json.dumps(open_store(own.open)))
        return 0
    facts = environment_json() | {
        "command": f"python -m scripts.bench.store --samples {own.samples} --per_shard {own.per_shard}"
    }
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        written = write(Path(folder), own.samples, own.per_shard)
        seconds = time.perf_counter() - started
        final = sum((Path(folder) / name).stat().st_size for name in ("index.json", *COLUMNS))
        command = [sys.executable, "-m", "scripts.bench.store", "--open", folder]
        opened = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)
        ]
    shards = -(-own.samples // own.per_shard)
    result = {
        "shards": shards,
        "index_bytes": final,
        "index_bytes_written": written,
        "write_seconds": seconds,
        "opened": opened,
    }
    if own.output:
        write_json(own.output, facts | result)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
