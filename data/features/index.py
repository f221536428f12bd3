"""The index of a feature store: index.json, its checks, and the size of a store.

A store is a folder with `index.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, ... The index names
the target (fingerprint), layers, dtype and samples, and per shard its file, size, SHA-256 and samples in order.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.files import write_text

SCHEMA_VERSION = 1
INDEX_NAME = "index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Per token besides the hidden states: ids int32, mask bool, top1 int32, logsumexp float32.
TOKEN_BYTES = 4 + 1 + 4 + 4


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

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a shard."""
        return estimate_bytes(1, self.hidden_size, len(self.layer_ids), self.dtype)


@dataclass(frozen=True)
class ShardInfo:
    """One shard: its file, size, checksum and its samples in order."""

    file: str
    bytes: int
    sha256: str
    ids: tuple[str, ...]
    slices: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class StoreIndex:
    """The content of index.json; complete is False while extraction has not finished."""

    spec: StoreSpec
    complete: bool = False
    shards: tuple[ShardInfo, ...] = field(default=())

    @property
    def num_samples(self) -> int:
        """How many samples the complete shards hold."""
        return sum(len(shard.ids) for shard in self.shards)


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises UserError for one that features cannot have."""
    if name not in DTYPES:
        raise UserError(f"features cannot be of dtype {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def estimate_bytes(tokens: int, hidden: int, layers: int, dtype: str) -> int:
    """Return the bytes of a store with `tokens` tokens, `layers` aux layers of width `hidden`, and the last states."""
    return tokens * ((layers + 1) * hidden * DTYPES[dtype].itemsize + TOKEN_BYTES)


def check_disk_space(path: Path, needed: int) -> None:
    """Raise UserError where the disk that holds `path` has less than `needed` bytes left."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"The features need {readable_bytes(needed)} but the disk of {path} has {readable_bytes(free)} left: free "
            "some space, choose another folder, or take fewer samples, fewer layer_ids or a smaller dtype."
        )


def readable_bytes(size: int) -> str:
    """Return a size in words, such as "1.5 GB" for 1_500_000_000."""
    value = float(size)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


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
    if not path.is_file():
        raise UserError(f"{folder} is no feature store (it has no {INDEX_NAME}): make one with `draftsmith extract`.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        version = value["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: delete the folder and extract again.") from error
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema_version {version}, this version of draftsmith reads {SCHEMA_VERSION}: extract again."
        )
    try:
        index = _parse(value)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): delete the folder and extract again.") from error
    for shard in index.shards:
        _check_size(folder / shard.file, shard.bytes)
    return index


def _parse(value: dict[str, Any]) -> StoreIndex:
    spec = {item.name: value[item.name] for item in fields(StoreSpec)}
    spec["layer_ids"] = tuple(spec["layer_ids"])
    shards = []
    for entry in value["shards"]:
        shard = ShardInfo(
            **{**entry, **{key: tuple(entry[key]) for key in ("ids", "slices", "lengths")}},
        )
        if not len(shard.ids) == len(shard.slices) == len(shard.lengths):
            raise ValueError(f"the samples of {shard.file} do not add up")
        shards.append(shard)
    return StoreIndex(StoreSpec(**spec), bool(value["complete"]), tuple(shards))


def _check_size(file: Path, size: int) -> None:
    if not file.is_file():
        raise UserError(f"The feature shard {file} is missing: restore it, or delete the folder and extract again.")
    if (found := file.stat().st_size) != size:
        raise UserError(
            f"The feature shard {file} has {found} bytes instead of {size} (it was cut short or changed): "
            "restore it, or delete the folder and extract again."
        )
