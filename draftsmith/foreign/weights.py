"""Foreign files of weights, safetensors and GGUF: their headers, every entry checked before a byte of any tensor is mapped or allocated.

GGUF, little-endian: "GGUF", the version, the numbers of tensors and of metadata entries; the entries, each a key, a type and a
value; name, shape, type and offset of every tensor; the tensors, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import safe_open

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import MIB, open_file, read_object

BITS = {
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element of every dtype that safetensors has."""


@dataclass(frozen=True)
class TensorSpan:
    """One tensor of a file of weights. start, size: of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def read_header(file: Path, remedy: str) -> list[TensorSpan]:
    """Return the tensors that a safetensors file holds, in the order of their bytes; no tensor is read.

    Raises UserError, which ends in `remedy`, for a header that cannot be read, an entry without a known dtype, a shape or
    offsets, a size that does not follow from dtype and shape, and bytes that overlap, are left over or are missing.
    """
    open_file(file, remedy).close()
    with foreign_code(f"{file} is cut short or damaged", remedy), safe_open(file, "numpy") as opened:
        entries = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
        tensors = [(name, entry.get_dtype(), tuple(entry.get_shape())) for name, entry in entries]
    if odd := next((tensor for tensor in tensors if tensor[1] not in BITS), None):
        raise UserError(
            f"{file}: its tensor {odd[0][:80]!r} has the dtype {odd[1]}, which this draftsmith does not know: {remedy}."
        )
    sizes = [math.prod(shape) * BITS[dtype] // 8 for _, dtype, shape in tensors]
    start, spans = file.stat().st_size - sum(sizes), []  # they fill the file up to its end
    for (name, dtype, shape), size in zip(tensors, sizes, strict=True):
        spans.append(TensorSpan(name, dtype, shape, file, start, size))
        start += size
    return spans


def read_index(index: Path, remedy: str, *, partly: bool = False) -> dict[str, str]:
    """Return tensor name -> file name of an index of several weight files, all of which lie beside it, or `partly` some.

    Raises UserError, which ends in `remedy`, for an index that names nothing, anything outside its folder, or a file that
    is missing.
    """
    listed = read_object(index, remedy).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{index} is no index of weight files (it has no weight_map): {remedy}.")
    for name in sorted(set(map(str, listed.values()))):
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UserError(f"{index} names the file {name[:80]!r}, which is not in its folder: {remedy}.")
        if not (partly or (index.parent / name).is_file()):
            raise UserError(f"The file {index.parent / name}, which {index.name} names, is missing: {remedy}.")
    return listed


MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_HEADER_BYTES = 256 * MIB
"""The most bytes before the tensors. A vocabulary of 262,144 tokens with its merges has 12 MB."""
MOST_VALUES = 4 * 2**20
"""The most values of an array, entries of the metadata, or tensors."""
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""How `struct` calls the types of single values, by their numbers."""
_MOST_DIMENSIONS = 4
Kinds = dict[int, tuple[str, tuple[int, int]]]
"""Number of a type of tensors -> its name and the (values, bytes) of a block."""


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its tensors. metadata: values by key, arrays as lists; tensors: in the order of the file, shapes
    as torch has them (rows first), dtypes by their ggml names, such as "Q4_1"."""

    metadata: dict[str, Any]
    tensors: list[TensorSpan]


def read_gguf(file: Path, remedy: str) -> GgufHeader:
    """Return the header of a GGUF file; no tensor is read.

    Raises UserError, which ends in `remedy`, for a file that is none, is of another version or big-endian, is cut short, or holds
    an entry that cannot be: too many or too long, of an unknown type, twice under one name, text that is not UTF-8, or a tensor
    that does not lie within the file beside the others; and where the package gguf, which knows the types, is not installed.
    """
    with open_file(file, remedy) as handle:
        reader = _Reader(handle, os.fstat(handle.fileno()).st_size)
        try:
            if reader.total < len(MAGIC) or reader.bytes(len(MAGIC)) != MAGIC:
                raise UserError(f"{file} is no GGUF file, it does not begin with the letters GGUF: {remedy}.")
            return _read_header(reader, file)
        except (ValueError, struct.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{file} is cut short or damaged: {error}; {remedy}.") from error


class _Reader:
    """Reads values from the front of a file, never past its end or MOST_HEADER_BYTES."""

    def __init__(self, handle: BinaryIO, total: int) -> None:
        self.handle, self.total, self.limit, self.position = handle, total, min(total, MOST_HEADER_BYTES), 0

    def bytes(self, size: int) -> bytes:
        self.position += size
        if self.position > self.limit:
            what = "its header ends beyond the file" if self.limit == self.total else "its header has no end"
            raise ValueError(what)
        return self.handle.read(size)

    def numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{kind}"
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def count(self, what: str, kind: str = "Q") -> int:
        (number,) = self.numbers(kind)
        if number > MOST_VALUES:
            raise ValueError(f"it names {number} {what}")
        return number

    def text(self) -> str:
        (size,) = self.numbers("Q")
        try:
            return self.bytes(size).decode()
        except UnicodeDecodeError as error:
            raise ValueError("a text in its header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"its header holds a value of the unknown type {kind}")
        (inner,), count = self.numbers("I"), self.count("values in one array")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        if inner != _STRING:
            raise ValueError(f"its header holds an array of the type {inner}")
        return [self.text() for _ in range(count)]


def _read_header(reader: _Reader, file: Path) -> GgufHeader:
    (version,) = reader.numbers("I")
    if version not in VERSIONS:
        raise ValueError(f"it is of version {version} or big-endian, not {' or '.join(map(str, VERSIONS))}")
    tensors, entries = reader.count("tensors"), reader.count("entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"it holds {key[:80]!r} twice")
        metadata[key] = reader.value(*reader.numbers("I"))
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise UserError(
            'GGUF files need the Python package gguf, which is not installed: `pip install "draftsmith[gguf]"`.'
        ) from error
    kinds = {kind.value: (kind.name, sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    offsets = [_read_span(reader, file, kinds) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"its alignment is {alignment}")
    base = -(-reader.position // alignment) * alignment
    if odd := [span.name for span in offsets if span.start % alignment]:
        raise ValueError(f"its tensor {odd[0][:80]!r} is not aligned")
    spans = [replace(span, start=base + span.start) for span in offsets]
    if len({span.name for span in spans}) < len(spans):
        raise ValueError("two of its tensors have the same name")
    end = base
    for span in sorted(spans, key=lambda span: (span.start, span.size)):
        if span.start < end:
            raise ValueError("its tensors overlap")
        end = span.start + span.size
    if end > reader.total:
        raise ValueError(f"it has {reader.total} bytes, its tensors need {end}")
    return GgufHeader(metadata, spans)


def _read_span(reader: _Reader, file: Path, kinds: Kinds) -> TensorSpan:
    """Return where a tensor lies, from the beginning of all tensors. Raises ValueError with what is wrong with it."""
    name, (dimensions,) = reader.text(), reader.numbers("I")
    named = f"its tensor {name[:80]!r}"
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"{named} has {dimensions} dimensions")
    shape = reader.numbers("Q", dimensions)[::-1]
    (number,), (offset,) = reader.numbers("I"), reader.numbers("Q")
    if number not in kinds:
        raise ValueError(f"{named} is of type {number}, which the installed gguf package does not know")
    kind, (block, size) = kinds[number]
    if not all(shape) or (shape[-1] if shape else 1) % block:
        raise ValueError(f"{named} has the shape {list(shape)}, which {kind} cannot have")
    return TensorSpan(name, kind, shape, file, offset, math.prod(shape) // block * size)
