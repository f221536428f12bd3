"""The index of a feature store: the settings of the extraction, and which samples lie in which shard."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import read_object
from draftsmith.foreign.weights import check_file_names
from draftsmith.storage import write_text

SCHEMA_VERSION = 2
AGAIN = "restore it, or delete the folder and extract again"
INDEX_NAME = "index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoreSpec:
    """The settings in which two extractions must agree to give the same store.

    fingerprint and compute_dtype name the target and how it ran; layer_ids, dtype, hidden_size (Ht) and vocab_size (V)
    the tensors; samples is a digest of the whole sample list in order; shard_bytes decides where shards end.
    """

    fingerprint: str
    compute_dtype: str
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    vocab_size: int
    samples: str
    shard_bytes: int

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of aux and last on disk."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class ShardInfo:
    """One shard: its file, size and its samples in order. checksums: of each sample, hex, as `_checksums` makes them."""

    file: str
    bytes: int
    ids: tuple[str, ...]
    slices: tuple[str, ...]
    lengths: tuple[int, ...]
    checksums: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StoreIndex:
    """The content of index.json; complete is False while extraction has not finished."""

    spec: StoreSpec
    complete: bool = False
    shards: tuple[ShardInfo, ...] = ()

    @property
    def num_samples(self) -> int:
        """How many samples the complete shards hold."""
        return sum(len(shard.ids) for shard in self.shards)


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises UserError for one that features cannot have."""
    if name not in DTYPES:
        raise UserError(f"features cannot be of dtype {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def write_index(folder: Path, index: StoreIndex) -> None:
    """Write index.json atomically, one line per shard."""
    head = {"schema_version": SCHEMA_VERSION, "complete": index.complete, **asdict(index.spec)}
    head |= {"num_samples": index.num_samples, "num_tokens": sum(sum(shard.lengths) for shard in index.shards)}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    shards = ",\n".join(f"    {json.dumps(asdict(shard), ensure_ascii=False)}" for shard in index.shards)
    lines.append(f'  "shards": [\n{shards}\n  ]' if shards else '  "shards": []')
    write_text(folder / INDEX_NAME, "{\n" + ",\n".join(lines) + "\n}\n")


def read_index(folder: Path) -> StoreIndex:
    """Read and check index.json and the presence and size of every shard. Raises UserError in one sentence."""
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        raise UserError(f"{folder} is no feature store (it has no {INDEX_NAME}): make one with `draftsmith extract`.")
    value = read_object(path, AGAIN)
    if value.get("schema_version") != SCHEMA_VERSION:
        version = value.get("schema_version")
        raise UserError(
            f"{path} has schema_version {version}, this version of draftsmith reads {SCHEMA_VERSION}: extract again."
        )
    index = _parse(value, path)
    check_file_names(path, (shard.file for shard in index.shards), AGAIN)
    for shard in index.shards:
        file = folder / shard.file
        if (size := file.stat().st_size) != shard.bytes:
            raise UserError(
                f"The feature shard {file} has {size} bytes instead of {shard.bytes} (it was cut short or changed): "
                f"{AGAIN}."
            )
    return index


@dataclass(frozen=True)
class _Content:
    """What index.json holds besides its version and the counts for readers."""

    complete: bool
    shards: tuple[ShardInfo, ...]


def _parse(value: dict[str, Any], path: Path) -> StoreIndex:
    """Return the index in a JSON object. Raises UserError, naming the key."""
    if not isinstance(value.get("dtype"), str) or value["dtype"] not in DTYPES:
        raise UserError(f"{path}: dtype is {str(value.get('dtype'))[:40]!r}, which no store has: {AGAIN}.")
    names = [item.name for item in fields(StoreSpec)]
    spec = read_dataclass(StoreSpec, {name: value[name] for name in names if name in value}, str(path))
    content = read_dataclass(
        _Content, {name: value[name] for name in ("complete", "shards") if name in value}, str(path)
    )
    for shard in content.shards:
        counts = {len(shard.ids), len(shard.slices), len(shard.lengths), len(shard.checksums)}
        columns = {len(checksums) for checksums in shard.checksums}
        if len(counts) > 1 or min(shard.lengths, default=0) < 1 or columns != {1 + len(spec.layer_ids)}:
            raise UserError(f"{path}: the samples of {shard.file} do not add up: {AGAIN}.")
    if min(spec.hidden_size, spec.vocab_size, spec.shard_bytes) < 1:
        raise UserError(f"{path} names sizes that no store has: {AGAIN}.")
    return StoreIndex(spec, content.complete, content.shards)
