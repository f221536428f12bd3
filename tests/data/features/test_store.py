"""The feature store gives back what was put in, and refuses everything else with one sentence."""

import errno
from collections import namedtuple
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data.batch import Features, Tokenized
from draftsmith.data.features import index as columns
from draftsmith.data.features import index as store_index
from draftsmith.data.features import store as features
from draftsmith.data.features import writing
from draftsmith.data.features.index import StoreSpec, read_index, shard_name
from draftsmith.data.features.store import FeatureStore, check_disk_space, estimate_bytes
from draftsmith.data.features.writing import FeatureWriter, begin_store, plan_shards, rows_of
from draftsmith.errors import UserError

WIDTH, LAYERS = 6, (0, 2, 5)
SPEC = StoreSpec(
    fingerprint="f" * 16,
    compute_dtype="float32",
    layer_ids=LAYERS,
    dtype="float32",
    hidden_size=WIDTH,
    vocab_size=50,
    samples="s" * 16,
    shard_bytes=2000,
    batch_tokens=1,
    slices=("chat", "math"),
)


def make_features(count: int = 9) -> list[Features]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        length = int(torch.randint(1, 12, (), generator=generator))
        samples.append(
            Features(
                ids=torch.randint(0, 50, (length,), generator=generator),
                mask=torch.rand(length, generator=generator) < 0.5,
                aux=torch.randn(length, len(LAYERS) * WIDTH, generator=generator),
                last=torch.randn(length, WIDTH, generator=generator),
                top1=torch.randint(0, 50, (length,), generator=generator, dtype=torch.int32),
                logsumexp=torch.randn(length, generator=generator),
                sample_id=f"séance-{number}",
                slice="math" if number % 2 else "chat",
            )
        )
    return samples


def samples_of(features: list[Features]) -> list[Tokenized]:
    return [Tokenized(one.ids, one.mask, one.sample_id, one.slice) for one in features]


def write_store(path: Path, samples: list[Features], spec: StoreSpec = SPEC) -> FeatureStore:
    begin_store(path, spec, samples_of(samples))
    writer = FeatureWriter(path)
    for number, numbers in enumerate(writer.shards):
        if not writer.has(number):
            writer.write(number, [rows_of(samples[i], spec) for i in numbers])
            writer.merge()
    assert writer.merge()
    writer.finish()
    return FeatureStore(path)


def all_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def assert_equal(ours: Features, theirs: Features) -> None:
    for name, value in vars(theirs).items():
        found = getattr(ours, name)
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype, name
            assert torch.equal(found, value), name
        else:
            assert found == value, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_what_was_written(dtype: str, tmp_path: Path) -> None:
    samples = make_features()
    store = write_store(tmp_path, samples, replace(SPEC, dtype=dtype, shard_bytes=1500))
    assert len(list(tmp_path.glob("shard-*"))) > 1
    assert len(store) == 9
    assert store.ids == [s.sample_id for s in samples]
    assert store.slices == [s.slice for s in samples]
    assert store.lengths == [len(s.ids) for s in samples]
    assert store.layer_ids == LAYERS
    rounded = [
        replace(s, aux=s.aux.to(store.spec.torch_dtype), last=s.last.to(store.spec.torch_dtype)) for s in samples
    ]
    for index, truth in enumerate(rounded):
        assert_equal(store.get(index), truth)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shard_is_what_safetensors_writes(dtype: str, tmp_path: Path) -> None:
    spec = replace(SPEC, dtype=dtype, shard_bytes=10**6)
    write_store(tmp_path, make_features(), spec)
    shard = tmp_path / "shard-00000.safetensors"
    with safe_open(shard, "pt") as opened:
        save_file(load_file(shard), tmp_path / "theirs", opened.metadata())
    assert shard.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_head_takes_the_columns_it_needs_in_its_order(tmp_path: Path) -> None:
    samples = make_features()
    store = write_store(tmp_path, samples)
    columns = samples[4].aux.split(WIDTH, dim=-1)
    assert torch.equal(store.get(4, (5, 0)).aux, torch.cat((columns[2], columns[0]), dim=-1))
    assert store.get(4, ()).aux.shape == (len(samples[4].ids), 0)


def test_the_estimate_is_what_the_tensors_take(tmp_path: Path) -> None:
    samples = make_features()
    write_store(tmp_path, samples)
    tensors = [load_file(file) for file in tmp_path.glob("shard-*")]
    size = sum(t.nbytes for shard in tensors for t in shard.values())
    assert size == estimate_bytes(sum(len(s.ids) for s in samples), WIDTH, len(LAYERS), "float32")


