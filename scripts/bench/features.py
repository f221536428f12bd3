"""Measure hidden states on disk at the sizes of an 8B target: python -m scripts.bench.features store --output docs/results/store.json

store: writes a store of a million tiny samples and opens it. Says how many bytes of index and token ids were written against their final
size, and what opening takes in time and memory in a fresh process.
feed: what a micro-batch of 8,192 tokens takes of a core, and which share of the time a training waits for it whose step computes for
170 ms (a pretended step, which sleeps). Memory is not pinned, and nothing is copied to a device: there is none. On a machine that has
other work, `chrt -f 20` in front gives it a core.
extraction --folder /dev/shm/x: how much longer an extraction takes than its passes alone, and the CPU seconds behind a pass. A pretended
pass sleeps and hands out states, 8,192 tokens at a time; the rest is checksums, shards on disk and the index.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from draftsmith.data.batch import Tokenized
from draftsmith.data.features import extract as extraction
from draftsmith.data.features import writing
from draftsmith.data.features.index import CHECKSUMS, IDS, INDEX_NAME, MASKS, NAMES, SAMPLES, SHARDS, StoreSpec
from draftsmith.data.features.store import FeatureStore, estimate_bytes
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.registry import methods
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import Target
from draftsmith.train.feed import Feed
from draftsmith.train.schedule import Schedule, TrainData
from scripts.bench.commands import facts_of, keep
from tests.models import make_target

WIDTH, VOCAB, LAYERS, SAMPLE_TOKENS = 4096, 128_256, (2, 16, 29), 2048
FED, LENGTH, PER_BATCH, COMPUTE = (2, 4, 6), 512, 16, 0.17
"""Of the feed: layers, tokens of a text, texts in a micro-batch, seconds of a step."""
INDEX = (INDEX_NAME, NAMES, SAMPLES, IDS, MASKS, CHECKSUMS, SHARDS)
Read = Callable[[Sequence[int]], Iterator[Any]]


def fill(folder: Path, texts: Sequence[Tokenized], layers: tuple[int, ...], state: Tensor, per_shard: int) -> None:
    """Write a store of texts of one length, `per_shard` of them in a shard, all with the same states; the disk is not waited for."""
    (tokens, width), slices = state.shape, tuple(dict.fromkeys(text.slice for text in texts))
    size = per_shard * estimate_bytes(tokens, width, len(layers), "bfloat16")
    pieces = ("f" * 16, "bfloat16", layers, "bfloat16", width, 100, "s" * 16, size, per_shard * tokens, slices)
    ids, mask = texts[0].ids, texts[0].mask
    rows = {"ids": ids.int(), "mask": mask, "last": state, "top1": ids.int(), "logsumexp": ids.float()}
    rows |= {f"aux.{k}": state for k in layers}
    with mock.patch("os.fsync"):
        writing.begin_store(folder, StoreSpec(*pieces), texts)
        writer = writing.FeatureWriter(folder)
        for number, numbers in enumerate(tqdm(writer.shards, unit="shard")):
            writer.write(number, [rows] * len(numbers))
            writer.merge()
        writer.finish()


def store(own: argparse.Namespace) -> dict[str, Any]:
    """Write a store of samples of one token, and open it three times."""
    process, written, word = psutil.Process(), 0, torch.zeros(1, dtype=torch.int64)
    texts = [
        Tokenized(word, word.bool(), f"conversation-{n:08d}", ("chat", "code")[n % 2], f"talk-{n // 2:08d}")
        for n in range(own.samples)
    ]

    def counting(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal written
        before = process.io_counters().write_chars  # what the system was given to write
        result = function(*arguments)
        written += process.io_counters().write_chars - before
        return result

    names = ("begin_store", "append_shard", "complete_index")
    counted: dict[str, Any] = {name: partial(counting, getattr(writing, name)) for name in names}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(writing, **counted):
        started = time.perf_counter()
        fill(Path(folder), texts, LAYERS, torch.zeros(1, 1, dtype=torch.bfloat16), own.per_shard)
        seconds = time.perf_counter() - started
        final = sum((Path(folder) / name).stat().st_size for name in INDEX)
        command = [sys.executable, "-m", "scripts.bench.features", "open", folder]
        opened = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3)
        ]
    sizes = {"shards": -(-own.samples // own.per_shard), "index_bytes": final, "index_bytes_written": written}
    return {**sizes, "write_seconds": seconds, "opened": opened}


def open_store(own: argparse.Namespace) -> dict[str, Any]:
    """Open a store in this process and return the seconds and the bytes of memory, mapped files included."""
    process = psutil.Process()
    before, started, used = process.memory_info().rss, time.perf_counter(), time.process_time()
    opened = FeatureStore(own.folder)
    used = time.process_time() - used
    assert opened.samples[len(opened) - 1].conversation is not None  # token ids are there without a tokenizer
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": used}
    return {**taken, "megabytes": (process.memory_info().rss - before) / 1e6, "samples": len(opened)}


def feed(own: argparse.Namespace) -> dict[str, Any]:
    """Write a store of some micro-batches, and read it as a training does."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, (LENGTH,), generator=generator)
    mask, count = torch.arange(LENGTH) >= LENGTH // 2, own.batches * PER_BATCH
    texts = [Tokenized(ids, mask, f"{number}", "chat") for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), texts, FED, torch.randn(LENGTH, WIDTH, generator=generator).bfloat16(), PER_BATCH)
        # The first time the contents of a store are checked.
        checked, unchecked = (timed(reader(folder, verify), 0, [0])["core_ms"] for verify in (True, False))
        read, turns = reader(folder), []
        for _ in range(own.turns):
            timed(read, 0, [0])
            turns.append({"read": timed(read, 0, [1, 2]), "train": timed(read, COMPUTE, [3, 4, 5])})
    return {
        "checks_ms": checked - unchecked,
        "core_ms_per_8192_tokens": median(one["read"]["core_ms"] for one in turns),
        "share_waiting": median(one["train"]["waiting"] for one in turns),
        "turns": turns,
    }


