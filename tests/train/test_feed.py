"""The feed against batches that are collated one by one, and its memory on a pretended GPU."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.batch import TrainBatch, collate
from draftsmith.data.features import extract as extraction
from draftsmith.data.features.extract import OnlineSource, extract
from draftsmith.data.features.store import FeatureSource, FeatureStore
from draftsmith.data.memory import map_tensors, tensors_of
from draftsmith.decoder.sampling import row_key
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.target import Target
from draftsmith.train.feed import Feed, read_batch
from draftsmith.train.schedule import Micro, TrainData
from tests.gpu.support import LAYERS, make_head, make_target, make_texts
from tests.pretended_gpu.cuda import pretended_gpu
from tests.pretended_gpu.order import Event, RaceError, Stream
from tests.pretended_gpu.tensor import GpuTensor

INDEX = [3, 9, 4, 0, 7, 1]
MICROS = [
    Micro(((2, 0), (1,)), True),
    Micro(((4,), (3, 5)), True),
    Micro(((5,), (0,)), True),
    Micro(((1, 2), (3,)), False),
]
TOKENS = 50


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return extract(make_target("cpu"), make_texts(), tmp_path_factory.mktemp("features"), layer_ids=LAYERS)


def make_feed(source: FeatureSource, target: Target, workers: int, method: str = "dflash") -> Feed:
    spec = TrainSpec(row_tokens=TOKENS, rows=2, accumulation=2, workers=workers)
    head = make_head(target, method).train()
    feed = Feed(TrainData(source, INDEX, []), head, spec, target.device)
    head.eval()  # as an evaluation does while threads read ahead
    return feed


def batches(feed: Feed, seed: int) -> Iterator[TrainBatch]:
    for window in feed.windows((micro, seed) for micro in MICROS):
        assert len(window) == 2
        for fed in window:
            yield feed.batch(fed)


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def slowly(store: FeatureStore, head: DraftHead, seed: int) -> Iterator[TrainBatch]:
    for micro in MICROS:
        rows = [[store.get(INDEX[i], head.reads.layer_ids) for i in row] for row in micro.rows]
        seeds = [[row_key(seed, "train", INDEX[i]) for i in row] for row in micro.rows]
        batch = collate(rows, TOKENS, seeds=seeds)
        yield replace(batch, plan=head.plan(batch, head.trains.steps))


def assert_equal(ours: TrainBatch, theirs: TrainBatch) -> None:
    assert ours.plan.made_for == theirs.plan.made_for
    ours, theirs = (replace(x, plan=replace(x.plan, loss=None, queries=())) for x in (ours, theirs))
    for mine, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine.cpu(), other)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_those_that_are_read_one_by_one(workers: int, store: FeatureStore) -> None:
    """Over several epochs, which use the same memory: what lies behind the documents is empty again."""
    target = make_target("cpu")
    feed, head = make_feed(store, target, workers), make_head(target, "dflash").train()
    for seed in (6, 7):
        assert not reading()
        for ours, theirs in zip(batches(feed, seed), slowly(store, head, seed), strict=True):
            assert_equal(ours, theirs)
    assert not feed._unsent, "what was read is let go of"
    counted = [
        (fed.counts, fed.rows, fed.tokens) for window in feed.windows((micro, 6) for micro in MICROS) for fed in window
    ]
    assert [counts for counts, _, _ in counted] == [micro.counts for micro in MICROS]
    whole = [*slowly(store, head, 6)]
    assert [tokens for _, _, tokens in counted] == [int((batch.document >= 0).sum()) for batch in whole]
    first = next(iter(head.eval().supervised(whole[0])))
    assert counted[0][1] == int(first.sum()), "all that count, not those that are drawn"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_a_gpu_is_one_copy_of_its_bytes_out_of_pinned_memory(workers: int, store: FeatureStore) -> None:
    head = make_head(make_target("cpu"), "dflash").train()
    with pretended_gpu() as gpu:
        feed = make_feed(store, make_target(), workers)
        gpu.counts.clear()
        sizes = []
        for ours, theirs in zip(batches(feed, 6), slowly(store, head, 6), strict=True):
            waits = list(gpu.counts.waits)
            assert_equal(ours, theirs)
            gpu.counts.waits = waits
            sizes.append(ours.ids.untyped_storage().nbytes())
            assert all(
                x.untyped_storage().data_ptr() == ours.ids.untyped_storage().data_ptr() for x in tensors_of(ours)
            )
        uploads = [copy for copy in gpu.counts.copies if copy.way.startswith("host to device")]
        assert {copy.way for copy in uploads} == {"host to device, pinned"}
        assert sorted(copy.size for copy in uploads) == sorted(sizes)
        assert {wait.place.function for wait in gpu.counts.waits} <= {"Buffer.take"}


def test_the_next_batch_is_copied_while_a_step_computes(store: FeatureStore) -> None:
    with pretended_gpu():
        feed = make_feed(store, make_target(), 1)
        for window in feed.windows((micro, 6) for micro in MICROS):
            for fed in window:
                feed.batch(fed)
                if feed._unsent or feed._sent:
                    feed._sent[0].result(timeout=10)


LEFT_OUT: dict[str, tuple[Any, str, Any, type[Exception], str]] = {
    "nothing": (Event, "query", Event.query, RuntimeError, ""),
    "the event behind the copy": (Event, "query", lambda self: True, RaceError, "the host writes pinned memory"),
    "the wait for the copy": (Stream, "wait_event", lambda self, event: None, RaceError, "cuda:0 reads memory"),
    "the allocator's note": (GpuTensor, "record_stream", lambda self, stream: None, AssertionError, "record_stream"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", LEFT_OUT)
def test_memory_is_used_in_order(what: str, workers: int, store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the pretended GPU sees it where something of the order is left out."""
    owner, name, without, error, message = LEFT_OUT[what]
    monkeypatch.setattr(owner, name, without)
    with pytest.raises(error, match=message) if message else nullcontext(), pretended_gpu():
        feed = make_feed(store, make_target(), workers)
        for seed in (6, 7):
            for batch in batches(feed, seed):
                batch.last * 2


