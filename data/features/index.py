"""The index of a feature store: the settings of the extraction, the samples, and which of them lie in which shard.

The samples are binary columns, written once before any of their hidden states, and mapped into memory afterwards. `samples.bin` has a
record of each sample, `names.bin` their names, each followed by its conversation's, `ids.bin` their token ids [T] int32 and `masks.bin`
what is learned of them [T] bool, one sample after the other.

`index.json` holds the settings, and is written when the extraction begins, after the samples, and when it ends. In between, every shard
adds to two files of fixed-width records: its samples' checksums to `checksums.bin`, and last its own record to `shards.bin`. What lies
behind the last whole record of a shard was left half-written, and is cut off on resume.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_128

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass
from draftsmith.foreign.text import open_file, read_object
from draftsmith.storage import explain_os_error, flush, write_text

SCHEMA_VERSION = 4
INDEX_NAME = "index.json"
SHARDS, CHECKSUMS = "shards.bin", "checksums.bin"
# samples: in this shard and all before it. bytes: of the shard's file. checksum: the XXH3-128 of these two and of its samples'
# checksums.
SHARD_RECORD = np.dtype([("samples", "<u8"), ("bytes", "<u8"), ("checksum", "V16")])
_COUNTS = 16  # the bytes before the checksum
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


AGAIN = "restore it, or delete the folder and extract again"
SAMPLES, NAMES, IDS, MASKS = "samples.bin", "names.bin", "ids.bin", "masks.bin"
# length: tokens. slice: its number among those of the store. name, conversation: where its name and its conversation's end in
# NAMES; a sample without a conversation has an empty one. checksum: the XXH3-64 of its ids and mask.
SAMPLE_RECORD = np.dtype(
    [("length", "<u4"), ("slice", "<u4"), ("name", "<u8"), ("conversation", "<u8"), ("checksum", "<u8")]
)


class StoredSamples(Sequence[Tokenized]):
    """The samples of a store, each read when it is asked for, and then checked.

    records: [S] SAMPLE_RECORD. names: bytes. ids [T] int32 and masks [T] uint8, mapped. Raises UserError for a sample that was changed.
    """

    def __init__(
        self,
        folder: Path,
        slices: tuple[str, ...],
        records: np.ndarray,
        names: np.ndarray,
        ids: np.ndarray,
        masks: np.ndarray,
    ) -> None:
        self.folder, self.records, self._names, self._ids, self._masks = folder, records, names, ids, masks
        self._slices = slices
        self._ends = np.cumsum(records["length"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        found: list[int] = self.records["length"].tolist()
        return found

    def name(self, number: int) -> str:
        """Return the name of a sample."""
        start = int(self.records["conversation"][number - 1]) if number else 0
        return self._text(start, int(self.records["name"][number]))

    def _text(self, start: int, end: int) -> str:
        return self._names[start:end].tobytes().decode(errors="replace")

    @overload
    def __getitem__(self, number: int) -> Tokenized: ...
    @overload
    def __getitem__(self, number: slice) -> list[Tokenized]: ...
    def __getitem__(self, number: int | slice) -> Tokenized | list[Tokenized]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        record, end = self.records[number], int(self._ends[number])
        start = end - int(record["length"])
        ids, mask = self._ids[start:end], self._masks[start:end]
        if _checksum(ids, mask) != int(record["checksum"]):
            raise UserError(
                f"{self.folder / IDS} or {MASKS} is corrupt (its checksum differs from {SAMPLES}): {AGAIN}."
            )
        conversation = self._text(int(record["name"]), int(record["conversation"]))
        return Tokenized(
            ids=torch.from_numpy(ids.astype(np.int64)),
            mask=torch.from_numpy(mask != 0),
            sample_id=self.name(number),
            slice=self._slices[record["slice"]],
            conversation=conversation or None,
        )


def _checksum(ids: np.ndarray, mask: np.ndarray) -> int:
    digest = xxh3_64(np.ascontiguousarray(ids).data)
    digest.update(np.ascontiguousarray(mask).view("u1").data)
    return digest.intdigest()


def write_columns(folder: Path, samples: Sequence[Tokenized], slices: Sequence[str]) -> str:
    """Write the columns of samples and return the digest of records and names."""
    records, numbers = np.zeros(len(samples), SAMPLE_RECORD), {name: at for at, name in enumerate(slices)}
    end = 0

    def names() -> Iterable[bytes]:
        nonlocal end
        for number, sample in enumerate(samples):
            name, conversation = sample.sample_id.encode(), (sample.conversation or "").encode()
            ids, mask = _values(sample)
            ends = end + len(name), end + len(name) + len(conversation)
            records[number] = (len(ids), numbers[sample.slice], *ends, _checksum(ids, mask))
            end = ends[1]
            yield name + conversation

    _write(folder / NAMES, names())
    _write(folder / IDS, (_values(sample)[0].tobytes() for sample in samples))
    _write(folder / MASKS, (_values(sample)[1].tobytes() for sample in samples))
    _write(folder / SAMPLES, [records.tobytes()])
    return digest_columns(records, column(folder / NAMES, np.dtype("u1")))


def _values(sample: Tokenized) -> tuple[np.ndarray, np.ndarray]:
    return sample.ids.cpu().numpy().astype("<i4"), sample.mask.cpu().numpy().astype("u1")


def digest_columns(records: np.ndarray, names: np.ndarray) -> str:
    """Return the digest of the samples' records and names."""
    return _digest(records.view("u1").data, names.data).hex()


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with explain_os_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(parts)
        flush(path)