def reader(folder: str, verify: bool = False) -> Read:
    """Return what reads the batches of epochs, with the plans of an EAGLE-3 head of seven steps."""
    source, spec = FeatureStore(Path(folder), verify=verify), TrainSpec()
    head = methods()["eagle3"].build(Eagle3Options(layer_ids=list(FED)), make_target(), None).train()
    fed = Feed(TrainData(source, list(range(len(source))), []), head, spec, torch.device("cpu"))
    schedule = Schedule(source.lengths, spec, 0, 1)

    def read(epochs: Sequence[int]) -> Iterator[Any]:
        for window in fed.windows((micro, number) for number in epochs for micro in schedule.share(number, 0)):
            yield from map(fed.batch, window)

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


def extract(own: argparse.Namespace) -> dict[str, Any]:
    """Extract the samples of some pretended passes, whose target has what extraction asks for besides."""
    tokens, generator = own.rows * SAMPLE_TOKENS, torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (SAMPLE_TOKENS,), generator=generator)
    samples = [Tokenized(ids, ids > 0, f"sample-{number}", "chat") for number in range(own.rows * own.passes)]
    names = ("last", *(f"aux.{k}" for k in LAYERS))
    states = {name: torch.randn(tokens, WIDTH, generator=generator).bfloat16() for name in names}
    states |= {"top1": torch.zeros(tokens, dtype=torch.int32), "logsumexp": torch.zeros(tokens)}
    facts = {"fingerprint": "f" * 16, "dtype_name": "bfloat16", "hidden_size": WIDTH, "vocab_size": VOCAB}
    facts |= {"device": torch.device("cpu"), "context_length": 8192, "embedding": torch.empty(VOCAB, 0)}
    target = cast(Target, SimpleNamespace(**facts, check_layer_ids=lambda layers: None))

    def emptied(append: Callable[..., Any], path: Path, end: Any, size: int, *rest: Any) -> Any:
        # A shard that is done keeps its size alone, since a disk in memory would soon be full.
        record = append(path, end, size, *rest)
        shard = max(path.glob("shard-*"))
        os.truncate(shard, 0)
        os.truncate(shard, size)
        return record

    try:
        with (
            mock.patch.object(extraction, "compute_states", side_effect=lambda *_: time.sleep(own.seconds)),
            mock.patch.object(extraction, "by_tensor", return_value=states),
            mock.patch.object(writing, "append_shard", partial(emptied, writing.append_shard)),
        ):
            started, used = time.perf_counter(), time.process_time()
            extraction.extract(target, samples, own.folder, layer_ids=LAYERS, batch_tokens=tokens)
            wall, cpu = time.perf_counter() - started, time.process_time() - used
    finally:
        shutil.rmtree(own.folder, ignore_errors=True)
    size = estimate_bytes(tokens, WIDTH, len(LAYERS), "bfloat16")
    alone = own.passes * own.seconds
    took = {"wall_seconds": wall, "wall_over_passes": wall / alone, "cpu_seconds_per_pass": cpu / own.passes}
    return {"passes": own.passes, "pass_seconds": own.seconds, "pass_bytes": size, **took}


def main(argv: Sequence[str]) -> int:
    """Run what is named; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.features", description=__doc__)
    named = parser.add_subparsers(required=True)

    def add(name: str, run: Callable[[argparse.Namespace], dict[str, Any]]) -> Callable[..., Any]:
        own = named.add_parser(name)
        own.set_defaults(run=run)
        own.add_argument("--output", type=Path)
        return own.add_argument

    option = add("store", store)
    option("--samples", type=int, default=1_000_000)
    option(
        "--per_shard", type=int, default=16, help="samples in a shard; of 1,000 tokens 16 fill 512 MB for an 8B target"
    )
    add("open", open_store)("folder", type=Path, help="a store, which is opened alone")
    option = add("feed", feed)
    option("--batches", type=int, default=12)
    option("--turns", type=int, default=3)
    option = add("extraction", extract)
    option("--folder", type=Path, required=True, help="on the disk to write to; it is made and removed")
    option("--passes", type=int, default=88)
    option("--rows", type=int, default=4, help=f"samples of {SAMPLE_TOKENS} tokens in a pass")
    option("--seconds", type=float, default=0.25, help="of a pretended pass")
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    alone, facts = "chrt -f 20 " if os.sched_getscheduler(0) == os.SCHED_FIFO else "", facts_of("features", argv)
    result = own.run(own)
    return keep(own.output, facts | {"command": alone + facts["command"]} | result, result)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
