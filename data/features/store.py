"""The feature store: what the frozen target computed, in checksummed safetensors shards, written and read by mmap.

Shapes: T tokens of a shard, S samples of a store, L tokens of a sample, A aux layers, Ht target hidden size.
A shard holds ids [T] int32, mask [T] bool, aux.{k} [T, Ht] for every stored layer id k, last [T, Ht], top1 [T] int32 and
logsumexp [T] float32. One tensor per layer, so that one superset store serves every head.
Shards appear whole or not at all, and a run that writes them can be killed at any moment. The index (index.py) names the
target (fingerprint), layers, dtype and samples, and which samples lie in which shard. A sample has an XXH3-128 checksum of
its part of all tensors but aux, and one of its part of each aux: what is checked is what is read.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_128

from draftsmith.data.batch import WINDOW_SHARDS, Features, States
from draftsmith.data.features.index import AGAIN, DTYPES, INDEX_NAME, StoreSpec, read_index, shard_name
from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.text import open_file

# Per token besides the hidden states: ids int32, mask bool, top1 int32, logsumexp float32.
TOKEN_BYTES = 4 + 1 + 4 + 4
# What every head reads, in the order in which it is hashed: the tensors besides aux, their dtypes None for the store's.
COMMON = {"ids": torch.int32, "mask": torch.bool, "last": None, "top1": torch.int32, "logsumexp": torch.float32}
_DTYPE_NAMES = {
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
OPEN_SHARDS = 2 * WINDOW_SHARDS  # rows of one window and of the next may share a batch


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


class FeatureSource(Protocol):
    """Where training gets features from: a store or the online target. Training cannot tell which."""

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""

    @property
    def slices(self) -> list[str]:
        """The slice of every sample."""

    @property
    def shards(self) -> Tensor | None:
        """The number of the file of every sample, which training reads one after the other; None without files."""

    @property
    def dtype(self) -> torch.dtype:
        """That of aux and last."""

    @property
    def hidden_size(self) -> int:
        """Ht."""

    @property
    def computed_on(self) -> torch.device | None:
        """The device that states are computed on, by the thread that asks for them; None where they are read, by any thread."""

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ids [L] int64 and mask [L] bool of a sample."""

    def fill(self, indices: Sequence[int], places: Sequence[States], layer_ids: Sequence[int]) -> None:
        """Put the states of samples into their places; aux [L, A*Ht] has the columns of `layer_ids` in that order."""


