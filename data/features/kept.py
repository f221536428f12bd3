"""Data that grows: hidden states of an earlier list of samples, taken over into the store of a new one."""

from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.data.batch import Features, Tokenized
from draftsmith.data.features.store import INDEX_NAME, SHARD_PATTERN, FeatureStore, StoreSpec, read_index


def kept_path(path: Path) -> Path:
    """Return where the store of an earlier list of samples lies while that of a new list is made."""
    return path.with_name(f"{path.name}.kept")


def keep(path: Path) -> None:
    """Set the store at `path` aside for an extraction from another list of samples; of two stores a complete one stays."""
    kept = kept_path(path)
    if not (path / INDEX_NAME).exists():
        return
    if (kept / INDEX_NAME).exists():
        if not read_index(path).complete:
            discard(path)
            return
        discard(kept)
    kept.mkdir(exist_ok=True)
    for file in _files(path)[::-1]:  # the index last: until then it says that there is more to move
        file.replace(kept / file.name)


def discard(folder: Path) -> None:
    """Remove a store, its index first; what others put beside it stays."""
    for file in _files(folder):
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _files(folder: Path) -> list[Path]:
    """Return the files of a store, its index first."""
    return sorted(file for file in folder.glob("*") if file.name == INDEX_NAME or SHARD_PATTERN.fullmatch(file.name))


class KeptFeatures:
    """Features of an earlier list of samples, for those samples of a new one that are the same."""

    def __init__(self, path: Path, spec: StoreSpec) -> None:
        """path: the folder that `keep` made, if it is there. spec: of the new store; another target's, dtype's or a store without
        its layers is left alone."""
        self._store: FeatureStore | None = None
        index = read_index(path) if (path / INDEX_NAME).exists() else None
        if index is not None and index.complete and set(spec.layer_ids) <= set(index.spec.layer_ids):
            same = ("fingerprint", "compute_dtype", "dtype", "hidden_size", "vocab_size")
            if all(getattr(index.spec, name) == getattr(spec, name) for name in same):
                self._store = FeatureStore(path)
        self._places = {} if self._store is None else {name: place for place, name in enumerate(self._store.ids)}
        self._layer_ids = spec.layer_ids

    def get(self, sample: Tokenized) -> Features | None:
        """Return the features of a sample with this id and these tokens and mask; None where there are none."""
        index = self._places.get(sample.sample_id)
        if self._store is None or index is None or self._store.lengths[index] != len(sample.ids):
            return None
        stored = self._store.get(index, self._layer_ids)
        same = torch.equal(stored.ids, sample.ids.long()) and torch.equal(stored.mask, sample.mask.bool())
        return replace(stored, slice=sample.slice) if same else None
