"""The feature store gives back what was put in, and refuses everything else with one sentence."""

import errno
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from draftsmith.data.batch import Features
from draftsmith.data.features import index as store_index
from draftsmith.data.features import store as features
from draftsmith.data.features import writing
from draftsmith.data.features.index import StoreSpec, read_index
from draftsmith.data.features.store import FeatureStore, check_disk_space, estimate_bytes
from draftsmith.data.features.writing import FeatureWriter, rows_of
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


def add(writer: FeatureWriter, sample: Features) -> None:
    writer.add(sample.sample_id, sample.slice, rows_of(sample, writer.spec))


def write_store(path: Path, samples: list[Features], spec: StoreSpec = SPEC) -> FeatureStore:
    writer = FeatureWriter(path, spec)
    for sample in samples[writer.num_samples :]:
        add(writer, sample)
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
    for found, truth in zip(store.get_many([7, 0, 3]), (rounded[7], rounded[0], rounded[3]), strict=True):
        assert_equal(found, truth)
    for index, truth in enumerate(rounded):
        assert_equal(store.get(index), truth)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shard_is_what_safetensors_writes(dtype: str, tmp_path: Path) -> None:
    spec = replace(SPEC, dtype=dtype, shard_bytes=10**6)
    write_store(tmp_path, make_features(), spec)
    shard = tmp_path / "shard-00000.safetensors"
    save_file(load_file(shard), tmp_path / "theirs")
    assert shard.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_head_takes_the_columns_it_needs_in_its_order(tmp_path: Path) -> None:
    samples = make_features()
    store = write_store(tmp_path, samples)
    columns = samples[4].aux.split(WIDTH, dim=-1)
    assert torch.equal(store.get(4, (5, 0)).aux, torch.cat((columns[2], columns[0]), dim=-1))
    assert store.get(4, ()).aux.shape == (len(samples[4].ids), 0)


def test_shards_stay_under_their_limit_unless_one_sample_is_larger(tmp_path: Path) -> None:
    samples = make_features()
    write_store(tmp_path / "small", samples, replace(SPEC, shard_bytes=1))
    assert len(list((tmp_path / "small").glob("shard-*"))) == len(samples)
    write_store(tmp_path / "large", samples, replace(SPEC, shard_bytes=10**9))
    assert len(list((tmp_path / "large").glob("shard-*"))) == 1
    write_store(tmp_path / "middle", samples)
    assert all(file.stat().st_size < 2000 + 2000 for file in (tmp_path / "middle").glob("shard-*"))


def test_the_estimate_is_what_the_tensors_take(tmp_path: Path) -> None:
    samples = make_features()
    write_store(tmp_path, samples)
    tensors = [load_file(file) for file in tmp_path.glob("shard-*")]
    size = sum(t.nbytes for shard in tensors for t in shard.values())
    assert size == estimate_bytes(sum(len(s.ids) for s in samples), WIDTH, len(LAYERS), "float32")


