import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data import batch as batches
from draftsmith.data.batch import (
    CHUNK_BATCHES,
    WINDOW_SHARDS,
    Features,
    _best_fit,
    collate,
    plan_batches,
    plan_chunks,
    plan_passes,
)
from draftsmith.errors import UserError

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=120)


def features(length, number):
    """A document whose every value names it and its place."""
    place = torch.arange(length)
    return Features(
        ids=place + 1000 * number,
        mask=place % 3 == number % 3,
        aux=(place[:, None] + 1000.0 * number + torch.arange(6) / 10).to(torch.bfloat16),
        last=place[:, None] - 1000.0 * number + torch.arange(2),
        top1=(place + number).to(torch.int32),
        logsumexp=place.float() / (number + 1),
        sample_id=str(number),
        slice="s",
    )


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, rows=st.integers(1, 5), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_plan_holds_every_sample_once_within_its_limits(lengths, rows, seed, epoch):
    plan = plan_batches(lengths, row_tokens=40, rows=rows, seed=seed, epoch=epoch)
    seen = [sample for batch in plan for row in batch for sample in row]
    assert sorted(seen) == list(range(len(lengths)))
    assert all(row and sum(lengths[sample] for sample in row) <= 40 for batch in plan for row in batch)
    assert all(len(batch) == rows for batch in plan[:-1])
    assert all(1 <= len(batch) <= rows for batch in plan)
    assert plan == plan_batches(lengths, row_tokens=40, rows=rows, seed=seed, epoch=epoch)
    # Best fit opens a row only for a sample that no open row can take, so at most one row is half empty.
    filled = [sum(lengths[sample] for sample in row) for batch in plan for row in batch]
    assert sum(fill * 2 <= 40 for fill in filled) <= 1


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS)
def test_best_fit_against_looking_at_every_row(lengths):
    """The slow oracle: of all rows with enough space, the one with least of it, the first of equals."""
    rows: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        space = [(40 - sum(lengths[i] for i in row), n) for n, row in enumerate(rows)]
        fitting = [(free, n) for free, n in space if free >= lengths[sample]]
        if fitting:
            rows[min(fitting)[1]].append(sample)
        else:
            rows.append([sample])
    assert _best_fit(range(len(lengths)), lengths, 40) == rows


