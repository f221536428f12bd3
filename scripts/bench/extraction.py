"""Time what extraction adds to the target's passes: python -m scripts.bench.extraction --folder /dev/shm/x --output docs/results/extraction.json

A pretended pass sleeps and hands out states as an 8B target has them, 8,192 tokens at a time. The rest is the extraction itself:
checksums, shards on disk, the index. Says how much longer it took than the passes alone, and the CPU seconds behind a pass.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.features import extract as extraction
from draftsmith.data.features import writing
from draftsmith.data.features.store import estimate_bytes, readable_bytes
from draftsmith.machine import environment_json
from draftsmith.storage import write_json
from draftsmith.target.target import Target

WIDTH, VOCAB, LAYERS, SAMPLE_TOKENS = 4096, 128_256, (2, 16, 29), 2048


def pretended_target() -> Target:
    """What extraction asks of a target of 8B parameters besides a pass."""
    facts = {"fingerprint": "f" * 16, "dtype_name": "bfloat16", "hidden_size": WIDTH, "vocab_size": VOCAB}
    facts |= {"device": torch.device("cpu"), "context_length": 8192, "embedding": torch.empty(VOCAB, 0)}
    return cast(Target, SimpleNamespace(**facts, check_layer_ids=lambda layers: None))


def run(folder: Path, passes: int, rows: int, seconds: float) -> dict[str, Any]:
    """Extract the samples of so many passes; return wall and CPU seconds."""
    tokens, generator = rows * SAMPLE_TOKENS, torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (SAMPLE_TOKENS,), generator=generator)
    samples = [Tokenized(ids, ids > 0, f"sample-{number}", "chat") for number in range(rows * passes)]
    states = {
        name: torch.randn(tokens, WIDTH, generator=generator).bfloat16()
        for name in ("last", *(f"aux.{k}" for k in LAYERS))
    }
    states |= {"top1": torch.zeros(tokens, dtype=torch.int32), "logsumexp": torch.zeros(tokens)}

    def emptied(append: Callable[..., Any], path: Path, end: Any, size: int, *rest: Any) -> Any:
        # A shard that is done keeps its size alone, since a disk in memory would soon be full.
        record = append(path, end, size, *rest)
        shard = max(path.glob("shard-*"))
        os.truncate(shard, 0)
        os.truncate(shard, size)
        return record

    with (
        mock.patch.object(extraction, "compute_states", side_effect=lambda *_: time.sleep(seconds)),
        mock.patch.object(extraction, "by_tensor", return_value=states),
        mock.patch.object(writing, "append_shard", partial(emptied, writing.append_shard)),
    ):
        started, used = time.perf_counter(), time.process_time()
        extraction.extract(pretended_target(), samples, folder, layer_ids=LAYERS, batch_tokens=tokens)
        wall, cpu = time.perf_counter() - started, time.process_time() - used
    size = estimate_bytes(tokens, WIDTH, len(LAYERS), "bfloat16")
    return {
        "passes": passes,
        "pass_seconds": seconds,
        "pass_bytes": size,
        "wall_seconds": wall,
        "wall_over_passes": wall / (passes * seconds),
        "cpu_seconds_per_pass": cpu / passes,
    }


def main(argv: Sequence[str]) -> int:
    """Run the bench; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.extraction", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to write to; it is made and removed")
    parser.add_argument("--passes", type=int, default=88)
    parser.add_argument("--rows", type=int, default=4, help=f"samples of {SAMPLE_TOKENS} tokens in a pass")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a pretended pass")
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = environment_json() | {"command": f"python -m scripts.bench.extraction {' '.join(argv)}"}
    try:
        result = run(own.folder, own.passes, own.rows, own.seconds)
    finally:
        shutil.rmtree(own.folder, ignore_errors=True)
    if own.output:
        write_json(own.output, facts | result)
    print(json.dumps(result, indent=2))
    print(f"a pass: {readable_bytes(result['pass_bytes'])}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
