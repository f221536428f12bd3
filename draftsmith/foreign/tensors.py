"""Foreign safetensors files: their headers, every entry checked, before a byte of any tensor is mapped or allocated.

Format: 8 bytes with the header's length, little-endian; the header, a JSON object of name -> dtype, shape, data_offsets;
the bytes of the tensors without gaps (https://huggingface.co/docs/safetensors).
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.errors import UserError
from draftsmith.foreign.json import kind_of, parse_json, read_object
from draftsmith.foreign.reading import open_file

MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library
BITS = {
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element of every dtype of the format."""


@dataclass(frozen=True)
class TensorSpan:
    """One tensor of a safetensors file. start, size: of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def read_header(file: Path, remedy: str) -> list[TensorSpan]:
    """Return the tensors that a safetensors file holds, in the order of its header; no tensor is read.

    Raises UserError, which ends in `remedy`, for a header that cannot be read, an entry without a known dtype, a shape or
    offsets, a size that does not follow from dtype and shape, and bytes that overlap, are left over or are missing.
    """
    with open_file(file, remedy) as handle:
        total = os.fstat(handle.fileno()).st_size
        length, header = _header(handle, file, total, remedy)
    spans = []
    for name, entry in header.items():
        if name != "__metadata__":
            try:
                spans.append(_span(name, entry, file, 8 + length))
            except ValueError as error:
                raise UserError(f"{file} is damaged: its tensor {name[:80]!r} {error}; {remedy}.") from error
    end = 8 + length
    for span in sorted(spans, key=lambda span: (span.start, span.size)):
        if span.start != end:
            raise UserError(f"{file} is damaged: the bytes of its tensors overlap or have gaps; {remedy}.")
        end += span.size
    if end != total:
        raise UserError(f"{file} is cut short or damaged: it has {total} bytes, its tensors need {end}; {remedy}.")
    return spans


def _header(handle: BinaryIO, file: Path, total: int, remedy: str) -> tuple[int, dict[str, Any]]:
    """Return the length of the header and the object in it."""
    length = int.from_bytes(handle.read(8), "little")
    if not 2 <= length <= min(MOST_HEADER_BYTES, total - 8):
        raise UserError(f"{file} is cut short or damaged: it is no safetensors file; {remedy}.")
    header = parse_json(handle.read(length), f"The header of {file}", remedy)
    if not isinstance(header, dict):
        raise UserError(f"{file} is damaged: its header is {kind_of(header)}; {remedy}.")
    return length, header


def _span(name: str, entry: Any, file: Path, base: int) -> TensorSpan:
    """Return a header's entry. Raises ValueError with what is wrong with it."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape):
        raise ValueError(f"has the shape {str(shape)[:60]}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"has the offsets {str(offsets)[:60]}")
    size = offsets[1] - offsets[0]
    if size * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"has {size} bytes for the shape {str(shape)[:60]} of {dtype}")
    return TensorSpan(name, dtype, tuple(shape), file, base + offsets[0], size)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)


def read_index(index: Path, remedy: str) -> dict[str, str]:
    """Return tensor name -> file name of an index of several weight files, all of which lie beside it.

    Raises UserError, which ends in `remedy`, for an index that names nothing, anything outside its folder, or a file that
    is missing.
    """
    listed = read_object(index, remedy).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{index} is no index of weight files (it has no weight_map): {remedy}.")
    check_file_names(index, listed.values(), remedy)
    return listed


def check_file_names(index: Path, names: Iterable[Any], remedy: str) -> None:
    """Raise UserError where `index` names what is no file in its own folder."""
    for name in sorted(set(map(str, names))):
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise UserError(f"{index} names the file {name[:80]!r}, which is not in its folder: {remedy}.")
        if not (index.parent / name).is_file():
            raise UserError(f"The file {index.parent / name}, which {index.name} names, is missing: {remedy}.")