def test_epochs_and_seeds_differ_and_order_is_random():
    lengths = [1 + i % 37 for i in range(3000)]
    plans = {
        key: plan_batches(lengths, row_tokens=64, rows=4, seed=key[0], epoch=key[1])
        for key in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    flat = [str(plan) for plan in plans.values()]
    assert len(set(flat)) == 4
    for plan in plans.values():
        assert sorted(sample for batch in plan for row in batch for sample in row) == list(range(3000))
    # The long samples of a window do not come first: batches early and late have like mean lengths.
    means = [sum(lengths[s] for row in batch for s in row) / sum(len(row) for row in batch) for batch in plans[0, 0]]
    early, late = means[: len(means) // 2], means[len(means) // 2 :]
    assert abs(sum(early) / len(early) - sum(late) / len(late)) < 3
    # Padding is small.
    used, rows = sum(lengths), sum(len(batch) for batch in plans[0, 0])
    assert used / (rows * 64) > 0.97


@pytest.mark.parametrize("count", [WINDOW_SHARDS, WINDOW_SHARDS + 1, 200])
def test_files_are_shuffled_and_samples_in_windows_of_them(count):
    """Few files give the order that there is without any; more come in windows of one size."""
    lengths = [1 + i % 37 for i in range(4 * count)]
    windows = -(-count // WINDOW_SHARDS)

    def order(epoch, shards):
        plan = plan_batches(lengths, row_tokens=64, rows=2, seed=1, epoch=epoch, shards=shards)
        return [sample for batch in plan for row in batch for sample in row]

    file = torch.arange(4 * count) // 4
    first, second = order(0, file), order(1, file)
    assert first == order(0, 7 * file), "numbers of files only tell them apart"
    assert (first == order(0, None)) == (windows == 1)
    assert sorted(first) == sorted(second) == list(range(4 * count))
    last = {sample // 4: place for place, sample in enumerate(first)}
    stretches = [last[sample // 4] - place for place, sample in enumerate(first)]
    assert max(stretches) < 4 * -(-count // windows)
    assert max(stretches) > 4 * (count // windows) // 2, "the samples of a window are mixed"
    if windows > 1:
        assert {sample // 4 for sample in first[:60]} != {sample // 4 for sample in second[:60]}


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 2049, 6145])
def test_windows_are_of_one_size(count, monkeypatch):
    """A last one of a single sample would be a batch, and so an optimizer step, of that alone."""
    seen = []
    monkeypatch.setattr(batches, "_best_fit", lambda samples, *rest: seen.append(len(samples)) or [list(samples)])
    plan_batches([1] * count, row_tokens=50, rows=2, seed=0, epoch=0)
    assert sum(seen) == count
    assert max(seen, default=0) <= 1024
    assert max(seen, default=0) - min(seen, default=0) <= 1


def test_sample_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="Sample number 1 has 41 tokens and does not fit a row of 40"):
        plan_batches([3, 41], row_tokens=40, rows=2, seed=0, epoch=0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4), spare=st.integers(0, 9)
)
def test_collate_against_one_token_at_a_time(rows, spare):
    """The slow oracle: every cell of the batch is looked up in its document, or is padding."""
    documents = iter(range(100))
    laid = [[features(length, next(documents)) for length in row] for row in rows]
    row_tokens = max(sum(row) for row in rows) + spare
    seeds = [[100 * b + n + 1 for n in range(len(row))] for b, row in enumerate(laid)]
    batch = collate(laid, row_tokens, seeds=seeds)
    assert batch.ids.shape == (len(rows), row_tokens)
    assert not collate(laid, row_tokens).seeds.any()
    for b, row in enumerate(laid):
        cells = [(n, t) for n, document in enumerate(row) for t in range(len(document.ids))]
        for place in range(row_tokens):
            if place >= len(cells):
                assert batch.document[b, place] == -1
                assert not batch.mask[b, place]
                assert not batch.seeds[b, place]
                for name in ("ids", "position", "aux", "last", "top1", "logsumexp"):
                    assert not getattr(batch, name)[b, place].any()
                continue
            number, t = cells[place]
            assert (batch.document[b, place], batch.position[b, place]) == (number, t)
            assert batch.seeds[b, place] == seeds[b][number]
            for name in ("ids", "mask", "aux", "last", "top1", "logsumexp"):
                assert getattr(batch, name)[b, place].equal(
                    getattr(row[number], name)[t].to(getattr(batch, name).dtype)
                ), name


def test_collate_types_and_length():
    rows = [[features(5, 0), features(4, 1)], [features(3, 2)]]
    batch = collate(rows, 16)
    assert batch.ids.shape == (2, 16)
    assert batch.aux.shape == (2, 16, 6)
    assert (batch.aux.dtype, batch.last.dtype) == (torch.bfloat16, torch.float32)
    assert (batch.top1.dtype, batch.logsumexp.dtype) == (torch.int64, torch.float32)
    assert (batch.ids.dtype, batch.mask.dtype, batch.document.dtype) == (torch.int64, torch.bool, torch.int64)
    assert collate(rows, 64).ids.shape == (2, 64)
    with pytest.raises(AssertionError, match="a row of 9 tokens in a batch of 8"):
        collate(rows, 8)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, limit=st.integers(1, 90))
def test_passes_against_one_sample_at_a_time(lengths, limit):
    """The slow oracle: longest first, and a new batch where one more row of its longest would be too much."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * max(lengths[j] for j in batches[-1]) <= limit:
            batches[-1].append(i)
        else:
            batches.append([i])
    assert plan_passes(lengths, limit) == [tuple(batch) for batch in batches]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, limit=st.integers(1, 30))
def test_chunks_end_where_they_hold_enough_tokens(lengths, limit):
    ends, tokens = [], 0
    for i, length in enumerate(lengths):
        tokens += length
        if tokens >= CHUNK_BATCHES * limit or i == len(lengths) - 1:
            ends.append(i + 1)
            tokens = 0
    chunks = plan_chunks(lengths, limit)
    assert [chunk.end for chunk in chunks] == ends
    assert [chunk.start for chunk in chunks] == [0, *ends][: len(ends)]
    for chunk in chunks:
        own = plan_passes(lengths[chunk.start : chunk.end], limit)
        assert chunk.batches == tuple(tuple(chunk.start + i for i in batch) for batch in own)
