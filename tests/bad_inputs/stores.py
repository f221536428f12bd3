"""Bad feature stores: indexes that lie or point elsewhere, shards that are cut short or changed."""

from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batch import Features
from draftsmith.data.features.store import FeatureStore, FeatureWriter, StoreSpec
from tests.bad_inputs.cases import Case, Table, copied, cut, damaged, edit_json, remove

INDEX, SHARD = "index.json", "shard-00000.safetensors"


def _build(folder: Path) -> None:
    """Write a complete store of one shard with three samples."""
    writer = FeatureWriter(folder, StoreSpec("f" * 16, "float32", (0, 2), "float32", 4, 50, "s" * 16, 10**6))
    for length in (3, 4, 5):
        states, ids = torch.randn(length, 12), torch.arange(length)
        lengths = torch.zeros(length)
        writer.add(Features(ids, ids > 1, states[:, :8], states[:, 8:], ids.int(), lengths, f"a-{length}", "chat"))
    writer.finish()


def read(folder: Path) -> None:
    """Open the store and read every sample."""
    store = FeatureStore(folder)
    store.get_many(range(len(store)))


def index(name: str, *words: str, **changes: Any) -> Case:
    """Return the case of an index with other values."""
    return Case(f"index-{name}", edit_json(INDEX, **changes), (INDEX, *words))


def shard(name: str, *words: str, **changes: Any) -> Case:
    """Return the case of an index whose entry of the shard is changed."""
    return Case(f"shard-{name}", edit_json(INDEX, "shards", 0, **changes), (INDEX, *words))


def _flip(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 1
    (folder / SHARD).write_bytes(data)


_INDEX = (
    *damaged(INDEX, name="index", without="cut"),
    Case("index-cut", cut(INDEX, 0.5), (INDEX, "is not JSON")),
    index("schema-next", "schema_version 99", schema_version=99),
    index("schema-text", schema_version="1"),
    Case("index-incomplete", edit_json(INDEX, complete=False), ("not complete",)),
    index("complete-text", complete="yes"),
    index("layers-text", layer_ids="0,2"),
    index("layers-number", layer_ids=3),
    index("layers-texts", layer_ids=["0", "2"]),
    *(index(f"dtype-{value}", "which no store has", dtype=value) for value in ("int4", 3, ["float32"])),
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
    shard("outside", file="../shard-00000.safetensors"),
    shard("absolute", file="/etc/passwd"),
    shard("file-number", file=3),
    shard("file-none", file=""),
    shard("bytes-text", bytes="many"),
    shard("sha-number", sha256=1),
    shard("other-key", colour="red"),
    shard("key-missing", lengths=...),
    shard("ids-text", ids="abc"),
    shard("ids-numbers", ids=[1, 2, 3]),
    shard("slices-short", slices=["chat"]),
    shard("lengths-texts", lengths=["3", "4", "5"]),
    shard("lengths-negative", lengths=[-3, 10, 5]),
    shard("lengths-of-equal-sum", lengths=[4, 3, 5]),
    shard("lengths-of-another-sum", lengths=[3, 4, 50]),
    shard("lengths-short", "do not add up", SHARD, lengths=[3, 4]),
    *damaged(SHARD, name="shard-file", without="cut missing"),
    Case("shard-missing", remove(SHARD), (SHARD, "missing")),
    Case("shard-cut", cut(SHARD, 0.9), (SHARD, "cut short")),
    Case("shard-flipped", _flip, (SHARD, "corrupt")),
)

TABLE = Table("stores", copied(_build), read, (*_INDEX, *_SHARDS))
