"""Distributions and draws."""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decoder.sampling import (
    Noise,
    NoiseTable,
    Sampling,
    draw,
    draw_children,
    penalize,
    probs,
    row_key,
    top1,
    uniforms,
    without,
)
from draftsmith.errors import UserError


def processors(sampling: Sampling) -> LogitsProcessorList:
    """transformers' own, in the order in which `generate` runs them."""
    found = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(found)


def penalized_probs(logits: Tensor, ids: Tensor, sampling: Sampling) -> Tensor:
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return probs(penalize(logits, seen, sampling.repetition_penalty), sampling)


ALL = Sampling(0.8, 9, 0.9, 0.1, 1.5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(2.0),
        Sampling(1.0, top_k=4),
        Sampling(1.2, top_p=0.8),
        Sampling(0.9, min_p=0.15),
        Sampling(1.0, repetition_penalty=1.4),
        Sampling(1.0, repetition_penalty=0.6),
        Sampling(0.8, 6, 0.6),
        Sampling(1.5, top_p=0.9, min_p=0.2),
        ALL,
    ],
    ids=str,
)
def test_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 20, generator=generator)
    ids = torch.randint(20, (400, 7), generator=generator)
    logits[::5, 3] = -torch.inf
    expected = processors(sampling)(ids, logits.clone()).softmax(-1)
    torch.testing.assert_close(penalized_probs(logits, ids, sampling), expected)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(1.0, min_p=1.0), Sampling(1.0, min_p=0.5)])
def test_ties_at_an_edge_are_kept_as_transformers_keeps_them(sampling: Sampling) -> None:
    # Halving is exact in floating point: the third token has exactly half the probability of the first two.
    logits = torch.tensor([[1.0, 1.0, 0.5, 0.5, 0.25]]).log2() * torch.tensor(2.0).log()
    found = probs(logits, sampling)
    torch.testing.assert_close(found, processors(sampling)(torch.zeros(1, 0).long(), logits.clone()).softmax(-1))
    assert float(found[0, 0]) == float(found[0, 1])


def test_a_distribution_never_becomes_empty() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(2))
    for tight in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1.0, min_p=1.0), Sampling(1.0, 99)):
        found = probs(logits, tight)
        torch.testing.assert_close(found.sum(-1), torch.ones(50))
        assert torch.equal(found.argmax(-1), logits.argmax(-1))
        if tight.top_k == 99:
            assert torch.equal(found, logits.softmax(-1))
        else:
            assert bool((found.amax(-1) == 1).all())


def test_children_are_drawn_without_replacement_in_order() -> None:
    """Ordered triples against their probabilities, q(a) q(b)/(1-q(a)) ..."""
    q, rounds = torch.tensor([0.5, 0.1, 0.0, 0.3, 0.1]), 100_000
    uniform = uniforms(torch.arange(rounds), torch.zeros(rounds, dtype=torch.long), 0, 3)
    drawn = draw_children(q.expand(rounds, -1), uniform)
    assert torch.equal(drawn[:, 0], draw(q.expand(rounds, -1), uniform[:, 0])), "the first child is an ordinary draw"
    counts = Counter(map(tuple, drawn.tolist()))
    expected = {}
    for triple in itertools.permutations((0, 1, 3, 4), 3):
        chance, left = 1.0, 1.0
        for token in triple:
            chance, left = chance * float(q[token]) / left, left - float(q[token])
        expected[triple] = chance
    assert set(counts) == set(expected)
    assert sum(abs(counts[x] / rounds - expected[x]) for x in expected) / 2 < 0.01


def test_what_is_left_of_a_distribution() -> None:
    q = torch.tensor([[0.5, 0.1, 0.4], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(without(q, torch.tensor([2, 1])), torch.tensor([[5 / 6, 1 / 6, 0], [0, 0, 0]]))
    # Tiny masses are not lost, and two distributions in one tensor are drawn from as if alone.
    assert without(torch.tensor([1.0, 1e-40]), torch.tensor(0)).tolist() == [0, 1]
    uniform = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0))
    draft_probs = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(1)).softmax(-1)
    drawn = draw_children(draft_probs, uniform)
    assert torch.equal(drawn[1, 2], draw_children(draft_probs[1, 2], uniform[1, 2]))
    assert all(len(set(row)) == 3 for row in drawn.flatten(0, 1).tolist())


