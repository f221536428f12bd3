"""The feature store: what the frozen target computed, in checksummed safetensors shards read by mmap.

Shapes: T tokens of a shard, S samples of a shard, L tokens of a sample, A aux layers, Ht target hidden size.
A shard holds ids [T] int32, mask [T] bool, aux.{k} [T, Ht] for every stored layer id k, last [T, Ht], top1 [T] int32,
logsumexp [T] float32 and offsets [S+1] int64. One tensor per layer, so that one superset store serves every head.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.data.batch import Features
from draftsmith.data.features.index import INDEX_NAME, StoreSpec, check_disk_space, estimate_bytes, read_index
from draftsmith.data.features.writer import SHARD_BYTES, FeatureWriter
from draftsmith.errors import UserError
from draftsmith.files import sha256_file

__all__ = [
    "SHARD_BYTES",
    "FeatureSource",
    "FeatureStore",
    "FeatureWriter",
    "StoreSpec",
    "check_disk_space",
    "estimate_bytes",
]

OPEN_SHARDS = 64


class FeatureSource(Protocol):
    """Where training gets features from: a store or the online target. Training cannot tell which."""

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""

    @property
    def slices(self) -> list[str]:
        """The slice of every sample."""

    @property
    def ids(self) -> list[str]:
        """The id of every sample."""

    def __len__(self) -> int: ...

    def get(self, index: int, layer_ids: Sequence[int] | None = None) -> Features:
        """One sample with aux columns of `layer_ids` in that order; None takes every layer of the source."""

    def get_many(self, indices: Sequence[int], layer_ids: Sequence[int] | None = None) -> list[Features]:
        """Several samples, in the order of `indices`."""


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

    def check_layer_ids(self, layer_ids: Sequence[int]) -> None:
        """Raise UserError unless the store holds every one of `layer_ids`."""
        if missing := [k for k in layer_ids if k not in self.layer_ids]:
            raise UserError(
                f"The feature store {self.path} holds layers {list(self.layer_ids)} but not {missing[0]}: "
                "extract again with all the layer_ids that the heads need."
            )

    def get(self, index: int, layer_ids: Sequence[int] | None = None) -> Features:
        """One sample; aux [L, A*Ht] has the columns of `layer_ids` in that order (None: every stored layer)."""
        chosen = self.layer_ids if layer_ids is None else layer_ids
        self.check_layer_ids(chosen)
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
        """Several samples, in the order of `indices`."""
        return [self.get(index, layer_ids) for index in indices]

    def _shard(self, number: int) -> Any:
        """An open shard; the least recently opened one is closed when there are many."""
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
            try:
                self._open[number] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"The feature shard {file} cannot be read ({error}): extract again.") from error
        return self._open[number]
