"""Bad feature stores: indexes that lie or point elsewhere, shards that are cut short or changed."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batch import Features
from draftsmith.data.features.store import FeatureStore, FeatureWriter, StoreSpec
from tests.bad_inputs.cases import Case, Table, cut, edit_json, link, nested, pipe, remove, replace_by_folder, write

INDEX, SHARD = "index.json", "shard-00000.safetensors"


@functools.cache
def _saved() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="store-"))
    spec = StoreSpec("f" * 16, "float32", (0, 2), "float32", 4, 50, "s" * 16, 10**6)
    writer = FeatureWriter(folder, spec)
    for number in range(3):
        length = 3 + number
        states = torch.randn(length, 12)
        ids = torch.arange(length)
        writer.add(
            Features(ids, ids > 1, states[:, :8], states[:, 8:], ids.int(), torch.zeros(length), f"a-{number}", "chat")
        )
    writer.finish()
    return folder


def make(folder: Path) -> None:
    """Copy a complete store of one shard with three samples."""
    shutil.copytree(_saved(), folder, dirs_exist_ok=True)


def read(folder: Path) -> None:
    """Open the store and read every sample."""
    store = FeatureStore(folder)
    store.get_many(range(len(store)))


def index(name: str, **changes: Any) -> Case:
    """Return the case of an index with other values."""
    return Case(f"index-{name}", edit_json(INDEX, **changes), (INDEX,))


def shard(name: str, change: Callable[[dict[str, Any]], object]) -> Case:
    """Return the case of an index whose entry of the shard is changed."""

    def spoil(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_text())
        change(value["shards"][0])
        (folder / INDEX).write_text(json.dumps(value))

    return Case(f"shard-{name}", spoil, (INDEX,))


def _flip(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 1
    (folder / SHARD).write_bytes(data)


_INDEX = (
    Case("index-empty", write(INDEX, ""), (INDEX,)),
    Case("index-list", write(INDEX, "[]"), (INDEX,)),
    Case("index-null", write(INDEX, "null"), (INDEX,)),
    Case("index-cut", cut(INDEX, 0.6), (INDEX,)),
    Case("index-binary", write(INDEX, b"\xff\x80" * 9), (INDEX,)),
    Case("index-deep", write(INDEX, '{"shards": ' + nested(100_000) + "}"), (INDEX,)),
    Case("index-long-integer", write(INDEX, '{"schema_version": ' + "1" * 5000 + "}"), (INDEX,)),
    Case("index-missing", remove(INDEX), (INDEX,)),
    Case("index-folder", replace_by_folder(INDEX), (INDEX,)),
    Case("index-dangling", link(INDEX, "nowhere"), (INDEX,)),
    Case("index-pipe", pipe(INDEX), (INDEX,)),
    index("schema-next", schema_version=2),
    index("schema-text", schema_version="1"),
    Case("index-incomplete", edit_json(INDEX, complete=False), ("not complete",)),
    index("complete-text", complete="yes"),
    index("layers-text", layer_ids="0,2"),
    index("layers-number", layer_ids=3),
    index("layers-texts", layer_ids=["0", "2"]),
    index("dtype-unknown", dtype="float12"),
    index("dtype-list", dtype=["float32"]),
    index("hidden-text", hidden_size="4"),
    index("hidden-negative", hidden_size=-4),
    index("vocab-null", vocab_size=None),
    index("fingerprint-number", fingerprint=5),
    index("shard_bytes-text", shard_bytes="many"),
    index("no-shards", shards=...),
    index("shards-object", shards={}),
    index("shards-text", shards="none"),
    index("shards-numbers", shards=[1]),
    index("shards-empty-objects", shards=[{}]),
)
_SHARDS = (
    shard("outside", lambda one: one.update(file="../shard-00000.safetensors")),
    shard("absolute", lambda one: one.update(file="/etc/passwd")),
    shard("file-number", lambda one: one.update(file=3)),
    shard("file-empty", lambda one: one.update(file="")),
    shard("bytes-text", lambda one: one.update(bytes="many")),
    shard("sha-number", lambda one: one.update(sha256=1)),
    shard("other-key", lambda one: one.update(colour="red")),
    shard("key-missing", lambda one: one.pop("lengths")),
    shard("ids-text", lambda one: one.update(ids="abc")),
    shard("ids-numbers", lambda one: one.update(ids=[1, 2, 3])),
    shard("slices-short", lambda one: one.update(slices=["chat"])),
    shard("lengths-texts", lambda one: one.update(lengths=["3", "4", "5"])),
    shard("lengths-negative", lambda one: one.update(lengths=[-3, 10, 5])),
    shard("lengths-of-equal-sum", lambda one: one.update(lengths=[4, 3, 5])),
    shard("lengths-of-another-sum", lambda one: one.update(lengths=[3, 4, 50])),
    Case("shard-missing-file", remove(SHARD), (SHARD,)),
    Case("shard-cut", cut(SHARD, 0.9), (SHARD,)),
    Case("shard-flipped", _flip, (SHARD,)),
    Case("shard-empty", write(SHARD, b""), (SHARD,)),
    Case("shard-folder", replace_by_folder(SHARD), (SHARD,)),
    Case("shard-dangling", link(SHARD, "nowhere"), (SHARD,)),
    Case("shard-pipe", pipe(SHARD), (SHARD,)),
)

TABLE = Table("stores", make, read, (*_INDEX, *_SHARDS))
