"""A short, cheap and reliable name for the weights and configuration of a target."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.errors import UserError

FULL_HASH_BYTES = 200_000_000
SAMPLES_PER_TENSOR = 64
SAMPLE_BYTES = 256

# Keys of config.json that change no number the model computes.
VOLATILE_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "output_attentions", "output_hidden_states", "return_dict"}
    | {"torch_dtype", "transformers_version", "use_cache"}
)


@dataclass(frozen=True)
class TensorSpan:
    """One tensor of a safetensors file: where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def fingerprint_directory(directory: Path) -> str:
    """Return 16 hex digits that name the model in `directory` (config.json + *.safetensors).

    Weights under 200 MB are hashed in full; of larger ones every tensor contributes its name, dtype, shape
    and 64 evenly spaced windows of 256 bytes (both ends included), so that any real training step shows
    while an 8B model costs well under a second. Resharding, renaming the folder or another transformers version
    change nothing. The tokenizer and generation_config.json are not part of it.
    Raises UserError for a damaged or missing weight file.
    """
    spans = sorted((span for file in weight_files(directory) for span in read_spans(file)), key=lambda s: s.name)
    everything = sum(span.size for span in spans) <= FULL_HASH_BYTES
    digest = hashlib.sha256(json.dumps(_stable_config(directory), sort_keys=True).encode())
    handles: dict[Path, BinaryIO] = {}
    try:
        for span in spans:
            handle = handles.get(span.file) or handles.setdefault(span.file, span.file.open("rb"))
            digest.update(f"{span.name} {span.dtype} {span.shape}\n".encode())
            for start, size in _windows(span.size, everything):
                handle.seek(span.start + start)
                digest.update(handle.read(size))
    finally:
        for handle in handles.values():
            handle.close()
    return digest.hexdigest()[:16]


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that from_pretrained would read; empty where there are none."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError) as error:
        raise UserError(f"{index} is not a valid index of weight files: fetch the target again.") from error
    for name in names:
        if not (directory / name).is_file():
            raise UserError(f"The target's weight file {directory / name} is missing: fetch the target again.")
    return [directory / name for name in names]


def read_spans(file: Path) -> list[TensorSpan]:
    """Read the header of a safetensors file. Raises UserError where it is damaged or the file is cut short."""
    damaged = UserError(f"The weight file {file} is damaged or cut short: fetch the target again.")
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= min(100_000_000, file.stat().st_size - 8):
            raise damaged
        try:
            header: dict[str, Any] = json.loads(handle.read(length))
        except ValueError as error:
            raise damaged from error
    header.pop("__metadata__", None)
    spans = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        spans.append(TensorSpan(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + start, end - start))
    if file.stat().st_size != 8 + length + sum(span.size for span in spans):
        raise damaged
    return spans


def _windows(size: int, everything: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the bytes to hash in a tensor of `size` bytes."""
    if everything or size <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        step = 1 << 24
        yield from ((start, min(step, size - start)) for start in range(0, size, step))
        return
    for i in range(SAMPLES_PER_TENSOR):
        yield (size - SAMPLE_BYTES) * i // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES


def _stable_config(directory: Path) -> Any:
    """config.json without the keys that change no number, at every depth."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if key not in VOLATILE_KEYS}
        return value

    return clean(json.loads((directory / "config.json").read_text(encoding="utf-8")))
