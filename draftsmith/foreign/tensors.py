"""Foreign safetensors files: their headers, which the library checks; no tensor is read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.json import read_object
from draftsmith.foreign.reading import open_file

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