class FeatureStore:
    """Reads a complete store by mmap; the checksums of a sample are verified the first time it is read.

    path: the folder. fingerprint, if given, must be the target's that made the store. verify=False skips checksums
    (sizes are always checked). part: also an incomplete one, whose first `done` samples can be read.
    Raises UserError for a missing, incomplete, damaged or foreign store.
    """

    def __init__(
        self, path: Path | str, *, fingerprint: str | None = None, verify: bool = True, part: bool = False
    ) -> None:
        self.path = Path(path)
        index = read_index(self.path)
        if not index.complete and not part:
            raise UserError(
                f"The feature store {self.path} is not complete ({index.num_samples} samples so far): "
                "run the same extraction again to finish it."
            )
        self.spec, self.done = index.spec, index.num_samples
        if fingerprint is not None and fingerprint != self.spec.fingerprint:
            raise UserError(
                f"The feature store {self.path} was made with another target (fingerprint {self.spec.fingerprint}, now "
                f"{fingerprint}): extract again into another folder, or use the target it was made with."
            )
        self.layer_ids = self.spec.layer_ids
        self.samples = index.samples
        self.slices = [self.spec.slices[number] for number in index.samples.records["slice"].tolist()]
        self.lengths = index.samples.lengths
        self._index = index
        self._ends = np.concatenate(([0], index.shards["samples"].astype(np.int64)))
        self._tokens = np.concatenate(([0], np.cumsum(index.samples.records["length"], dtype=np.int64)))
        # Of each sample: the common tensors, then the layers.
        self._verified = np.full((len(self), 1 + len(self.layer_ids)), not verify)
        self._open: dict[int, Any] = {}
        self._opening = Lock()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def ids(self) -> list[str]:
        """The name of every sample, read anew."""
        return [self.samples.name(number) for number in range(len(self))]

    @property
    def shards(self) -> Tensor:
        """The number of the shard of every sample [S] int64."""
        return torch.from_numpy(np.repeat(np.arange(len(self._ends) - 1), np.diff(self._ends)))

    @property
    def dtype(self) -> torch.dtype:
        """That of aux and last."""
        return self.spec.torch_dtype

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return self.spec.hidden_size

    computed_on = None

    def get(self, index: int, layer_ids: Sequence[int] | None = None) -> Features:
        """Return one sample; aux [L, A*Ht] has the columns of `layer_ids` in that order (None: every stored layer)."""
        (ids, mask), chosen = self.text(index), self.layer_ids if layer_ids is None else layer_ids
        aux, last = (torch.empty(len(ids), n * self.hidden_size, dtype=self.dtype) for n in (len(chosen), 1))
        place = States(aux, last, torch.empty_like(ids, dtype=torch.int32), torch.empty(len(ids)))
        self.fill([index], [place], chosen)
        return Features(ids, mask, **vars(place), sample_id=self.samples.name(index), slice=self.slices[index])

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ids [L] int64 and mask [L] bool of a sample. Raises UserError where they were changed."""
        sample = self.samples[index]
        return sample.ids, sample.mask

    def fill(self, indices: Sequence[int], places: Sequence[States], layer_ids: Sequence[int]) -> None:
        """Copy the states of samples from the shards into their places; aux [L, A*Ht] has the columns of `layer_ids` in that
        order. Raises UserError for a layer that the store has not, and for a damaged shard."""
        if missing := [k for k in layer_ids if k not in self.layer_ids]:
            raise UserError(
                f"The feature store {self.path} holds layers {list(self.layer_ids)} but not {missing[0]}: "
                "extract again with all the layers that the heads need in features.layer_ids."
            )
        for index, place in zip(indices, places, strict=True):
            self._verify(index, 0, COMMON)
            for k in layer_ids:
                self._verify(index, 1 + self.layer_ids.index(k), (f"aux.{k}",))
            for name, part in self._rows(index, ("last", "top1", "logsumexp")).items():
                getattr(place, name).copy_(part)
            streams = self._rows(index, [f"aux.{k}" for k in layer_ids]).values()
            for column, stream in zip(place.aux.split(self.hidden_size, -1), streams, strict=False):
                column.copy_(stream)

    def _rows(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the rows of a sample in tensors of its shard, where they lie."""
        number = self._shard_of(index)
        start, end = (int(self._tokens[at] - self._tokens[self._ends[number]]) for at in (index, index + 1))
        with self._opening:
            # The one opened first is closed when there are many.
            if number not in self._open:
                file = self.path / shard_name(number)
                if len(self._open) >= OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                open_file(file, AGAIN).close()
                with foreign_code(f"The feature shard {file} is cut short or damaged", AGAIN):
                    opened = safe_open(file, framework="pt")
                    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
                    held = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
                first, last = self._ends[number : number + 2]
                if held != shard_layout(self.spec, int(self._tokens[last] - self._tokens[first])):
                    raise UserError(f"The feature shard {file} holds other tensors than {INDEX_NAME} says: {AGAIN}.")
                self._open[number] = opened
            shard = self._open[number]
        return {name: shard.get_slice(name)[start:end] for name in names}

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right")) - 1

    def _verify(self, index: int, column: int, names: Iterable[str]) -> None:
        """Raise UserError where what is read of a sample is not what was written."""
        if self._verified[index, column]:
            return
        if checksum(self._rows(index, names).values()) != self._index.checksums[index, column].tobytes():
            file = self.path / shard_name(self._shard_of(index))
            raise UserError(f"The feature shard {file} is corrupt (its checksum differs from {INDEX_NAME}): {AGAIN}.")
        self._verified[index, column] = True


def shard_layout(spec: StoreSpec, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor of a shard with `tokens` tokens, as safetensors tells them."""
    states: tuple[str, tuple[int, ...]] = (_DTYPE_NAMES[spec.torch_dtype], (tokens, spec.hidden_size))
    common = {name: (_DTYPE_NAMES[dtype], (tokens,)) if dtype else states for name, dtype in COMMON.items()}
    return common | {f"aux.{k}": states for k in spec.layer_ids}


def checksum(parts: Iterable[Tensor]) -> bytes:
    """Return the XXH3-128 of tensors one after the other."""
    digest = xxh3_128()
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