def read_columns(folder: Path, slices: tuple[str, ...], digest: str) -> StoredSamples:
    """Return the samples of a store. Raises UserError for columns that are not those that were written."""
    records = column(folder / SAMPLES, SAMPLE_RECORD)
    kinds = {NAMES: "u1", IDS: "<i4", MASKS: "u1"}
    names, ids, masks = (column(folder / name, np.dtype(kind)) for name, kind in kinds.items())
    if digest_columns(records, names) != digest or not _in_order(records, names, slices):
        raise UserError(
            f"{folder / SAMPLES} is corrupt (its checksum differs from index.json, or {NAMES} was changed): {AGAIN}."
        )
    if not len(ids) == len(masks) == int(records["length"].sum(dtype=np.int64)):
        raise UserError(f"{folder / IDS} or {MASKS} has another size than {SAMPLES} says: {AGAIN}.")
    return StoredSamples(folder, slices, records, names, ids, masks)


def _in_order(records: np.ndarray, names: np.ndarray, slices: tuple[str, ...]) -> bool:
    """Whether offsets grow and no sample is empty or of another slice: a checksum can be computed by anybody."""
    ends = np.stack([records["name"], records["conversation"]], axis=-1).ravel().astype(np.float64)
    return bool(
        len(records)
        and (np.diff(ends) >= 0).all()  # as floats, whose differences may be negative
        and int(records["conversation"][-1]) == len(names)
        and (records["length"] > 0).all()
        and (records["slice"] < len(slices)).all()
    )


def column(path: Path, record: np.dtype) -> np.ndarray:
    """Return the whole records of a file, mapped into memory."""
    with open_file(path, AGAIN) as file:
        count = os.fstat(file.fileno()).st_size // record.itemsize
        return np.memmap(file, record, "r", shape=(count,)).view(np.ndarray) if count else np.empty(0, record)


