"""Writing a feature store: shards that appear whole or not at all, and a run that can be killed at any moment.

Shapes: T tokens of a shard, S samples of a shard, L tokens of a sample, Ht target hidden size.
"""

import errno
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.batch import Features
from draftsmith.data.features.index import INDEX_NAME, ShardInfo, StoreIndex, StoreSpec, read_index, write_index
from draftsmith.errors import UserError
from draftsmith.files import atomic_path, explain_os_error, sha256_file

SHARD_BYTES = 512 * 2**20
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")
TEMPORARY_PATTERN = re.compile(r"\.(shard-\d{5,}\.safetensors|index\.json)\.\d+\.tmp")


class FeatureWriter:
    """Writes a store sample by sample and continues an unfinished one after its last complete shard.

    A shard ends before the sample that would make it larger than spec.shard_bytes, so the files depend only on the
    samples and their order: a run that was killed and resumed leaves the same bytes. Opening an unfinished store
    removes temporary and unlisted files; `num_done` samples are already in it and must not be added again.
    Raises UserError where the folder holds a store with another spec, or files that are no store.
    """

    def __init__(self, path: Path | str, spec: StoreSpec) -> None:
        self.path = Path(path)
        self._pending: list[Features] = []
        self._pending_bytes = 0
        if (self.path / INDEX_NAME).exists():
            self.index = read_index(self.path)
            _check_same(self.path, self.index.spec, spec)
            self._remove_strays()
        else:
            if self.path.is_dir() and any(SHARD_PATTERN.fullmatch(file.name) for file in self.path.iterdir()):
                raise UserError(f"{self.path} holds feature shards but no {INDEX_NAME}: choose another folder.")
            self.index = StoreIndex(spec)
            write_index(self.path, self.index)

    @property
    def spec(self) -> StoreSpec:
        """What this store holds."""
        return self.index.spec

    @property
    def complete(self) -> bool:
        """True once `finish` has been called."""
        return self.index.complete

    @property
    def num_done(self) -> int:
        """How many samples the complete shards hold."""
        return self.index.num_samples

    @property
    def done_ids(self) -> list[str]:
        """The ids of those samples, in order."""
        return [sample_id for shard in self.index.shards for sample_id in shard.ids]

    def add(self, features: Features) -> None:
        """Append one sample; its aux columns are those of spec.layer_ids in order."""
        assert not self.complete, "the store is finished"
        width = self.spec.hidden_size
        length = features.ids.shape[0]
        assert features.aux.shape == (length, len(self.spec.layer_ids) * width), features.aux.shape
        assert features.last.shape == (length, width), features.last.shape
        size = length * self.spec.bytes_per_token
        if self._pending and self._pending_bytes + size > self.spec.shard_bytes:
            self._write_shard()
        self._pending.append(features)
        self._pending_bytes += size

    def finish(self) -> None:
        """Write what is left and mark the store complete."""
        if self.complete:
            return
        if self._pending:
            self._write_shard()
        self.index = StoreIndex(self.spec, True, self.index.shards)
        write_index(self.path, self.index)

    def _write_shard(self) -> None:
        samples, self._pending, self._pending_bytes = self._pending, [], 0
        file = self.path / f"shard-{len(self.index.shards):05d}.safetensors"
        with atomic_path(file) as temporary:
            _save_tensors(temporary, _shard_tensors(samples, self.spec))
        shard = ShardInfo(
            file=file.name,
            bytes=file.stat().st_size,
            sha256=sha256_file(file),
            ids=tuple(sample.sample_id for sample in samples),
            slices=tuple(sample.slice for sample in samples),
            lengths=tuple(sample.ids.shape[0] for sample in samples),
        )
        self.index = StoreIndex(self.spec, False, (*self.index.shards, shard))
        write_index(self.path, self.index)

    def _remove_strays(self) -> None:
        listed = {shard.file for shard in self.index.shards}
        with explain_os_error(self.path):
            for file in self.path.iterdir():
                unlisted = SHARD_PATTERN.fullmatch(file.name) and file.name not in listed
                if unlisted or TEMPORARY_PATTERN.fullmatch(file.name):
                    file.unlink()


def _shard_tensors(samples: list[Features], spec: StoreSpec) -> dict[str, Tensor]:
    """The flat tensors of one shard."""
    dtype, width = spec.torch_dtype, spec.hidden_size
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for sample in samples:
        columns["ids"].append(sample.ids.to(torch.int32))
        columns["mask"].append(sample.mask.bool())
        columns["last"].append(sample.last.to(dtype))
        columns["top1"].append(sample.top1.to(torch.int32))
        columns["logsumexp"].append(sample.logsumexp.float())
        for place, k in enumerate(spec.layer_ids):
            columns[f"aux.{k}"].append(sample.aux[:, place * width : (place + 1) * width].to(dtype))
    tensors = {name: torch.cat(parts).cpu().contiguous() for name, parts in columns.items()}
    lengths = torch.tensor([0] + [sample.ids.shape[0] for sample in samples])
    return {**tensors, "offsets": lengths.cumsum(0)}


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """save_file with a full disk told as the OSError it is."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if "os error 28" in str(error) or "No space left" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from error
        raise


def _check_same(path: Path, stored: StoreSpec, asked: StoreSpec) -> None:
    """Raise UserError naming the first field in which an existing store differs from what is asked for."""
    what = {"fingerprint": "target", "samples": "list of samples"}
    for name, value in vars(asked).items():
        if (old := getattr(stored, name)) != value:
            raise UserError(
                f"The feature store {path} was made with another {what.get(name, name)} ({old}, now {value}): "
                "choose another folder, or delete that one to extract again."
            )
