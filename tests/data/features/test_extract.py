"""Extraction is held against the plain model, against itself online, and against interruptions."""

import errno
import re
import shutil
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.batch import Features, States, Tokenized, plan_chunks
from draftsmith.data.features import extract as extract_module
from draftsmith.data.features import writing
from draftsmith.data.features.behind import Behind
from draftsmith.data.features.extract import (
    OnlineSource,
    compute_states,
    digest_samples,
    extract,
    summarise_logits,
)
from draftsmith.data.features.index import read_index
from draftsmith.data.features.store import FeatureStore
from draftsmith.errors import UserError
from draftsmith.target.target import Target
from scripts.bench.killing import counted, in_children, kill_at
from tests.data.features.test_store import all_bytes
from tests.models import KINDS, make_target, tiny_model

pytestmark = pytest.mark.full

LAYERS = (0, 2, 5)
SMALL = {"layer_ids": LAYERS, "batch_tokens": 64, "shard_bytes": 60_000}


def make_samples(count: int = 40, seed: int = 0) -> list[Tokenized]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = int(torch.randint(1, 40, (), generator=generator))
        samples.append(
            Tokenized(
                ids=torch.randint(3, 160, (length,), generator=generator),
                mask=torch.rand(length, generator=generator) < 0.6,
                sample_id=f"line-{number}",
                slice=("chat", "code", "math")[number % 3],
            )
        )
    return samples


