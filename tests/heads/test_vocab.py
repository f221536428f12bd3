"""Counting supervised tokens and choosing those a head can draft."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads import vocab
from draftsmith.heads.vocab import (
    Coverage,
    choose_draft_vocab,
    count_by_slice,
    count_tokens,
    coverage_warnings,
    measure_coverage,
)


@dataclass(frozen=True)
class Sample:
    ids: Tensor
    mask: Tensor
    slice: str = "chat"


def samples(seed: int = 0, count: int = 30) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = (40 * torch.rand(20, generator=generator) ** 2).long()
        made.append(Sample(ids, torch.rand(20, generator=generator) < 0.5, "chat" if i % 3 else "code"))
    return made


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_counts_supervised_tokens_only(chunk, monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_TOKENS", chunk)
    expected = Counter(int(x) for s in samples() for x, m in zip(s.ids, s.mask, strict=True) if m)
    counts = count_tokens(samples(), 50)
    assert counts.tolist() == [expected[i] for i in range(50)]
    by_slice = count_by_slice(samples(), 50)
    assert list(by_slice) == ["chat", "code"]
    assert torch.equal(sum(by_slice.values()), counts)


def test_no_sample_gives_zeros():
    assert count_tokens([], 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("counts", "size", "always", "expected"),
    [
        ([5, 1, 9, 1, 1], 2, [], [0, 2]),
        ([5, 1, 9, 1, 1], 4, [], [0, 1, 2, 3]),  # ties: the lower id
        ([5, 1, 9, 1, 1], 3, [4], [0, 2, 4]),  # always in, whatever its count
        ([5, 1, 9, 1, 1], 2, [3, 4, 3], [3, 4]),
        ([0, 0, 0], 2, [], [0, 1]),
        ([1, 2, 3], 3, [], [0, 1, 2]),
    ],
)
def test_choice(counts, size, always, expected):
    found = choose_draft_vocab(torch.tensor(counts), size, always)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_ties_go_to_the_lower_id_in_a_large_vocabulary_too():
    counts = torch.randint(0, 3, (20_000,), generator=torch.Generator().manual_seed(0))
    expected = sorted(sorted(range(20_000), key=lambda i: (-int(counts[i]), i))[:9_000])
    assert choose_draft_vocab(counts, 9_000).tolist() == expected


def test_coverage_is_that_of_answers_outside_the_sample_and_so_are_its_warnings():
    """What was chosen from answers covers them, whatever it covers of others."""

    def sample(ids: list[int], slice: str) -> Sample:
        return Sample(torch.tensor(ids), torch.ones(len(ids)), slice)

    training = [sample([0] * 9 + [1], "chat")]
    heldout = [sample([0] * 20, "chat"), sample([0, 2], "code")]
    covered = measure_coverage(torch.tensor([0, 1]), training, heldout, 3)
    assert covered == Coverage(1.0, 21 / 22, {"chat": 1.0, "code": 0.5})
    (warning,) = coverage_warnings(covered, 2, "raise it")
    assert "only 50.0% of the tokens in the held-out answers of slice code" in warning
    low = coverage_warnings(replace(covered, heldout=0.94), 2, "raise it")
    assert len(low) == 2
    assert len(coverage_warnings(replace(covered, heldout=0.9496), 2, "raise it")) == 1, "which is shown as 95.0%"
    assert "94.0% of the tokens in the held-out answers:" in low[0]
    nothing = measure_coverage(torch.tensor([0]), training, [], 3)
    assert nothing == Coverage(0.9, 1.0, {})
    assert coverage_warnings(nothing, 1, "raise it") == []


@pytest.mark.parametrize(
    ("size", "always", "words"),
    [(6, [], "the target has 5 tokens"), (1, [0, 1], "special and end tokens"), (3, [7], "do not fit")],
)
def test_mistakes(size, always, words):
    with pytest.raises(UserError, match=words):
        choose_draft_vocab(torch.ones(5, dtype=torch.int64), size, always)


@pytest.mark.parametrize("odd", [5, 9, -1])
def test_ids_of_another_tokenizer(odd):
    ids, mask = torch.tensor([1, odd, 4]), torch.ones(3).bool()
    with pytest.raises(UserError, match=f"token id {odd}, but the target has 5 tokens"):
        count_tokens([Sample(ids, mask)], 5)
