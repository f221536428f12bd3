"""Writing a feature store: shards that appear whole or not at all, by several processes at once.

Shapes: L tokens of a sample, A aux layers, Ht target hidden size.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import Chunk, Features, Tokenized, plan_chunks
from draftsmith.data.features.index import (
    AGAIN,
    INDEX_NAME,
    StoreSpec,
    append_shard,
    begin_index,
    complete_index,
    cut_off,
    read_index,
    shard_name,
)
from draftsmith.data.features.store import COMMON, checksum, estimate_bytes, shard_layout
from draftsmith.errors import UserError
from draftsmith.foreign.text import parse_json
from draftsmith.storage import atomic_path, explain_os_error, sweep

SHARD_BYTES = 512 * 2**20
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")
_SIZES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "BOOL": 1}

Rows = dict[str, Tensor]
"""The rows of a sample, or of several, in each tensor of a shard, by its name."""


def rows_of(features: Features, spec: StoreSpec) -> Rows:
    """Return the rows of a sample whose aux columns are those of spec.layer_ids in order."""
    width, length = spec.hidden_size, len(features.ids)
    assert features.aux.shape == (length, len(spec.layer_ids) * width), features.aux.shape
    assert features.last.shape == (length, width), features.last.shape
    streams = features.aux.split(width, dim=-1)
    rows = {name: getattr(features, name).to(dtype or spec.torch_dtype) for name, dtype in COMMON.items()}
    return rows | {f"aux.{k}": stream.to(spec.torch_dtype) for k, stream in zip(spec.layer_ids, streams, strict=False)}


def plan_shards(lengths: Sequence[int], ends: Sequence[int], spec: StoreSpec) -> list[range]:
    """Return the samples of every shard. ends: where chunks end, each of which is computed as a whole.

    A shard ends with a chunk, before the one that would make it larger than spec.shard_bytes; a chunk that is larger itself fills
    shards of its own. So any process computes whole shards, and the files depend only on the samples and their order.
    """
    token = estimate_bytes(1, spec.hidden_size, len(spec.layer_ids), spec.dtype)
    before = [0, *accumulate(lengths)]
    shards: list[range] = []
    start = last = 0

    def close(end: int) -> None:
        nonlocal start
        if end > start:
            shards.append(range(start, end))
        start = end

    for end in ends:
        if (before[end] - before[start]) * token > spec.shard_bytes:
            close(last)
        if (before[end] - before[start]) * token > spec.shard_bytes:
            for sample in range(start + 1, end):
                if (before[sample + 1] - before[start]) * token > spec.shard_bytes:
                    close(sample)
            close(end)
        last = end
    close(last)
    return shards


def begin_store(path: Path, spec: StoreSpec, samples: Sequence[Tokenized]) -> None:
    """Make a store that is to be filled, or get an unfinished one ready to go on, which removes what is half-written there.

    Raises UserError where the folder holds a store with another spec, or files that are no store.
    """
    if (path / INDEX_NAME).exists():
        index = read_index(path)
        what = {"fingerprint": "target", "samples": "list of samples"}
        for name, value in vars(spec).items():
            if (old := getattr(index.spec, name)) != value:
                raise UserError(
                    f"The feature store {path} was made with another {what.get(name, name)} ({old}, now {value}): "
                    "choose another folder, or delete that one to extract again."
                )
        if not index.complete:
            cut_off(path, index)
    else:
        if path.is_dir() and any(SHARD_PATTERN.fullmatch(file.name) for file in path.iterdir()):
            raise UserError(f"{path} holds feature shards but no {INDEX_NAME}: choose another folder.")
        begin_index(path, spec, samples)
    with explain_os_error(path):
        sweep(path, levels=0)


class FeatureWriter:
    """Writes the shards of a store that `begin_store` has made, in any order and by several processes at once.

    A run that was killed and resumed leaves the same bytes, whatever processes it had: `has` tells which shards are there. One
    process, and no other, puts them into the index.
    shares: chunks that are computed together, with the numbers of the shards that their samples fill.
    """

    def __init__(self, path: Path) -> None:
        index = read_index(path)
        self.path, self.spec, self.samples = path, index.spec, index.samples
        chunks = plan_chunks(self.samples.lengths, self.spec.batch_tokens)
        self.shards = plan_shards(self.samples.lengths, [chunk.end for chunk in chunks], self.spec)
        # Chunks and the numbers of shards, wherever both end with the same sample.
        self.shares: list[tuple[list[Chunk], list[int]]] = []
        number, own = 0, list[Chunk]()
        for chunk in chunks:
            own.append(chunk)
            filled = []
            while number < len(self.shards) and self.shards[number].stop <= chunk.end:
                filled.append(number)
                number += 1
            if filled:
                self.shares.append((own, filled))
                own = []
        self.complete, self._merged = index.complete, len(index.shards)
        self._end = index.shards[-1] if len(index.shards) else None

    def has(self, number: int) -> bool:
        """Whether a shard is there."""
        return number < self._merged or self._checksums_in(number) is not None

    def write(self, number: int, samples: Sequence[Rows]) -> None:
        """Write a shard of samples whose tensors are on the CPU, in the dtypes of the store."""
        assert len(samples) == len(self.shards[number]), number
        with atomic_path(self.path / shard_name(number)) as temporary:
            write_shard(temporary, self.spec, samples)

    def merge(self) -> bool:
        """Put the shards that are next into the index, as far as they are there; return whether all are in it."""
        while self._merged < len(self.shards) and (found := self._checksums_in(self._merged)) is not None:
            size, checksums = found
            self._end = append_shard(self.path, self._end, size, checksums, len(self.shards[self._merged]))
            self._merged += 1
        return self._merged == len(self.shards)

    def finish(self) -> None:
        """Mark the store complete, of which all shards are in the index."""
        if not self.complete:
            listed = {shard_name(number) for number in range(len(self.shards))}
            with explain_os_error(self.path):
                for file in self.path.iterdir():
                    if SHARD_PATTERN.fullmatch(file.name) and file.name not in listed:
                        file.unlink()
            complete_index(self.path, read_index(self.path))
        self.complete = True

    def _checksums_in(self, number: int) -> tuple[int, bytes] | None:
        """Return the size and the checksums of a whole shard; None where there is none, or another one."""
        path = self.path / shard_name(number)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                text = file.read(int.from_bytes(file.read(8), "little") if size > 8 else 0)
            checksums = bytes.fromhex(parse_json(text, str(path), AGAIN)["__metadata__"]["checksums"])
        except (OSError, UserError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
            return None
        lengths = self.samples.records["length"][self.shards[number].start : self.shards[number].stop]
        header, body = shard_header(self.spec, int(lengths.sum(dtype=np.int64)), checksums)
        width = 16 * (1 + len(self.spec.layer_ids))
        same = text == header and size == 8 + len(header) + body and len(checksums) == width * len(lengths)
        return (size, checksums) if same else None


def shard_header(spec: StoreSpec, tokens: int, checksums: bytes) -> tuple[bytes, int]:
    """Return the header of a shard's safetensors file with the checksums of its samples, and the bytes of its tensors."""
    layout = shard_layout(spec, tokens)
    header: dict[str, Any] = {"__metadata__": {"checksums": checksums.hex()}}
    at = 0
    for name in _in_file(layout):
        dtype, shape = layout[name]
        end = at + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), at


def _in_file(layout: dict[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Return the names of tensors in the order in which safetensors itself writes them, which keeps every one of them aligned."""
    return sorted(layout, key=lambda name: (list(_SIZES).index(layout[name][0]), name))


def write_shard(path: Path, spec: StoreSpec, samples: Sequence[Rows]) -> None:
    """Write samples one after the other as a safetensors file, from where they lie in memory: nothing is put together before."""
    tokens = sum(len(rows["ids"]) for rows in samples)
    parts = [COMMON, *((f"aux.{k}",) for k in spec.layer_ids)]  # what every head reads, then each layer
    checksums = (checksum([rows[name] for name in names]) for rows in samples for names in parts)
    text, _ = shard_header(spec, tokens, b"".join(checksums))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in _in_file(shard_layout(spec, tokens)):
            for rows in samples:
                file.write(rows[name].contiguous().view(torch.uint8).numpy().data)