@dataclass(frozen=True)
class StoreSpec:
    """The settings in which two extractions must agree to give the same store.

    fingerprint and compute_dtype name the target and how it ran; layer_ids, dtype, hidden_size (Ht) and vocab_size (V)
    the tensors; samples is a digest of the whole sample list in order; shard_bytes and batch_tokens (of a pass) decide where
    shards end; slices names the slices, which records give by number.
    """

    fingerprint: str
    compute_dtype: str
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    vocab_size: int
    samples: str
    shard_bytes: int
    batch_tokens: int
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

    columns: the digest of the samples' records and names. samples: all of them, from the beginning. shards: of those that are
    there, SHARD_RECORD. checksums: of the samples in them [S, 1+A] V16, of what every head reads, then of each layer in order.
    """

    spec: StoreSpec
    complete: bool
    columns: str
    samples: StoredSamples
    shards: np.ndarray
    checksums: np.ndarray

    @property
    def num_samples(self) -> int:
        """How many samples the complete shards hold."""
        return len(self.checksums)


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises UserError for one that features cannot have."""
    if name not in DTYPES:
        raise UserError(f"features cannot be of dtype {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def begin_index(folder: Path, spec: StoreSpec, samples: Sequence[Tokenized]) -> None:
    """Write the index of a store that is to be filled with hidden states of `samples`."""
    columns = write_columns(folder, samples, spec.slices)
    for name in (CHECKSUMS, SHARDS):
        with explain_os_error(folder / name):
            (folder / name).write_bytes(b"")
    _write_head(folder, spec, columns, [len(sample.ids) for sample in samples], complete=False)


def complete_index(folder: Path, index: StoreIndex) -> None:
    """Mark a store as complete."""
    _write_head(folder, index.spec, index.columns, index.samples.lengths, complete=True)


def _write_head(folder: Path, spec: StoreSpec, columns: str, lengths: list[int], *, complete: bool) -> None:
    head = {"schema_version": SCHEMA_VERSION, "complete": complete, **asdict(spec)}
    head |= {"num_samples": len(lengths), "num_tokens": sum(lengths), "columns": columns}
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    write_text(folder / INDEX_NAME, "{\n" + ",\n".join(lines) + "\n}\n")


def append_shard(folder: Path, end: np.void | None, size: int, checksums: bytes, samples: int) -> np.void:
    """Add a shard of `size` bytes with so many samples to the index; return its record.

    end: the record of the shard before it, None for the first.
    """
    record = np.zeros(1, SHARD_RECORD)
    record["samples"], record["bytes"] = samples + (0 if end is None else int(end["samples"])), size
    record["checksum"] = np.void(_digest(record.tobytes()[:_COUNTS], checksums))
    for name, data in ((CHECKSUMS, checksums), (SHARDS, record.tobytes())):
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
    for name, values in ((SHARDS, index.shards), (CHECKSUMS, index.checksums)):
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
    samples = read_columns(folder, spec.slices, content.columns)
    shards = column(folder / SHARDS, SHARD_RECORD)
    width = 1 + len(spec.layer_ids)
    checksums = column(folder / CHECKSUMS, np.dtype("V16"))
    checksums = checksums[: len(checksums) // width * width].reshape(-1, width)
    end = int(shards["samples"][-1]) if len(shards) else 0
    whole = end == len(checksums) == len(samples)
    counts = (len(samples), int(samples.records["length"].sum(dtype=np.int64)))
    wrong = end > min(len(checksums), len(samples)) or (content.complete and not whole)
    if wrong or counts != (content.num_samples, content.num_tokens):
        raise UserError(f"{path}: the samples in {SHARDS}, {CHECKSUMS} and {SAMPLES} do not add up: {AGAIN}.")
    index = StoreIndex(spec, content.complete, content.columns, samples, shards, checksums[:end])
    # Are the records those that were written, and has every shard's file its size?
    of_shards, of_samples = (part.view("u1").reshape(-1).data for part in (index.shards, index.checksums))
    each, start = index.checksums.itemsize * index.checksums.shape[1], 0
    # As bytes and lists, since there may be many shards.
    columns = (index.shards[key].tolist() for key in ("samples", "bytes"))
    for number, (count, size) in enumerate(zip(*columns, strict=True)):
        at = number * SHARD_RECORD.itemsize
        found = _digest(of_shards[at : at + _COUNTS], of_samples[start * each : count * each])
        # That shards grow is asked beside the checksum, which can be computed by anybody.
        if count <= start or found != of_shards[at + _COUNTS : at + SHARD_RECORD.itemsize]:
            raise UserError(f"{folder / CHECKSUMS} is corrupt (its checksum differs from {SHARDS}): {AGAIN}.")
        start = count
        file = f"{folder}/{shard_name(number)}"
        try:
            there = os.stat(file).st_size
        except OSError as error:
            raise UserError(f"The file {file}, which {SHARDS} names, is missing: {AGAIN}.") from error
        if there != size:
            raise UserError(
                f"The feature shard {file} has {there} bytes instead of {size} (it was cut short or changed): {AGAIN}."
            )
    return index


def is_complete(folder: Path) -> bool:
    """Whether a store that is there is complete, without reading all of its index."""
    return bool(read_object(folder / INDEX_NAME, AGAIN).get("complete"))


@dataclass(frozen=True)
class _Content:
    """What index.json holds besides its version and the settings."""

    complete: bool
    num_samples: int
    num_tokens: int
    columns: str


def _parse(value: dict[str, Any], path: Path) -> tuple[StoreSpec, _Content]:
    """Return what a JSON object holds. Raises UserError, naming the key."""
    if not isinstance(value.get("dtype"), str) or value["dtype"] not in DTYPES:
        raise UserError(f"{path}: dtype is {str(value.get('dtype'))[:40]!r}, which no store has: {AGAIN}.")
    names = [item.name for item in fields(StoreSpec)]
    spec = read_dataclass(StoreSpec, {name: value[name] for name in names if name in value}, str(path))
    names = [item.name for item in fields(_Content)]
    content = read_dataclass(_Content, {name: value[name] for name in names if name in value}, str(path))
    if min(spec.hidden_size, spec.vocab_size, spec.shard_bytes, spec.batch_tokens) < 1:
        raise UserError(f"{path} names sizes that no store has: {AGAIN}.")
    return spec, content
