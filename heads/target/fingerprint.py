"""Fingerprints: short names for the weights and configuration of a target that are cheap to compute."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    """One tensor of a safetensors file. start, size: of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


def fingerprint_directory(directory: Path) -> str:
    """Return 16 hex digits that name the model in `directory` (config.json + *.safetensors).

    Weights under 200 MB are hashed in full; of larger ones every tensor contributes its name, dtype, shape
    and 64 evenly spaced pieces of 256 bytes (both ends included), so that any real training step shows
    while an 8B model costs well under a second. Resharding, renaming the folder or another transformers version
    change nothing. The tokenizer and generation_config.json are not part of it (draftsmith.heads.target.identity has them).
    Raises UserError for a damaged or missing weight file.
    """
    spans = read_directory(directory)
    digest = hashlib.sha256(json.dumps(stable_config(directory), sort_keys=True).encode())
    _hash_spans(digest, spans, everything=_small(spans))
    return digest.hexdigest()[:16]


def hash_weights(spans: Sequence[TensorSpan]) -> str:
    """Return 16 hex digits that name the weights alone, from the same bytes as `fingerprint_directory`."""
    digest = hashlib.sha256()
    _hash_spans(digest, spans, everything=_small(spans))
    return digest.hexdigest()[:16]


def hash_tensor(span: TensorSpan) -> str:
    """Return 16 hex digits that name one tensor as stored, whatever its name; hashed in full if it is small itself."""
    digest = hashlib.sha256()
    _hash_spans(digest, [replace(span, name="")], everything=_small([span]))
    return digest.hexdigest()[:16]


def _small(spans: Sequence[TensorSpan]) -> bool:
    return sum(span.size for span in spans) <= FULL_HASH_BYTES


def _hash_spans(digest: Any, spans: Sequence[TensorSpan], *, everything: bool) -> None:
    """Feed the tensors to `digest`, each after a line with its name, dtype and shape."""
    with ExitStack() as stack:
        handles: dict[Path, BinaryIO] = {}
        for span in spans:
            if span.file not in handles:
                handles[span.file] = stack.enter_context(span.file.open("rb"))
            digest.update(f"{span.name} {span.dtype} {span.shape}\n".encode())
            for start, size in _pieces(span.size, everything):
                handles[span.file].seek(span.start + start)
                digest.update(handles[span.file].read(size))


def read_directory(directory: Path) -> list[TensorSpan]:
    """Return the tensors of the weights in `directory` by name. Raises UserError for a damaged or missing weight file."""
    return sorted((span for file in weight_files(directory) for span in read_spans(file)), key=lambda span: span.name)


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


def _pieces(size: int, everything: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the pieces to hash of a tensor of `size` bytes."""
    if everything or size <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        step = 1 << 24
        yield from ((start, min(step, size - start)) for start in range(0, size, step))
        return
    for i in range(SAMPLES_PER_TENSOR):
        yield (size - SAMPLE_BYTES) * i // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES


def stable_config(directory: Path) -> Any:
    """Return config.json without VOLATILE_KEYS, at every depth."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if key not in VOLATILE_KEYS}
        return value

    return clean(json.loads((directory / "config.json").read_text(encoding="utf-8")))