def test_drawing_goes_on_when_no_mass_is_left() -> None:
    """More children than the distribution has tokens: those that mean nothing come last, and the distribution knows it."""
    q = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(100, -1)
    drawn = draw_children(q, uniforms(torch.arange(100), torch.zeros(100, dtype=torch.long), 0, 4))
    assert {tuple(sorted(row)) for row in drawn[:, :2].tolist()} == {(1, 3)}
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 5
    assert not without(without(q, drawn[:, 0]), drawn[:, 1]).any()


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    counts = torch.bincount(draw(weights.expand(10_000, -1), uniform), minlength=5)
    assert counts.tolist() == [0, 7500, 0, 2500, 0]
    assert draw(weights[None], torch.tensor([0.0])).tolist() == [1]


def hashed(key: int, counter: int, stream: int, count: int) -> list[float]:
    """The hash in Python's integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    state = mix(mix(mix(key) + counter) + stream)
    return [(mix(state + index) >> 11) / 2**53 for index in range(count)]


@pytest.mark.parametrize("rows", [1, 6])
def test_numbers_made_in_time_are_those_of_the_hash(rows: int) -> None:
    keys = [row_key(0, "a"), row_key(1, "b"), 0, -1, 2**63 - 1, -(2**63)][:rows]
    table = NoiseTable(keys, [0, 5, 2**40, 17, 3, 9][:rows], torch.device("cpu"))
    for ahead in (0, 1, 40, 63):
        counters = [first + ahead for first in table.first]
        assert table.covers(keys, counters)
        for stream, count in itertools.product(range(3), [0, 1, 7, 40, 200]):
            expected = [hashed(*pair, stream, count) for pair in zip(keys, counters, strict=True)]
            for made in (table, None):
                found = Noise(torch.tensor(keys), torch.tensor(counters), made, counters[0]).draw(stream, count)
                assert found.shape == (rows, count)
                assert found.dtype == torch.float64
                assert found.tolist() == expected
    assert not table.covers(keys, [*table.first[:-1], table.first[-1] + 64])
    assert not table.covers(keys, [*table.first[:-1], table.first[-1] - 1])
    assert not table.covers([*keys[:-1], 7], table.first)


def test_noise_is_uniform_and_depends_on_every_part() -> None:
    keys = torch.arange(100_000)
    zero = torch.zeros_like(keys)
    sample = uniforms(keys, zero, 0, 4)
    assert sample.min() >= 0
    assert sample.max() < 1
    torch.testing.assert_close(sample.mean(0), torch.full((4,), 0.5, dtype=torch.float64), atol=0.005, rtol=0)
    histogram = torch.histc(sample.float(), bins=64, min=0, max=1) / sample.numel() * 64
    assert (histogram - 1).abs().max() < 0.05
    for other in (uniforms(keys + 1, zero, 0, 4), uniforms(keys, zero + 1, 0, 4), uniforms(keys, zero, 1, 4)):
        correlation = torch.corrcoef(torch.stack([sample[:, 0], other[:, 0]]))[0, 1]
        assert abs(correlation) < 0.02
    assert torch.corrcoef(sample.T).fill_diagonal_(0).abs().max() < 0.02
    assert row_key(0, "a") != row_key(1, "a") != row_key(1, "b")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        *({"temperature": bad} for bad in (float("nan"), float("inf"), 1e-40)),
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.2},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("shape", [(3, 6, 6144), (2, 128), (64, 320), (70_000,), (5, 1, 4097)], ids=str)
def test_the_largest_logit_is_found_block_by_block(shape: tuple[int, ...]) -> None:
    """Against argmax, with ties (the first one counts) and with numbers that are none."""
    logits = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(0)).float()
    values, places = top1(logits)
    assert torch.equal(places, logits.argmax(-1))
    assert torch.equal(values, logits.amax(-1))
    logits.view(-1)[-7] = torch.nan
    values, places = top1(logits)
    assert bool(values.flatten()[-1].isnan())
    assert int(places.flatten()[-1]) == shape[-1] - 7
    assert not bool(top1(torch.full(shape, -torch.inf))[0].isfinite().any())


def test_top_p_stops_where_its_mass_is_reached_exactly() -> None:
    assert probs(torch.zeros(1, 4), Sampling(1.0, top_p=0.5)).tolist() == [[0.5, 0.5, 0, 0]]