@pytest.mark.parametrize(
    "moment",
    ["between samples", "inside a shard", "before the index", "names only", "half a record", "before the last index"],
)
def test_killed_and_resumed_leaves_the_same_bytes(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_features()
    write_store(tmp_path / "whole", samples)

    class Killed(BaseException):
        pass

    def killing(function: str, call: int) -> None:
        original, calls = getattr(writing, function), []

        def wrapper(*arguments: object) -> object:
            path = next(one for one in arguments if isinstance(one, Path))
            calls.append(path)
            if len(calls) == call:
                if function == "write_shard":
                    path.write_bytes(b"half")
                    path.rename(
                        path.with_name(".shard-00001.safetensors.draftsmith-0123456789ab.tmp")
                    )  # as kill -9 leaves it
                raise Killed
            return original(*arguments)

        monkeypatch.setattr(writing, function, wrapper)

    broken = tmp_path / "broken"
    if moment == "between samples":
        writer = FeatureWriter(broken, SPEC)
        for sample in samples[:6]:
            add(writer, sample)
    else:
        where = {"inside a shard": ("write_shard", 2), "before the last index": ("write_index", 2)}
        killing(*where.get(moment, ("append_shard", 3)))
        with pytest.raises(Killed):
            write_store(broken, samples)
        monkeypatch.undo()
    if moment in ("names only", "half a record"):
        for name in ("names.bin", "samples.bin", "shards.bin"):
            part, whole = broken / name, (tmp_path / "whole" / name).read_bytes()
            size = part.stat().st_size + (9 if name == "names.bin" or moment == "half a record" else 0)
            part.write_bytes(whole[:size])
    with pytest.raises(UserError, match="not complete"):
        FeatureStore(broken)
    resumed = FeatureWriter(broken, SPEC)
    assert 0 < resumed.num_samples <= len(samples)
    index = read_index(broken)
    assert [index.name(i) for i in range(len(index.samples))] == [s.sample_id for s in samples[: resumed.num_samples]]
    write_store(broken, samples)
    assert all_bytes(broken) == all_bytes(tmp_path / "whole")
    write_store(broken, samples)  # a finished store stays as it is
    assert all_bytes(broken) == all_bytes(tmp_path / "whole")


# Bad input: one sentence each.


def read_everything(path: Path, **options: object) -> None:
    store = FeatureStore(path, **options)
    store.get_many(range(len(store)))


def refused(path: Path, *words: str, **options: object) -> None:
    with pytest.raises(UserError) as info:
        read_everything(path, **options)
    text = str(info.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("column", "value"), [("length", 0), ("slice", 9), ("name", 2**63), ("name", 0), ("samples", 0), ("samples", 2**63)]
)
def test_records_out_of_order_are_refused_though_their_checksum_is_right(
    column: str, value: int, tmp_path: Path
) -> None:
    """Anybody can compute it."""
    write_store(tmp_path, make_features(), SPEC)
    found = read_index(tmp_path)
    shards, samples = found.shards.copy(), found.samples.copy()
    assert len(shards) > 2
    (shards if column == "samples" else samples)[column][1] = value
    start = name = 0
    for number, shard in enumerate(shards):
        end, to = int(shard["samples"]), int(shard["names"])
        parts = shards[number : number + 1].tobytes()[: store_index._COUNTS], samples[start:end].tobytes()
        shard["checksum"] = np.void(store_index._digest(*parts, found.names[name:to].tobytes()))
        start, name = end, to
    (tmp_path / store_index.SHARDS).write_bytes(shards.tobytes())
    (tmp_path / store_index.SAMPLES).write_bytes(samples.tobytes())
    refused(tmp_path, "is corrupt")


def test_what_is_half_written_is_swept_in_the_stores_own_folder_alone(tmp_path: Path) -> None:
    FeatureWriter(tmp_path, SPEC)
    (tmp_path / "inside").mkdir()
    own, others = (folder / ".x.draftsmith-0123456789ab.tmp" for folder in (tmp_path, tmp_path / "inside"))
    own.touch()
    others.touch()
    FeatureWriter(tmp_path, SPEC)
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


def test_a_sample_is_verified_once_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader starts its workers anew in every epoch."""
    write_store(tmp_path, make_features())
    store = FeatureStore(tmp_path)
    loader = DataLoader(range(len(store)), batch_size=None, num_workers=1, collate_fn=store.get)
    assert [one.sample_id for one in loader] == store.ids
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
    assert len(FeatureStore(tmp_path, verify=False).get_many(range(9))) == 9
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
    ],
)
def test_resuming_something_else_is_refused_and_changes_nothing(change: dict, word: str, tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, SPEC)
    for sample in make_features()[:6]:
        add(writer, sample)
    before = all_bytes(tmp_path)
    assert len(before) > 1
    with pytest.raises(UserError, match=f"another {word}"):
        FeatureWriter(tmp_path, replace(SPEC, **change))
    assert all_bytes(tmp_path) == before


def test_a_folder_with_shards_but_no_index_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_bytes(b"somebody else's")
    with pytest.raises(UserError, match=r"no index\.json"):
        FeatureWriter(tmp_path, SPEC)
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
        "index.json": True,
        "names.bin": False,
        "samples.bin": False,
        "shards.bin": False,
    }


def test_a_shard_is_filled_to_its_last_byte(tmp_path: Path) -> None:
    samples = make_features()
    two = estimate_bytes(sum(len(one.ids) for one in samples[:2]), WIDTH, len(LAYERS), "float32")
    write_store(tmp_path, samples, replace(SPEC, shard_bytes=two))
    first = load_file(tmp_path / "shard-00000.safetensors")
    assert len(first["ids"]) == sum(len(one.ids) for one in samples[:2])
