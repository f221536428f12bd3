"""Bad feature stores: indexes that lie or point elsewhere, shards that are cut short or changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batch import Features, Tokenized
from draftsmith.data.features.index import StoreSpec
from draftsmith.data.features.store import FeatureStore
from draftsmith.data.features.writing import FeatureWriter, begin_store, rows_of
from tests.bad_inputs.cases import Case, Table, copied, cut, damaged, edit_json, remove

INDEX, SHARD = "index.json", "shard-00000.safetensors"


def _build(folder: Path) -> None:
    """Write a complete store of one shard with three samples."""
    spec = StoreSpec("f" * 16, "float32", (0, 2), "float32", 4, 50, "s" * 16, 10**6, 100, ("chat",))
    features = []
    for length in (3, 4, 5):
        states, ids = torch.randn(length, 12), torch.arange(length)
        lengths = torch.zeros(length)
        features.append(Features(ids, ids > 1, states[:, :8], states[:, 8:], ids.int(), lengths, f"a-{length}", "chat"))
    begin_store(folder, spec, [Tokenized(one.ids, one.mask, one.sample_id, one.slice) for one in features])
    writer = FeatureWriter(folder)
    writer.write(0, [rows_of(one, spec) for one in features])
    writer.merge()
    writer.finish()


def read(folder: Path) -> None:
    """Open the store and read every sample."""
    store = FeatureStore(folder)
    [*map(store.get, range(len(store)))]
    list(store.samples)


def index(name: str, *words: str, **changes: Any) -> Case:
    """Return the case of an index with other values."""
    return Case(f"index-{name}", edit_json(INDEX, **changes), (INDEX, *words))


def flip(file: str) -> Callable[[Path], object]:
    """Return a way to spoil an input: change one of a file's last bytes."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[-5] ^= 1
        (folder / file).write_bytes(data)

    return spoil


_INDEX = (
    *damaged(INDEX, name="index", without="cut"),
    Case("index-cut", cut(INDEX, 0.5), (INDEX, "is not JSON")),
    index("schema-next", "schema_version 99", schema_version=99),
    Case("index-incomplete", edit_json(INDEX, complete=False), ("not complete",)),
    *(index(f"dtype-{value}", "which no store has", dtype=value) for value in ("int4", 3, ["float32"])),
    *(
        index(f"{key}-{value!r}", **{key: value})
        for key, values in {
            "schema_version": ["1"],
            "complete": ["yes"],
            "layer_ids": ["0,2", 3, ["0", "2"]],
            "hidden_size": ["4", -4],
            "vocab_size": [None],
            "fingerprint": [5],
            "shard_bytes": ["many"],
            "slices": [..., [], "chat", [1]],
            "num_samples": [..., "3", 2, 4],
        }.items()
        for value in values
    ),
)
_RECORDS = tuple(
    case
    for file, named, longer in (
        ("shards.bin", "checksums.bin", "add up"),
        ("checksums.bin", "checksums.bin", "add up"),
        ("samples.bin", "samples.bin", "corrupt"),
        ("names.bin", "samples.bin", "corrupt"),
        ("ids.bin", "ids.bin", "another size"),
        ("masks.bin", "ids.bin", "another size"),
    )
    for case in (
        *damaged(file, "bin", "delete the folder", name=file, without="long-integer deep"),
        Case(f"{file}-flipped", flip(file), (named, "corrupt")),
        Case(f"{file}-longer", lambda folder, file=file: (folder / file).open("ab").write(b"x" * 99), (longer,)),
    )
)
_SHARDS = (
    *damaged(SHARD, name="shard-file", without="cut missing"),
    Case("shard-missing", remove(SHARD), (SHARD, "missing")),
    Case("shard-cut", cut(SHARD, 0.9), (SHARD, "cut short")),
    Case("shard-flipped", flip(SHARD), (SHARD, "corrupt")),
)

TABLE = Table("stores", copied(_build), read, (*_INDEX, *_RECORDS, *_SHARDS))
