"""Feed a training with the hidden states of an 8B target: python -m scripts.bench.feed --output docs/results/feed.json

Says what a micro-batch of 8,192 tokens takes of a core, and which share of the time a training waits for it whose step computes for
170 ms (a pretended step, which sleeps). Memory is not pinned, and nothing is copied to a device: there is none. On a machine that has
other work, `chrt -f 20` in front gives it a core.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.features import store, writing
from draftsmith.data.features.index import StoreSpec
from draftsmith.data.features.store import FeatureStore
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.registry import methods
from draftsmith.machine import environment_json
from draftsmith.recipe.schema import TrainSpec
from draftsmith.storage import write_json
from draftsmith.train.feed import Feed
from draftsmith.train.schedule import Schedule, TrainData
from tests.models import make_target

HIDDEN, LAYERS, LENGTH, PER_BATCH = 4096, (2, 4, 6), 512, 16
COMPUTE = 0.17
Read = Callable[[Sequence[int]], Iterator[Any]]


def write(folder: Path, batches: int) -> None:
    """Write a store of so many micro-batches of 8,192 tokens."""
    count = batches * PER_BATCH
    size = store.estimate_bytes(LENGTH, HIDDEN, len(LAYERS), "bfloat16")
    spec = StoreSpec(
        "f" * 16, "bfloat16", LAYERS, "bfloat16", HIDDEN, 100, "s" * 16, PER_BATCH * size, PER_BATCH * LENGTH, ("chat",)
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, (LENGTH,), generator=generator)
    mask = torch.arange(LENGTH) >= LENGTH // 2
    state = torch.randn(LENGTH, HIDDEN, generator=generator).bfloat16()
    rows = {"ids": ids.int(), "mask": mask, "last": state, "top1": ids.int(), "logsumexp": ids.float()}
    rows |= {f"aux.{k}": state for k in LAYERS}
    with mock.patch("os.fsync"):
        writing.begin_store(folder, spec, [Tokenized(ids, mask, f"{number}", "chat") for number in range(count)])
        writer = writing.FeatureWriter(folder)
        for number, numbers in enumerate(writer.shards):
            writer.write(number, [rows] * len(numbers))
            writer.merge()
        writer.finish()


def feed_of(folder: Path, verify: bool = False) -> Read:
    """Return what reads the batches of epochs, with the plans of an EAGLE-3 head of seven steps."""
    source, spec, device = FeatureStore(folder, verify=verify), TrainSpec(), torch.device("cpu")
    head = methods()["eagle3"].build(Eagle3Options(layer_ids=list(LAYERS)), make_target(), None).train()
    feed = Feed(TrainData(source, list(range(len(source))), []), head, spec, device)
    schedule = Schedule(source.lengths, spec, 0, 1)

    def read(epochs: Sequence[int]) -> Iterator[Any]:
        for window in feed.windows((micro, number) for number in epochs for micro in schedule.share(number, 0)):
            for fed in window:
                yield feed.batch(fed)

    return read


def timed(read: Read, compute: float, epochs: Sequence[int]) -> dict[str, float]:
    """Return the milliseconds of a core that a micro-batch takes, and the share of the time that steps of `compute` seconds wait."""
    started, begun, waited, count = time.perf_counter(), time.process_time(), 0.0, 0
    batches, asked = read(epochs), started
    for _ in batches:
        waited += time.perf_counter() - asked
        count += 1
        time.sleep(compute)
        asked = time.perf_counter()
    waited, seconds = waited + time.perf_counter() - asked, time.perf_counter() - started
    return {"core_ms": 1e3 * (time.process_time() - begun) / count, "waiting": waited / seconds}


def main(argv: list[str]) -> int:
    """Run the bench; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.feed", description=__doc__)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    alone = "chrt -f 20 " if os.sched_getscheduler(0) == os.SCHED_FIFO else ""
    command = f"{alone}python -m scripts.bench.feed --batches {own.batches} --turns {own.turns}"
    facts = environment_json() | {"command": command}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), own.batches)
        # The first time the contents of a store are checked.
        checked, unchecked = (timed(feed_of(Path(folder), verify), 0, [0])["core_ms"] for verify in (True, False))
        read, turns = feed_of(Path(folder)), []
        for _ in range(own.turns):
            timed(read, 0, [0])
            turns.append({"read": timed(read, 0, [1, 2]), "train": timed(read, COMPUTE, [3, 4, 5])})
    facts |= {
        "checks_ms": checked - unchecked,
        "core_ms_per_8192_tokens": median(one["read"]["core_ms"] for one in turns),
        "share_waiting": median(one["train"]["waiting"] for one in turns),
        "turns": turns,
    }
    if own.output:
        write_json(own.output, facts)
    print(json.dumps(facts, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
