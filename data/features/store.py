"""The feature store: what the frozen target computed, in checksummed safetensors shards, written and read by mmap.

Shapes: T tokens of a shard, S samples of a shard, L tokens of a sample, A aux layers, Ht target hidden size.
A shard holds ids [T] int32, mask [T] bool, aux.{k} [T, Ht] for every stored layer id k, last [T, Ht], top1 [T] int32,
logsumexp [T] float32 and offsets [S+1] int64. One tensor per layer, so that one superset store serves every head.
Shards appear whole or not at all, and a run that writes them can be killed at any moment. `index.json` names the target
(fingerprint), layers, dtype and samples, and per shard its file, size, SHA-256 and samples in order.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.batch import Features
from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import read_object
from draftsmith.foreign.weights import check_file_names, read_header
from draftsmith.storage import atomic_path, explain_os_error, sha256_file, sweep, write_text

SCHEMA_VERSION = 1
_AGAIN = "restore it, or delete the folder and extract again"
INDEX_NAME = "index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Per token besides the hidden states: ids int32, mask bool, top1 int32, logsumexp float32.
TOKEN_BYTES = 4 + 1 + 4 + 4
SHARD_BYTES = 512 * 2**20
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")
OPEN_SHARDS = 64


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
            "some space, choose another folder, or take fewer samples (data.limit), fewer head.layer_ids or a smaller features.dtype."
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
    if not os.path.lexists(path):
        raise UserError(f"{folder} is no feature store (it has no {INDEX_NAME}): make one with `draftsmith extract`.")
    value = read_object(path, _AGAIN)
    if value.get("schema_version") != SCHEMA_VERSION:
        version = value.get("schema_version")
        raise UserError(
            f"{path} has schema_version {version}, this version of draftsmith reads {SCHEMA_VERSION}: extract again."
        )
    index = _parse(value, path)
    check_file_names(path, (shard.file for shard in index.shards), _AGAIN)
    for shard in index.shards:
        file = folder / shard.file
        if (size := file.stat().st_size) != shard.bytes:
            raise UserError(
                f"The feature shard {file} has {size} bytes instead of {shard.bytes} (it was cut short or changed): "
                "restore it, or delete the folder and extract again."
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
        raise UserError(f"{path}: dtype is {str(value.get('dtype'))[:40]!r}, which no store has: {_AGAIN}.")
    names = [item.name for item in fields(StoreSpec)]
    spec = read_dataclass(StoreSpec, {name: value[name] for name in names if name in value}, str(path))
    content = read_dataclass(
        _Content, {name: value[name] for name in ("complete", "shards") if name in value}, str(path)
    )
    for shard in content.shards:
        counts = (len(shard.ids), len(shard.slices), len(shard.lengths))
        if len(set(counts)) > 1 or min(shard.lengths, default=0) < 1:
            raise UserError(f"{path}: the samples of {shard.file} do not add up: {_AGAIN}.")
    if min(spec.hidden_size, spec.vocab_size, spec.shard_bytes) < 1:
        raise UserError(f"{path} names sizes that no store has: {_AGAIN}.")
    return StoreIndex(spec, content.complete, content.shards)


class FeatureSource(Protocol):
    """Where training gets features from: a store or the online target. Training cannot tell which."""

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""

    @property
    def slices(self) -> list[str]:
        """The slice of every sample."""

    def get_many(self, indices: Sequence[int], layer_ids: Sequence[int] | None = None) -> list[Features]:
        """Return samples in the order of `indices`; aux [L, A*Ht] has the columns of `layer_ids` in that order.

        None takes every layer of the source.
        """


class FeatureStore:
    """Reads a complete store by mmap; a shard's checksum is verified the first time it is opened.

    path: the folder. fingerprint, if given, must be the target's that made the store. verify=False skips checksums
    (sizes are always checked).
    Raises UserError for a missing, incomplete, damaged or foreign store.
    """

    def __init__(self, path: Path | str, *, fingerprint: str | None = None, verify: bool = True) -> None:
        self.path = Path(path)
        index = read_index(self.path)
        if not index.complete:
            raise UserError(
                f"The feature store {self.path} is not complete ({index.num_samples} samples so far): "
                "run the same extraction again to finish it."
            )
        self.spec = index.spec
        if fingerprint is not None and fingerprint != self.spec.fingerprint:
            raise UserError(
                f"The feature store {self.path} was made with another target (fingerprint {self.spec.fingerprint}, now "
                f"{fingerprint}): extract again into another folder, or use the target it was made with."
            )
        self.layer_ids = self.spec.layer_ids
        self.ids = [sample_id for shard in index.shards for sample_id in shard.ids]
        self.slices = [name for shard in index.shards for name in shard.slices]
        self.lengths = [length for shard in index.shards for length in shard.lengths]
        self._shards = index.shards
        self._place = [(number, row) for number, shard in enumerate(index.shards) for row in range(len(shard.ids))]
        # Shared with the workers of a DataLoader, which are started anew in every epoch.
        self._verified = torch.full((len(index.shards),), not verify).share_memory_()
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int, layer_ids: Sequence[int] | None = None) -> Features:
        """Return one sample; aux [L, A*Ht] has the columns of `layer_ids` in that order (None: every stored layer)."""
        chosen = self.layer_ids if layer_ids is None else layer_ids
        if missing := [k for k in chosen if k not in self.layer_ids]:
            raise UserError(
                f"The feature store {self.path} holds layers {list(self.layer_ids)} but not {missing[0]}: "
                "extract again with all the layers that the heads need in features.layer_ids."
            )
        number, row = self._place[index]
        shard = self._shard(number)
        start, end = (int(offset) for offset in shard.get_slice("offsets")[row : row + 2])
        part = {name: shard.get_slice(name)[start:end] for name in ("ids", "mask", "last", "top1", "logsumexp")}
        streams = [shard.get_slice(f"aux.{k}")[start:end] for k in chosen]
        return Features(
            **{**part, "ids": part["ids"].long()},
            aux=torch.cat(streams, dim=-1) if streams else part["last"][:, :0],
            sample_id=self.ids[index],
            slice=self.slices[index],
        )

    def get_many(self, indices: Sequence[int], layer_ids: Sequence[int] | None = None) -> list[Features]:
        """Return several samples, in the order of `indices`."""
        return [self.get(index, layer_ids) for index in indices]

    def _shard(self, number: int) -> Any:
        """Return an open shard; the one opened first is closed when there are many."""
        if number not in self._open:
            file, info = self.path / self._shards[number].file, self._shards[number]
            if not self._verified[number]:
                if sha256_file(file) != info.sha256:
                    raise UserError(
                        f"The feature shard {file} is corrupt (its checksum differs from {INDEX_NAME}): "
                        "restore it, or delete the folder and extract again."
                    )
                self._verified[number] = True
            if len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            read_header(file, _AGAIN)
            with foreign_code(f"The feature shard {file} cannot be read", _AGAIN):
                opened = safe_open(file, framework="pt")
                lengths = tuple(opened.get_tensor("offsets").diff().tolist())
            if lengths != info.lengths:
                raise UserError(f"{self.path / INDEX_NAME} names other lengths of samples than {file} has: {_AGAIN}.")
            self._open[number] = opened
        return self._open[number]


class FeatureWriter:
    """Writes a store sample by sample and continues an unfinished one after its last complete shard.

    A shard ends before the sample that would make it larger than spec.shard_bytes, so the files depend only on the
    samples and their order: a run that was killed and resumed leaves the same bytes. Opening an unfinished store
    removes temporary and unlisted files; `index.num_samples` samples are already in it and must not be added again.
    Raises UserError where the folder holds a store with another spec, or files that are no store.
    """

    def __init__(self, path: Path | str, spec: StoreSpec) -> None:
        self.path, self.spec = Path(path), spec
        self._pending: list[Features] = []
        self._pending_bytes = 0
        if (self.path / INDEX_NAME).exists():
            self.index = read_index(self.path)
            _check_same(self.path, self.index.spec, spec)
            self._remove_strays()
        else:
            if self.path.is_dir() and any(SHARD_PATTERN.fullmatch(file.name) for file in self.path.iterdir()):
                raise UserError(f"{self.path} holds feature shards but no {INDEX_NAME}: choose another folder.")
            self.index = StoreIndex(spec)
            write_index(self.path, self.index)

    def add(self, features: Features) -> None:
        """Append one sample; its aux columns are those of spec.layer_ids in order."""
        assert not self.index.complete, "the store is finished"
        width = self.spec.hidden_size
        length = features.ids.shape[0]
        assert features.aux.shape == (length, len(self.spec.layer_ids) * width), features.aux.shape
        assert features.last.shape == (length, width), features.last.shape
        size = estimate_bytes(length, width, len(self.spec.layer_ids), self.spec.dtype)
        if self._pending and self._pending_bytes + size > self.spec.shard_bytes:
            self._write_shard()
        self._pending.append(features)
        self._pending_bytes += size

    def finish(self) -> None:
        """Write what is left and mark the store complete."""
        if self.index.complete:
            return
        if self._pending:
            self._write_shard()
        self.index = StoreIndex(self.spec, True, self.index.shards)
        write_index(self.path, self.index)

    def _write_shard(self) -> None:
        samples, self._pending, self._pending_bytes = self._pending, [], 0
        file = self.path / f"shard-{len(self.index.shards):05d}.safetensors"
        with atomic_path(file) as temporary:
            save_file(_shard_tensors(samples, self.spec), temporary)
        shard = ShardInfo(
            file=file.name,
            bytes=file.stat().st_size,
            sha256=sha256_file(file),
            ids=tuple(sample.sample_id for sample in samples),
            slices=tuple(sample.slice for sample in samples),
            lengths=tuple(sample.ids.shape[0] for sample in samples),
        )
        self.index = StoreIndex(self.spec, False, (*self.index.shards, shard))
        write_index(self.path, self.index)

    def _remove_strays(self) -> None:
        listed = {shard.file for shard in self.index.shards}
        with explain_os_error(self.path):
            sweep(self.path, levels=0)
            for file in self.path.iterdir():
                if SHARD_PATTERN.fullmatch(file.name) and file.name not in listed:
                    file.unlink()


def _shard_tensors(samples: list[Features], spec: StoreSpec) -> dict[str, Tensor]:
    """Return the tensors of one shard by name."""
    dtype, width = spec.torch_dtype, spec.hidden_size
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for sample in samples:
        columns["ids"].append(sample.ids.to(torch.int32))
        columns["mask"].append(sample.mask.bool())
        columns["last"].append(sample.last.to(dtype))
        columns["top1"].append(sample.top1.to(torch.int32))
        columns["logsumexp"].append(sample.logsumexp.float())
        for place, k in enumerate(spec.layer_ids):
            columns[f"aux.{k}"].append(sample.aux[:, place * width : (place + 1) * width].to(dtype))
    tensors = {name: torch.cat(parts).cpu().contiguous() for name, parts in columns.items()}
    lengths = torch.tensor([0] + [sample.ids.shape[0] for sample in samples])
    return {**tensors, "offsets": lengths.cumsum(0)}


def _check_same(path: Path, stored: StoreSpec, wanted: StoreSpec) -> None:
    """Raise UserError naming the first field in which an existing store differs from the wanted one."""
    what = {"fingerprint": "target", "samples": "list of samples"}
    for name, value in vars(wanted).items():
        if (old := getattr(stored, name)) != value:
            raise UserError(
                f"The feature store {path} was made with another {what.get(name, name)} ({old}, now {value}): "
                "choose another folder, or delete that one to extract again."
            )
