"""The index of a feature store: the settings of the extraction, and which samples lie in which shard.

`index.json` holds the settings, and is written when the extraction begins and when it ends. In between, every shard adds to three
files of fixed-width records: its samples' names to `names.bin`, their records to `samples.bin`, and last its own record to
`shards.bin`. What lies behind the last whole record of a shard was left half-written, and is cut off on resume.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import open_file, read_object
from draftsmith.storage import explain_os_error, flush, write_text

SCHEMA_VERSION = 3
AGAIN = "restore it, or delete the folder and extract again"
INDEX_NAME = "index.json"
SHARDS, SAMPLES, NAMES = "shards.bin", "samples.bin", "names.bin"
# samples: in this shard and all before it. names: bytes of their names. bytes: of the shard's file. checksum: the XXH3-128
# of these three, of its samples' records and of their names.
SHARD_RECORD = np.dtype([("samples", "<u8"), ("names", "<u8"), ("bytes", "<u8"), ("checksum", "V16")])
_COUNTS = 24  # the bytes before the checksum
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoreSpec:
    """The settings in which two extractions must agree to give the same store.

    fingerprint and compute_dtype name the target and how it ran; layer_ids, dtype, hidden_size (Ht) and vocab_size (V)
    the tensors; samples is a digest of the whole sample list in order; shard_bytes decides where shards end;
    slices names the slices, which records give by number.
    """

    fingerprint: str
    compute_dtype: str
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    vocab_size: int
    samples: str
    shard_bytes: int
    slices: tuple[str, ...]

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of aux and last on disk."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class StoreIndex:
    """The index of a store; complete is False while extraction has not finished.

    shards, samples: arrays of SHARD_RECORD and of `sample_record`; names: the bytes of all samples' names, in one piece.
    """

    spec: StoreSpec
    complete: bool
    shards: np.ndarray
    samples: np.ndarray
    names: np.ndarray

    @property
    def num_samples(self) -> int:
        """How many samples the complete shards hold."""
        return len(self.samples)

    def name(self, number: int) -> str:
        """Return the name of a sample."""
        start = int(self.samples["name"][number - 1]) if number else 0
        return self.names[start : self.samples["name"][number]].tobytes().decode(errors="replace")


def sample_record(layers: int) -> np.dtype:
    """Return the record of a sample in a store with so many layers.

    length: its tokens. slice: a number in `StoreSpec.slices`. name: where its name ends in NAMES. checksums: of what every
    head reads, then of each layer in order.
    """
    return np.dtype([("length", "<u4"), ("slice", "<u4"), ("name", "<u8"), ("checksums", "V16", (1 + layers,))])


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises UserError for one that features cannot have."""
    if name not in DTYPES:
        raise UserError(f"features cannot be of dtype {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def write_index(folder: Path, spec: StoreSpec, index: StoreIndex | None = None) -> None:
    """Write index.json atomically: of a store that is to be filled, or of the complete `index`."""
    if index is None:
        for name in (NAMES, SAMPLES, SHARDS):
            with explain_os_error(folder / name):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"")
    counts = (0, 0) if index is None else (len(index.samples), int(index.samples["length"].sum(dtype=np.int64)))
    head = {"schema_version": SCHEMA_VERSION, "complete": index is not None, **asdict(spec)}
    head |= {"num_samples": counts[0], "num_tokens": counts[1]}
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    write_text(folder / INDEX_NAME, "{\n" + ",\n".join(lines) + "\n}\n")


def append_shard(folder: Path, end: np.void | None, size: int, samples: np.ndarray, names: Sequence[str]) -> np.void:
    """Add a shard of `size` bytes, its samples' records and their names to the index; return its record.

    end: the record of the shard before it, None for the first. The records' `name` is filled in.
    """
    count, start = (0, 0) if end is None else (int(end["samples"]), int(end["names"]))
    encoded = [name.encode() for name in names]
    samples["name"] = start + np.cumsum([len(name) for name in encoded])
    record = np.zeros(1, SHARD_RECORD)
    record["samples"], record["names"], record["bytes"] = count + len(samples), samples["name"][-1], size
    record["checksum"] = np.void(_digest(record.tobytes()[:_COUNTS], samples.tobytes(), together := b"".join(encoded)))
    for name, data in ((NAMES, together), (SAMPLES, samples.tobytes()), (SHARDS, record.tobytes())):
        with explain_os_error(folder / name):
            with (folder / name).open("ab") as file:
                file.write(data)
            flush(folder / name)  # in this order: a shard's record says that the rest is there
    return record[0]


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def cut_off(folder: Path, index: StoreIndex) -> None:
    """Cut off what a killed extraction left half-written behind the last shard of `index`."""
    for name, values in ((SHARDS, index.shards), (SAMPLES, index.samples), (NAMES, index.names)):
        with explain_os_error(folder / name):
            os.truncate(folder / name, values.nbytes)