@pytest.mark.parametrize("moment", ["checksums only", "half a record", "not in the index"])
def test_cut_off_and_resumed_leaves_the_same_bytes(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a write was cut in its middle; what is killed between two operations, tests of extraction go on from."""
    samples, broken, append, calls = make_features(), tmp_path / "broken", writing.append_shard, count(1)
    write_store(tmp_path / "whole", samples)

    def cut_off(*arguments: Any) -> Any:
        return append(*arguments) if next(calls) < 3 else 1 / 0

    monkeypatch.setattr(writing, "append_shard", cut_off)
    with pytest.raises(ZeroDivisionError):
        write_store(broken, samples)
    monkeypatch.undo()
    for name in ("checksums.bin", "shards.bin") if moment != "not in the index" else ():
        part, whole = broken / name, (tmp_path / "whole" / name).read_bytes()
        size = part.stat().st_size + (9 if name == "checksums.bin" or moment == "half a record" else 0)
        part.write_bytes(whole[:size])
    if moment == "not in the index":
        (broken / shard_name(4)).write_bytes((tmp_path / "whole" / shard_name(4)).read_bytes())
        (broken / shard_name(5)).write_bytes((tmp_path / "whole" / shard_name(5)).read_bytes()[:-1])
    with pytest.raises(UserError, match="not complete"):
        FeatureStore(broken)
    begin_store(broken, SPEC, samples_of(samples))
    resumed = FeatureWriter(broken)
    assert 0 < read_index(broken).num_samples <= len(samples)
    assert [resumed.has(number) for number in (0, 4, 5)] == [True, moment == "not in the index", False]
    write_store(broken, samples)
    assert all_bytes(broken) == all_bytes(tmp_path / "whole")
    write_store(broken, samples)  # a finished store stays as it is
    assert all_bytes(broken) == all_bytes(tmp_path / "whole")


# Bad input: one sentence each.


def read_everything(path: Path, **options: object) -> None:
    store = FeatureStore(path, **options)
    [*map(store.get, range(len(store)))]


def refused(path: Path, *words: str, **options: object) -> None:
    with pytest.raises(UserError) as info:
        read_everything(path, **options)
    text = str(info.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("length", 0),
        ("slice", 9),
        ("name", 2**63),
        ("name", 0),
        ("conversation", 0),
        ("samples", 0),
        ("samples", 2**63),
    ],
)
def test_records_out_of_order_are_refused_though_their_checksum_is_right(
    column: str, value: int, tmp_path: Path
) -> None:
    """Anybody can compute it."""
    write_store(tmp_path, make_features(), SPEC)
    found = read_index(tmp_path)
    shards, records = found.shards.copy(), found.samples.records.copy()
    assert len(shards) > 2
    (shards if column == "samples" else records)[column][1] = value
    start = 0
    for number, shard in enumerate(shards):
        end = int(shard["samples"])
        parts = shards[number : number + 1].tobytes()[: store_index._COUNTS], found.checksums[start:end].tobytes()
        shard["checksum"], start = np.void(store_index._digest(*parts)), end
    (tmp_path / store_index.SHARDS).write_bytes(shards.tobytes())
    (tmp_path / columns.SAMPLES).write_bytes(records.tobytes())
    index = tmp_path / "index.json"
    names = np.frombuffer((tmp_path / columns.NAMES).read_bytes(), "u1")
    index.write_text(index.read_text().replace(found.columns, columns.digest_columns(records, names)))
    refused(tmp_path, "is corrupt")


def test_samples_are_read_from_the_store(tmp_path: Path) -> None:
    """With what training reads of them, while it is not complete as well."""
    samples = [
        replace(one, conversation="Gespräch" if n % 2 else None) for n, one in enumerate(samples_of(make_features()))
    ]
    begin_store(tmp_path, SPEC, samples)
    stored = FeatureWriter(tmp_path).samples
    assert len(stored) == len(samples)
    assert stored.lengths == [len(one.ids) for one in samples]
    for number, sample in enumerate([*samples, samples[-1]]):
        found = stored[number if number < len(samples) else -1]
        assert torch.equal(found.ids, sample.ids)
        assert torch.equal(found.mask, sample.mask)
        assert vars(found) | {"ids": 0, "mask": 0} == vars(sample) | {"ids": 0, "mask": 0}
    assert [one.sample_id for one in stored[2:4]] == [one.sample_id for one in samples[2:4]]
    with pytest.raises(IndexError):
        stored[len(samples)]


def test_what_is_half_written_is_swept_in_the_stores_own_folder_alone(tmp_path: Path) -> None:
    begin_store(tmp_path, SPEC, samples_of(make_features()))
    (tmp_path / "inside").mkdir()
    own, others = (folder / ".x.draftsmith-0123456789ab.tmp" for folder in (tmp_path, tmp_path / "inside"))
    own.touch()
    others.touch()
    begin_store(tmp_path, SPEC, samples_of(make_features()))
    assert not own.exists()
    assert others.exists()


def counted_hashes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that takes the bytes of every checksum that is computed from now on."""
    hashed, real = [], features.checksum

    def counting(parts: Iterable[torch.Tensor]) -> bytes:
        parts = list(parts)
        hashed.append(sum(part.nbytes for part in parts))
        return real(parts)

    for module in (features, writing):
        monkeypatch.setattr(module, "checksum", counting)
    return hashed


def test_threads_read_at_once_and_what_one_has_verified_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most reads open a shard and close another one's."""
    monkeypatch.setattr(features, "OPEN_SHARDS", 1)
    samples = make_features()
    store = write_store(tmp_path, samples)
    with ThreadPoolExecutor(4) as pool:
        for found, truth in zip(pool.map(store.get, [*range(9)] * 20), samples * 20, strict=True):
            assert_equal(found, truth)
    hashed = counted_hashes(monkeypatch)
    assert [store.get(i).sample_id for i in range(len(store))] == store.ids
    assert not hashed


def test_what_is_hashed_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever layers a head reads, however often a shard is opened, and while writing as well."""
    samples = make_features()
    lengths = [len(one.ids) for one in samples]
    hashed = counted_hashes(monkeypatch)
    monkeypatch.setattr(features, "OPEN_SHARDS", 1)
    store = write_store(tmp_path, samples)
    assert len(list(tmp_path.glob("shard-*"))) > 1
    assert sum(hashed) == estimate_bytes(sum(lengths), WIDTH, len(LAYERS), "float32")
    for layers, added in (((5, 0), 2), ((5,), 0), (LAYERS, 1), (LAYERS, 0)):
        hashed.clear()
        for index in (3, 0, 8, 3):
            store.get(index, layers)
        states = added * WIDTH * 4 + (estimate_bytes(1, WIDTH, 0, "float32") if added == 2 else 0)
        assert sum(hashed) == states * sum(lengths[i] for i in (3, 0, 8))


def test_damage_to_any_byte_that_is_read_is_found(tmp_path: Path) -> None:
    write_store(tmp_path, make_features(3), replace(SPEC, shard_bytes=10**6))
    shard = tmp_path / "shard-00000.safetensors"
    good = shard.read_bytes()
    for at in range(len(good) - sum(t.nbytes for t in load_file(shard).values()), len(good)):
        shard.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(tmp_path, "shard-00000.safetensors is corrupt (its checksum differs from index.json)")


def test_a_shard_whose_content_is_not_verified_must_still_be_one(tmp_path: Path) -> None:
    write_store(tmp_path, make_features())
    shard = tmp_path / "shard-00001.safetensors"
    flipped = bytearray(shard.read_bytes())
    flipped[-5] ^= 1
    shard.write_bytes(flipped)
    assert len([*map(FeatureStore(tmp_path, verify=False).get, range(9))]) == 9
    shard.write_bytes(b"\xff" * len(flipped))
    refused(tmp_path, "shard-00001", "cut short or damaged", verify=False)


def test_other_target_and_other_layers(tmp_path: Path) -> None:
    store = write_store(tmp_path, make_features())
    refused(tmp_path, "another target", "abc", fingerprint="abc")
    assert len(FeatureStore(tmp_path, fingerprint="f" * 16)) == 9
    with pytest.raises(UserError, match=r"holds layers \[0, 2, 5\] but not 3"):
        store.get(0, (2, 3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fingerprint": "e" * 16}, "target"),
        ({"samples": "x"}, "list of samples"),
        ({"shard_bytes": 7}, "shard_bytes"),
        ({"batch_tokens": 7}, "batch_tokens"),
    ],
)
def test_resuming_something_else_is_refused_and_changes_nothing(change: dict, word: str, tmp_path: Path) -> None:
    samples = make_features()
    write_store(tmp_path, samples)
    before = all_bytes(tmp_path)
    assert len(before) > 1
    with pytest.raises(UserError, match=f"another {word}"):
        begin_store(tmp_path, replace(SPEC, **change), samples_of(samples))
    assert all_bytes(tmp_path) == before


def test_a_folder_with_shards_but_no_index_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_bytes(b"somebody else's")
    with pytest.raises(UserError, match=r"no index\.json"):
        begin_store(tmp_path, SPEC, samples_of(make_features()))
    assert all_bytes(tmp_path) == {"shard-00000.safetensors": b"somebody else's"}


def test_too_little_disk_space_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(2000, 0, 2000))
    check_disk_space(tmp_path / "not" / "yet", 2000)
    with pytest.raises(UserError, match=r"need 3 KB but the disk .* has 2 KB left"):
        check_disk_space(tmp_path / "not" / "yet", 3000)


def test_disk_full_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_rest: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "write_shard", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_store(tmp_path, make_features())
    assert {name: len(data) > 0 for name, data in all_bytes(tmp_path).items()} == {
        **dict.fromkeys(("index.json", "names.bin", "samples.bin", "ids.bin", "masks.bin"), True),
        "checksums.bin": False,
        "shards.bin": False,
    }


def test_shards_are_filled_to_the_last_byte_and_end_with_a_chunk() -> None:
    token = estimate_bytes(1, WIDTH, len(LAYERS), "float32")
    spec = replace(SPEC, shard_bytes=10 * token)
    assert plan_shards([5, 5, 5, 4, 1], [1, 2, 3, 4, 5], spec) == [range(2), range(2, 5)]
    assert plan_shards([5, 4, 5, 5], [2, 4], spec) == [range(2), range(2, 4)]
    # A chunk that is larger than a shard begins a new one, and so does what follows it.
    assert plan_shards([1, 5, 5, 5, 1], [1, 4, 5], spec) == [range(1), range(1, 3), range(3, 4), range(4, 5)]
    assert plan_shards([11, 12], [1, 2], spec) == [range(1), range(1, 2)]