def assert_features(ours: Features, theirs: Features, exact: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    for name in ("ids", "mask", "top1"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("aux", "last", "logsumexp"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **tolerance)
    assert (ours.sample_id, ours.slice) == (theirs.sample_id, theirs.slice)


def compute(
    target: Target, samples: list[Tokenized], indices: Sequence[int], layers: tuple[int, ...] = LAYERS
) -> list[Features]:
    """Samples of an OnlineSource in as few passes of 64 tokens as there are."""
    online, places = OnlineSource(target, samples, LAYERS, batch_tokens=64), []
    for n in (online.lengths[i] for i in indices):
        aux, last = (torch.zeros(n, k * online.hidden_size, dtype=online.dtype) for k in (len(layers), 1))
        places.append(States(aux, last, torch.zeros(n, dtype=torch.int32), torch.zeros(n)))
    online.fill(indices, places, layers)
    found = []
    for i, place in zip(indices, places, strict=True):
        ids, mask = online.text(i)
        found.append(Features(ids, mask, **vars(place), sample_id=samples[i].sample_id, slice=samples[i].slice))
    return found


@torch.no_grad()
def slow_oracle(target: Target, sample: Tokenized) -> Features:
    """One sample alone through the whole model, as transformers computes it."""
    truth = target.model(sample.ids[None], output_hidden_states=True)
    return Features(
        ids=sample.ids,
        mask=sample.mask,
        aux=torch.cat([truth.hidden_states[k][0] for k in LAYERS], dim=-1),
        last=truth.hidden_states[-1][0],
        top1=truth.logits[0].argmax(-1).int(),
        logsumexp=truth.logits[0].logsumexp(-1),
        sample_id=sample.sample_id,
        slice=sample.slice,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_store_online_and_one_by_one_agree(kind: str, tmp_path: Path) -> None:
    target, samples = make_target(kind), make_samples()
    store = extract(target, samples, tmp_path / "features", **SMALL)
    online = OnlineSource(target, samples, LAYERS, batch_tokens=64)
    assert len(list((tmp_path / "features").glob("shard-*"))) > 2
    assert store.ids == [sample.sample_id for sample in samples]
    for name in ("slices", "lengths"):
        assert getattr(store, name) == getattr(online, name)
    together = compute(target, samples, range(len(samples)))
    for index, sample in enumerate(samples):
        truth = slow_oracle(target, sample)
        assert_features(compute(target, samples, [index])[0], truth, exact=True)
        assert_features(together[index], truth, exact=False)
        assert_features(store.get(index), truth, exact=False)
    assert torch.equal(store.get(3, (5, 0)).aux, torch.cat([store.get(3).aux[:, 128:], store.get(3).aux[:, :64]], -1))
    assert_features(compute(target, samples, [3], (5, 0))[0], store.get(3, (5, 0)), exact=False)


def test_store_equals_online_bit_for_bit_in_the_same_batches(tmp_path: Path) -> None:
    target, samples = make_target(), make_samples()
    store = extract(target, samples, tmp_path, **SMALL)
    chunks = plan_chunks(store.lengths, 64)
    assert len(chunks) > 1
    for chunk in chunks:
        for batch in chunk.batches:
            for index, online in zip(batch, compute(target, samples, batch), strict=True):
                assert_features(store.get(index), online, exact=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_teacher_belongs_to_the_stored_states(dtype: str, tmp_path: Path) -> None:
    target, samples = make_target(), make_samples(6)
    store = extract(target, samples, tmp_path, **{**SMALL, "dtype": dtype})
    for features in map(store.get, range(6)):
        assert features.aux.dtype == features.last.dtype == getattr(torch, dtype)
        logits = target.head.logits(features.last)
        torch.testing.assert_close(features.logsumexp, logits.logsumexp(-1))
        assert torch.equal(features.top1, logits.argmax(-1).int())


def test_logits_are_never_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    last = target.forward(make_samples(1)[0].ids[None]).last[0]
    top1, logsumexp = summarise_logits(target.head, last)
    rows, original = [], type(target.head).logits

    def counting(head: object, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return original(head, hidden)

    monkeypatch.setattr(extract_module, "LOGITS_BYTES", {"cpu": 4 * 160 * 3})
    monkeypatch.setattr(extract_module, "LOGITS_ROWS", 1)
    monkeypatch.setattr(type(target.head), "logits", counting)
    chunked = summarise_logits(target.head, last)
    assert max(rows) == 3
    assert sum(rows) == len(last)
    assert torch.equal(chunked[0], top1)
    torch.testing.assert_close(chunked[1], logsumexp)


@pytest.mark.parametrize("call", [1, 4, 9, 14])
def test_interrupted_and_resumed_gives_identical_files(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, samples = make_target(), make_samples()
    extract(target, samples, tmp_path / "whole", **SMALL)
    lengths = [len(sample.ids) for sample in samples]
    computed: list[int] = []
    limit = call

    def failing(target: Target, batch: list[Tokenized], *rest: object) -> States:
        if len(computed) + 1 == limit:
            raise RuntimeError("pulled the plug")
        computed.append(len(batch))
        return compute_states(target, batch, *rest)

    monkeypatch.setattr(extract_module, "compute_states", failing)
    with pytest.raises(RuntimeError, match="plug"):
        extract(target, samples, tmp_path / "broken", **SMALL)
    done = read_index(tmp_path / "broken").num_samples
    computed.clear()
    limit = 0
    extract(target, samples, tmp_path / "broken", **SMALL)
    assert all_bytes(tmp_path / "broken") == all_bytes(tmp_path / "whole")
    # Windows that were finished are not computed again, and a finished store costs nothing.
    assert sum(computed) == len(samples) - max(w.start for w in plan_chunks(lengths, 64) if w.start <= done)
    computed.clear()
    extract(target, samples, tmp_path / "broken", **SMALL)
    assert not computed


def test_an_error_of_the_writer_ends_the_extraction_in_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was whole before stays, and nothing is written after it."""
    written, real = [], writing.write_shard

    def full(path: Path, *rest: Any) -> None:
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest)

    target, samples = make_target(), make_samples()
    extract(target, samples, tmp_path / "whole", **SMALL)
    monkeypatch.setattr(writing, "write_shard", full)
    with pytest.raises(UserError, match=r"No space left on device while writing .*shard-\d+\.safetensors"):
        extract(target, samples, tmp_path / "broken", **SMALL)
    assert len(written) == 3
    assert len(list((tmp_path / "broken").glob("shard-*"))) == 2
    monkeypatch.undo()
    extract(target, samples, tmp_path / "broken", **SMALL)
    assert all_bytes(tmp_path / "broken") == all_bytes(tmp_path / "whole")


def test_kill_9_at_any_operation_and_going_on_gives_the_same_bytes(tmp_path: Path) -> None:
    target, samples, log = make_target(), make_samples(16), tmp_path / "log"

    def work(folder: Path) -> int:
        extract(target, samples, folder, **SMALL)
        return 0

    assert in_children(log, counted(tmp_path / "whole", tmp_path / "number", lambda: work(tmp_path / "whole"))) == 0
    operations = int((tmp_path / "number").read_text())
    assert operations > 40
    for number in range(3, operations, 8):
        broken = tmp_path / str(number)
        assert in_children(log, kill_at(number, broken, lambda at=broken: work(at))) == -9
        work(broken)
        assert all_bytes(broken) == all_bytes(tmp_path / "whole"), number


def test_a_device_too_small_for_a_pass_takes_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A sample that does not fit alone is named, and nothing that was made is lost."""
    target, samples, sizes = make_target(), make_samples(20), []
    room = max(len(sample.ids) for sample in samples)

    def small(target: Target, batch: list[Tokenized], *rest: object) -> States:
        size = len(batch) * max(len(sample.ids) for sample in batch)
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")
        sizes.append(size)
        return compute_states(target, batch, *rest)

    whole = extract(target, samples, tmp_path / "whole", **SMALL)
    monkeypatch.setattr(extract_module, "compute_states", small)
    halved = extract(target, samples, tmp_path / "halved", **SMALL)
    assert len(sizes) > len(plan_chunks(whole.lengths, 64)[0].batches)
    for index in range(len(samples)):
        assert_features(halved.get(index), whole.get(index), exact=False)
    assert capsys.readouterr().err.count("lower it for the next store") == 1
    room -= 1
    with pytest.raises(
        UserError,
        match=r"has not the memory for a pass over the \d+ tokens of 'line-\d+' \(CUDA out of memory.*data\.max_length",
    ):
        extract(target, samples, tmp_path / "small", **SMALL)
    room += 1
    extract(target, samples, tmp_path / "small", **SMALL)
    assert all_bytes(tmp_path / "small") == all_bytes(tmp_path / "halved")


def test_nothing_of_a_pass_that_ran_out_of_memory_is_kept_while_its_halves_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of the aux streams are where a device runs out first."""
    failed: list[weakref.ref[torch.Tensor]] = []

    def by_tensor(states: States, layer_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        assert not [left for left in failed if left() is not None]
        if not failed:
            failed.append(weakref.ref(states.aux))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return by_tensor_(states, layer_ids)

    by_tensor_ = extract_module.by_tensor
    monkeypatch.setattr(extract_module, "by_tensor", by_tensor)
    extract(target, make_samples(8), tmp_path / "halved", **SMALL | {"batch_tokens": 320})
    assert failed


def test_passes_wait_for_the_writer_and_not_one_by_one() -> None:
    """At most so many pieces of work are left to do, and they are done in their order."""
    gate, done = threading.Event(), []
    with Behind(2) as behind:
        behind.put(gate.wait)
        behind.put(partial(done.append, 1))
        third = threading.Thread(target=behind.put, args=(partial(done.append, 2),))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        assert not done
        gate.set()
        third.join()
    assert done == [1, 2]


def test_the_size_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    samples = make_samples(10)
    extract(make_target(), samples, tmp_path, **SMALL)
    captured = capsys.readouterr()
    assert captured.err.startswith("Features of 10 samples, ")
    assert "KB" in captured.err
    assert re.search(r"\dk?tok/s", captured.err)


# Bad input: one sentence each, nothing written.


def refused(tmp_path: Path, samples: list[Tokenized], *words: str, **options: object) -> None:
    target = make_target()
    with pytest.raises(UserError) as info:
        extract(target, samples, tmp_path / "features", **{**SMALL, **options})
    text = str(info.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert not (tmp_path / "features").exists()


def test_bad_samples_layers_and_dtype(tmp_path: Path) -> None:
    samples = make_samples(3)
    refused(tmp_path, [], "no samples")
    refused(
        tmp_path, [*samples, Tokenized(torch.arange(300) % 160, torch.ones(300).bool(), "long", "chat")], "300", "256"
    )
    refused(tmp_path, [*samples, Tokenized(torch.tensor([5, 160]), torch.ones(2).bool(), "odd", "chat")], "odd", "160")
    refused(tmp_path, [Tokenized(torch.tensor([5, -1, 3]), torch.ones(3).bool(), "odd", "chat")], "odd", "id -1,")
    refused(tmp_path, samples, "8", layer_ids=(2, 8))
    refused(tmp_path, samples, "int4", dtype="int4")
    with pytest.raises(UserError, match="int4"):
        OnlineSource(make_target(), samples, LAYERS, dtype="int4")


def test_changed_samples_or_target_are_noticed(tmp_path: Path) -> None:
    samples = make_samples(5)
    extract(make_target(), samples, tmp_path, **SMALL)
    with pytest.raises(UserError, match="list of samples"):
        extract(make_target(), samples[::-1], tmp_path, **SMALL)
    other = Target(tiny_model("llama", seed=1), path="memory", fingerprint="other")
    with pytest.raises(UserError, match="another target"):
        extract(other, samples, tmp_path, **SMALL)
    with pytest.raises(UserError, match="another target"):
        FeatureStore(tmp_path, fingerprint=other.fingerprint)
    flipped = Tokenized(samples[0].ids, ~samples[0].mask, samples[0].sample_id, samples[0].slice)
    assert digest_samples(samples) != digest_samples([flipped, *samples[1:]])


def test_a_longer_list_of_samples_adds_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept has the same id, tokens, mask and target; the store is the one that all the samples would have given at once."""
    samples, settings, computed = make_samples(12), SMALL | {"batch_tokens": 1}, []
    flipped = Tokenized(samples[0].ids, ~samples[0].mask, samples[0].sample_id, samples[0].slice)
    extract(make_target(), [flipped, *samples[9:4:-1]], tmp_path / "fewer", **settings)

    def counted(target: Target, missing: list[Tokenized], *rest: object) -> States:
        computed.extend(sample.sample_id for sample in missing)
        return compute_states(target, missing, *rest)

    monkeypatch.setattr(extract_module, "compute_states", counted)
    other = Target(tiny_model("llama", seed=1), path="memory", fingerprint="other")
    extract(other, samples[5:7], tmp_path / "other", **settings)
    older = shutil.copytree(tmp_path / "fewer", tmp_path / "older") / "index.json"
    older.write_text(older.read_text().replace('"schema_version": 4', '"schema_version": 1'))
    every = set(range(12))
    for name, expected in (("fewer", {*range(5), 10, 11}), ("other", every), ("older", every), ("none", every)):
        computed.clear()
        extract(make_target(), samples, tmp_path / f"after-{name}", **settings, kept=tmp_path / name)
        assert sorted(computed) == sorted(f"line-{number}" for number in expected)
    assert all_bytes(tmp_path / "after-fewer") == all_bytes(tmp_path / "after-none")

    def failing(target: Target, missing: list[Tokenized], *rest: object) -> States:
        if len(computed) == 8:
            raise KeyboardInterrupt
        return counted(target, missing, *rest)

    computed.clear()
    monkeypatch.setattr(extract_module, "compute_states", failing)
    with pytest.raises(KeyboardInterrupt):
        extract(make_target(), samples[::-1], tmp_path / "broken", **settings)
    whole = read_index(tmp_path / "broken").num_samples
    computed.clear()
    monkeypatch.setattr(extract_module, "compute_states", counted)
    extract(make_target(), samples, tmp_path / "after-broken", **settings, kept=tmp_path / "broken")
    assert 0 < whole == 12 - len(computed), "of a store that was interrupted its whole shards"
    assert all_bytes(tmp_path / "after-broken") == all_bytes(tmp_path / "after-none")


def test_states_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    target = make_target()
    target.embedding.data.mul_(1e6)
    samples = [Tokenized(torch.tensor([3, 4, 5]), torch.tensor([0, 1, 1]), "one", "a")]
    with pytest.raises(
        UserError, match=r"features.dtype is float16, .* 65,504, in one of the samples one: take bfloat16"
    ):
        compute_states(target, samples, (0, 1), torch.float16)
    assert bool(compute_states(target, samples, (0, 1), torch.bfloat16).aux.isfinite().all())