def read_index(folder: Path) -> StoreIndex:
    """Read and check the index and the presence and size of every shard. Raises UserError in one sentence."""
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        raise UserError(f"{folder} is no feature store (it has no {INDEX_NAME}): make one with `draftsmith extract`.")
    value = read_object(path, AGAIN)
    if value.get("schema_version") != SCHEMA_VERSION:
        version = value.get("schema_version")
        raise UserError(
            f"{path} has schema_version {version}, this version of draftsmith reads {SCHEMA_VERSION}: make the store "
            "again with `draftsmith extract` and --redo features."
        )
    spec, content = _parse(value, path)
    shards, samples = (
        _column(folder / SHARDS, SHARD_RECORD),
        _column(folder / SAMPLES, sample_record(len(spec.layer_ids))),
    )
    names = _column(folder / NAMES, np.dtype("u1"))
    ends = (int(shards["samples"][-1]), int(shards["names"][-1])) if len(shards) else (0, 0)
    whole = ends[0] == content.num_samples and ends == (len(samples), len(names))
    if ends[0] > len(samples) or ends[1] > len(names) or (content.complete and not whole):
        raise UserError(f"{path}: the samples in {SHARDS}, {SAMPLES} and {NAMES} do not add up: {AGAIN}.")
    index = StoreIndex(spec, content.complete, shards, samples[: ends[0]], names[: ends[1]])
    _check_records(folder, index)
    return index


def _column(path: Path, record: np.dtype) -> np.ndarray:
    """Return the whole records of a file, mapped into memory."""
    with open_file(path, AGAIN) as file:
        count = os.fstat(file.fileno()).st_size // record.itemsize
        return np.memmap(file, record, "r", shape=(count,)).view(np.ndarray) if count else np.empty(0, record)


def _in_order(index: StoreIndex) -> bool:
    """Whether offsets grow and no sample is empty, of another slice, or beside its shard: a checksum can be computed by anybody."""
    shards, samples = index.shards, index.samples
    if not len(shards) or not len(samples):
        return not len(shards) and not len(samples)
    ends = shards["samples"].astype(np.float64)  # in which differences may be negative
    names = samples["name"].astype(np.float64)
    return bool(
        ends[0] > 0
        and (np.diff(ends) > 0).all()
        and (np.diff(names) >= 0).all()
        and (samples["length"] > 0).all()
        and (samples["slice"] < len(index.spec.slices)).all()
        and (samples["name"][shards["samples"].astype(np.int64) - 1] == shards["names"]).all()
    )


def _check_records(folder: Path, index: StoreIndex) -> None:
    """Raise UserError where records are not those that were written, or a shard's file has another size."""
    shards, samples, names = (part.view("u1").data for part in (index.shards, index.samples, index.names))
    start = name = 0
    # As bytes and lists, since there may be many shards.
    columns = (index.shards[key].tolist() for key in ("samples", "names", "bytes"))
    good = _in_order(index)
    for number, (count, to, size) in enumerate(zip(*columns, strict=True)):
        end, at = count * index.samples.itemsize, number * SHARD_RECORD.itemsize
        found = _digest(shards[at : at + _COUNTS], samples[start:end], names[name:to])
        if not good or found != shards[at + _COUNTS : at + SHARD_RECORD.itemsize]:
            raise UserError(
                f"{folder / SAMPLES} is corrupt (its checksum differs from {SHARDS}, or {INDEX_NAME} was changed): {AGAIN}."
            )
        start, name = end, to
        file = f"{folder}/{shard_name(number)}"
        try:
            there = os.stat(file).st_size
        except OSError as error:
            raise UserError(f"The file {file}, which {SHARDS} names, is missing: {AGAIN}.") from error
        if there != size:
            raise UserError(
                f"The feature shard {file} has {there} bytes instead of {size} (it was cut short or changed): {AGAIN}."
            )


@dataclass(frozen=True)
class _Content:
    """What index.json holds besides its version and the settings."""

    complete: bool
    num_samples: int
    num_tokens: int


def _parse(value: dict[str, Any], path: Path) -> tuple[StoreSpec, _Content]:
    """Return what a JSON object holds. Raises UserError, naming the key."""
    if not isinstance(value.get("dtype"), str) or value["dtype"] not in DTYPES:
        raise UserError(f"{path}: dtype is {str(value.get('dtype'))[:40]!r}, which no store has: {AGAIN}.")
    names = [item.name for item in fields(StoreSpec)]
    spec = read_dataclass(StoreSpec, {name: value[name] for name in names if name in value}, str(path))
    names = [item.name for item in fields(_Content)]
    content = read_dataclass(_Content, {name: value[name] for name in names if name in value}, str(path))
    if min(spec.hidden_size, spec.vocab_size, spec.shard_bytes) < 1:
        raise UserError(f"{path} names sizes that no store has: {AGAIN}.")
    return spec, content