def test_a_step_that_is_left_out_leaves_its_batches_behind(store: FeatureStore) -> None:
    head = make_head(make_target("cpu"), "dflash").train()
    with pretended_gpu():
        feed = make_feed(store, make_target(), 2)
        for number, window in enumerate(feed.windows((micro, 6) for micro in MICROS)):
            if number:
                found = [feed.batch(fed) for fed in window]
        for ours, theirs in zip(found, [*slowly(store, head, 6)][2:], strict=True):
            assert_equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_is_one_sentence_and_threads_end(workers: int, tmp_path: Path) -> None:
    target = make_target("cpu")
    extract(target, make_texts(), tmp_path, layer_ids=LAYERS)
    shard = next(tmp_path.glob("shard-*"))
    content = shard.read_bytes()
    half = len(content) // 2
    shard.write_bytes(content[:half] + bytes(byte ^ 1 for byte in content[half:]))
    feed = make_feed(FeatureStore(tmp_path), target, workers)
    with pytest.raises(UserError, match=r"^The feature shard .* is corrupt"):
        [*batches(feed, 6)]
    assert not reading()


def test_threads_end_where_training_does(store: FeatureStore) -> None:
    windows = make_feed(store, make_target("cpu"), 3).windows((micro, 6) for micro in MICROS)
    next(windows)
    assert reading()
    windows.close()
    assert not reading()


def test_states_that_are_computed_online_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward for a micro-batch, or as many as its tokens need."""
    samples, most = make_texts(), 40
    forwards = []
    real = extraction.compute_states

    def counted(*given: Any) -> Any:
        forwards.append([len(sample.ids) for sample in given[1]])
        return real(*given)

    monkeypatch.setattr(extraction, "compute_states", counted)
    here = make_target("cpu")
    near = make_feed(OnlineSource(here, samples, LAYERS), here, 0)
    expected = [map_tensors(torch.clone, batch) for batch in batches(near, 6)]
    with pretended_gpu() as gpu:
        target = make_target()
        for batch_tokens, workers in ((1000, 1), (2 * most, 0)):
            feed = make_feed(OnlineSource(target, samples, LAYERS, batch_tokens=batch_tokens), target, workers)
            gpu.counts.clear()
            forwards.clear()
            tokens = []
            for ours, theirs in zip(batches(feed, 6), expected, strict=True):
                tokens.append(int(sum(len(samples[INDEX[i]].ids) for row in MICROS[len(tokens)].rows for i in row)))
                assert ours.aux.is_cuda
                copies, waits = list(gpu.counts.copies), list(gpu.counts.waits)
                for name in ("ids", "document", "aux", "last", "top1", "logsumexp"):
                    torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=1e-4, atol=1e-4)
                gpu.counts.copies, gpu.counts.waits = copies, waits
            assert len(forwards) == sum(ceil(count / batch_tokens) for count in tokens)
            assert not [copy for copy in gpu.counts.copies if copy.way.startswith("device to host")]
            assert [wait.place.function for wait in gpu.counts.waits] == ["Target.forward"] * len(forwards), (
                "of its mask"
            )


@pytest.mark.parametrize("workers", [0, 1])
def test_online_batches_lie_on_the_device_of_the_training(workers: int) -> None:
    samples, here = make_texts(), make_target("cpu")
    near = make_feed(OnlineSource(here, samples, LAYERS), here, 0)
    expected = [map_tensors(torch.clone, batch) for batch in batches(near, 6)]
    with pretended_gpu(2):
        target = make_target("cuda:0")
        feed = make_feed(OnlineSource(target, samples, LAYERS), make_target("cuda:1"), workers)
        for ours, theirs in zip(batches(feed, 6), expected, strict=True):
            assert {x.device for x in tensors_of(ours)} == {torch.device("cuda:1")}
            for name in ("aux", "logsumexp"):
                torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=1e-4, atol=1e-4)


def test_a_batch_is_read_at_once_from_a_store_and_online(store: FeatureStore) -> None:
    target, rows = make_target("cpu"), [[3, 9], [4]]
    stored = read_batch(store, rows, (6, 2), TOKENS)
    assert_plain(stored, collate([[store.get(i, (6, 2)) for i in row] for row in rows], TOKENS))
    online = read_batch(OnlineSource(target, make_texts(), LAYERS), rows, (6, 2), TOKENS)
    for name in ("ids", "mask", "document", "top1"):
        assert torch.equal(getattr(online, name), getattr(stored, name))
    torch.testing.assert_close(online.aux, stored.aux, rtol=1e-4, atol=1e-4)


def assert_plain(ours: TrainBatch, theirs: TrainBatch) -> None:
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True))
