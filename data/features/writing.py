"""Writing a feature store: shards that appear whole or not at all, by a thread behind the pass that computes the next ones.

Shapes: L tokens of a sample, A aux layers, Ht target hidden size.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import Features
from draftsmith.data.features.index import (
    INDEX_NAME,
    StoreSpec,
    append_shard,
    cut_off,
    read_index,
    sample_record,
    shard_name,
    write_index,
)
from draftsmith.data.features.store import COMMON, checksum, estimate_bytes, shard_layout
from draftsmith.errors import UserError
from draftsmith.storage import atomic_path, explain_os_error, sweep

SHARD_BYTES = 512 * 2**20
SHARD_PATTERN = re.compile(r"shard-\d{5,}\.safetensors")
_ORDER = ("F32", "I32", "BF16", "F16", "BOOL")
"""The dtypes in the order in which safetensors itself writes tensors, which keeps every one of them aligned."""

Rows = dict[str, Tensor]
"""The rows of a sample, or of several, in each tensor of a shard, by its name."""


def rows_of(features: Features, spec: StoreSpec) -> Rows:
    """Return the rows of a sample whose aux columns are those of spec.layer_ids in order."""
    width, length = spec.hidden_size, len(features.ids)
    assert features.aux.shape == (length, len(spec.layer_ids) * width), features.aux.shape
    assert features.last.shape == (length, width), features.last.shape
    streams = features.aux.split(width, dim=-1)
    rows = {name: getattr(features, name).to(dtype or spec.torch_dtype) for name, dtype in COMMON.items()}
    return rows | {f"aux.{k}": stream.to(spec.torch_dtype) for k, stream in zip(spec.layer_ids, streams, strict=False)}


class FeatureWriter:
    """Writes a store sample by sample and continues an unfinished one after its last complete shard.

    A shard ends before the sample that would make it larger than spec.shard_bytes, so the files depend only on the
    samples and their order: a run that was killed and resumed leaves the same bytes. Opening an unfinished store
    removes temporary and unlisted files; `num_samples` samples are already in it and must not be added again.
    Raises UserError where the folder holds a store with another spec, or files that are no store.
    """

    def __init__(self, path: Path | str, spec: StoreSpec) -> None:
        self.path, self.spec = Path(path), spec
        self._pending: list[tuple[str, str, Rows]] = []
        self._pending_bytes = 0
        self._shards, self.complete = 0, False
        self._end: np.void | None = None
        if (self.path / INDEX_NAME).exists():
            index = read_index(self.path)
            _check_same(self.path, index.spec, spec)
            self._shards, self.complete = len(index.shards), index.complete
            self._end = index.shards[-1] if self._shards else None
            if not self.complete:
                cut_off(self.path, index)
        else:
            if self.path.is_dir() and any(SHARD_PATTERN.fullmatch(file.name) for file in self.path.iterdir()):
                raise UserError(f"{self.path} holds feature shards but no {INDEX_NAME}: choose another folder.")
            write_index(self.path, spec)
        self._remove_strays()

    @property
    def num_samples(self) -> int:
        """How many samples lie in shards."""
        return 0 if self._end is None else int(self._end["samples"])

    def add(self, name: str, slice_: str, rows: Rows) -> None:
        """Append one sample, of tensors on the CPU in the dtypes of the store."""
        assert not self.complete, "the store is finished"
        size = estimate_bytes(len(rows["ids"]), self.spec.hidden_size, len(self.spec.layer_ids), self.spec.dtype)
        if self._pending and self._pending_bytes + size > self.spec.shard_bytes:
            self._write_shard()
        self._pending.append((name, slice_, rows))
        self._pending_bytes += size

    def finish(self) -> None:
        """Write what is left and mark the store complete."""
        if self.complete:
            return
        if self._pending:
            self._write_shard()
        write_index(self.path, self.spec, read_index(self.path))
        self.complete = True

    def _write_shard(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        names, slices, samples = zip(*pending, strict=True)
        file = self.path / shard_name(self._shards)
        with atomic_path(file) as temporary:
            write_shard(temporary, self.spec, samples)
        records = np.zeros(len(samples), sample_record(len(self.spec.layer_ids)))
        records["length"] = [len(rows["ids"]) for rows in samples]
        records["slice"] = [self.spec.slices.index(name) for name in slices]
        records["checksums"] = [_checksums(rows, self.spec) for rows in samples]
        self._end = append_shard(self.path, self._end, file.stat().st_size, records, names)
        self._shards += 1

    def _remove_strays(self) -> None:
        listed = {shard_name(number) for number in range(self._shards)}
        with explain_os_error(self.path):
            sweep(self.path, levels=0)
            for file in self.path.iterdir():
                if SHARD_PATTERN.fullmatch(file.name) and file.name not in listed:
                    file.unlink()


def write_shard(path: Path, spec: StoreSpec, samples: Sequence[Rows]) -> None:
    """Write samples one after the other as a safetensors file, from where they lie in memory: nothing is put together before."""
    layout = shard_layout(spec, sum(len(rows["ids"]) for rows in samples))
    order = sorted(layout, key=lambda name: (_ORDER.index(layout[name][0]), name))
    header, at = {}, 0
    for name in order:
        end = at + sum(rows[name].nbytes for rows in samples)
        header[name] = {"dtype": layout[name][0], "shape": list(layout[name][1]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for rows in samples:
                file.write(rows[name].contiguous().view(torch.uint8).numpy().data)


def _checksums(rows: Rows, spec: StoreSpec) -> list[np.void]:
    """Return the checksum of what every head reads of a sample, then that of each layer in order."""
    groups = [[rows[name] for name in COMMON], *([rows[f"aux.{k}"]] for k in spec.layer_ids)]
    return [np.void(checksum(group)) for group in groups]


def _check_same(path: Path, stored: StoreSpec, wanted: StoreSpec) -> None:
    """Raise UserError naming the first field in which an existing store differs from the wanted one."""
    what = {"fingerprint": "target", "samples": "list of samples"}
    for name, value in vars(wanted).items():
        if (old := getattr(stored, name)) != value:
            raise UserError(
                f"The feature store {path} was made with another {what.get(name, name)} ({old}, now {value}): "
                "choose another folder, or delete that one to extract again."
            )


class Behind:
    """One thread that does pieces of work in order behind its caller, who waits as soon as `most` of them are left to do.

    An error of the thread ends its work; it is raised by the next `put`, or at the end of the context.
    """

    def __init__(self, most: int) -> None:
        self._most, self._stopped = most, False
        self._left: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> "Behind":
        return self

    def put(self, work: Callable[[], Any]) -> None:
        """Have `work` done after all that was put before."""
        while self._left and (len(self._left) >= self._most or self._left[0].done()):
            self._left.popleft().result()
        self._left.append(self._thread.submit(self._do, work))

    def _do(self, work: Callable[[], Any]) -> None:
        if not self._stopped:  # else what came before is missing
            try:
                work()
            except BaseException:
                self._stopped = True
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._stopped = self._stopped or kind is not None
        try:
            while self._left and kind is None:
                self._left.popleft().result()
        finally:
            self._stopped = True  # also where the wait was interrupted
            self._thread.shutdown()


class HostCopies:
    """Copies from a device behind the passes that it computes next; on the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def begin(self, tensors: Rows) -> tuple[Rows, Callable[[], None]]:
        """Return the tensors in pinned memory, and what waits until they are there."""
        if self._device.type != "cuda":
            return {name: tensor.cpu() for name, tensor in tensors.items()}, lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.record_stream(self._stream)
        return copies, self._stream.record_event().synchronize
