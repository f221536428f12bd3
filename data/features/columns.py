"""The samples of a store in binary columns, written once before any of their hidden states, and mapped into memory afterwards.

`samples.bin` has a record of each sample, `names.bin` their names, each followed by its conversation's, `ids.bin` their token ids
[T] int32 and `masks.bin` what is learned of them [T] bool, one sample after the other.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_128

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.foreign.text import open_file
from draftsmith.storage import explain_os_error, flush

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
    return _digest(records, column(folder / NAMES, np.dtype("u1")))


def _values(sample: Tokenized) -> tuple[np.ndarray, np.ndarray]:
    return sample.ids.cpu().numpy().astype("<i4"), sample.mask.cpu().numpy().astype("u1")


def _digest(records: np.ndarray, names: np.ndarray) -> str:
    digest = xxh3_128(records.view("u1").data)
    digest.update(names.data)
    return digest.hexdigest()


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
    if _digest(records, names) != digest or not _in_order(records, names, slices):
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
