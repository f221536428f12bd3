"""The recursion against plain loops; tests/decoder/test_penalty.py holds it against every text and every path of a toy."""

import numpy as np
import pytest
import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import Generation, Request, Round, Tally, tally_generation, total
from draftsmith.eval.simulate.acceptance import Answer, expected_tallies, find_answers, simulate
from draftsmith.target.target import TargetHead


def test_decoded_tally_counts_what_was_emitted() -> None:
    request = Request("a", "s", (1,), 10)
    # 7 tokens: rounds accept 2, 0, then 1 of which the last token is EOS (3 drafted, 1 could still be emitted).
    generation = Generation(request, [5, 6, 7, 8, 9, 2], "eos", [Round(0, 3, 2), Round(3, 3, 0), Round(4, 3, 1)])
    tally = tally_generation(generation, 3)
    assert (tally.tokens, tally.rounds) == (5, 3)
    assert tally.drafted == 3 + 2 + 1
    assert tally.accepted_K.tolist() == [2, 1, 0]
    assert tally.reached_K.tolist() == [3, 1, 1]
    assert total([tally, tally], 3).tau == tally.tau == pytest.approx(5 / 3)


def make_batch(
    ids: list[int], mask: list[int], document: list[int], last: torch.Tensor, head: TargetHead
) -> TrainBatch:
    logits = head.logits(last)
    return TrainBatch(
        torch.tensor([ids]),
        torch.tensor([mask]).bool(),
        torch.tensor([document]),
        torch.arange(len(ids))[None],
        torch.zeros(1, len(ids), 4),
        last[None],
        logits.argmax(-1)[None],
        logits.logsumexp(-1)[None],
    )


def test_answers_are_found_at_document_borders() -> None:
    head = TargetHead(torch.eye(4))
    mask = [0, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    document = [0, 0, 0, 0, 1, 1, 1, 2, 2, -1]
    batch = make_batch([0] * 10, mask, document, torch.zeros(10, 4), head)
    # Document 2 opens with a supervised token: there is no prompt that its first token could come from.
    assert find_answers(batch) == [Answer(0, 0, 1, 3), Answer(0, 1, 5, 6)]


def plain_tally(c_TK: np.ndarray, tokens: int, proposed: list[int]) -> Tally:
    """The rounds of one answer: from every root that is reached, draft by draft, until one is refused or none is left."""
    reach, k_most = {0: 1.0}, c_TK.shape[1]
    rounds = drafted = 0.0
    accepted, reached = np.zeros(k_most), np.zeros(k_most)
    for root in range(tokens):
        here = reach.get(root, 0.0)
        depth = 0
        while depth < min(k_most, tokens - root) and not np.isnan(c_TK[root, depth]):
            depth += 1
        rounds += here
        drafted += here * sum(proposed[:depth])
        for k in range(depth):
            reached[k] += here
            accepted[k] += here * c_TK[root, k]
            reach[root + k + 1] = reach.get(root + k + 1, 0.0) + here * (1 - c_TK[root, k])
            here *= c_TK[root, k]
        end = min(root + depth + 1, tokens)
        reach[end] = reach.get(end, 0.0) + here
    return Tally(1, float(tokens), rounds, drafted, accepted, reached)


@pytest.mark.parametrize("levels", [None, (2, 3, 1)])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_answers_of_all_lengths_at_once(num_drafts: int, levels: tuple[int, ...] | None) -> None:
    """Some rounds draft less than asked for, and some nothing at all."""
    random = np.random.default_rng(num_drafts)
    tokens = np.array([4, 0, 9, 1, 6])
    c = random.random((5, 9, num_drafts))
    c[random.random(c.shape) < 0.2] = np.nan
    found = expected_tallies(c, tokens, num_drafts, None if levels is None else levels[:num_drafts])
    for tally, c_TK, count in zip(found, c, tokens.tolist(), strict=True):
        expected = plain_tally(c_TK, count, list(levels or (1,) * 3))
        for name in ("answers", "tokens", "rounds", "drafted"):
            assert getattr(tally, name) == pytest.approx(getattr(expected, name), abs=1e-12)
        np.testing.assert_allclose(tally.accepted_K, expected.accepted_K, atol=1e-12)
        np.testing.assert_allclose(tally.reached_K, expected.reached_K, atol=1e-12)


def test_each_answer_is_simulated_from_its_own_rows() -> None:
    c_BLK = torch.rand(2, 12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answers = [Answer(0, 0, 2, 6), Answer(0, 1, 9, 9), Answer(1, 0, 1, 11)]
    found = simulate(c_BLK, answers, 2)
    for tally, answer in zip(found, answers, strict=True):
        # The first token came from the prefill; the row before a root drafts from it.
        rows = c_BLK[answer.row, answer.first - 1 : answer.last - 1, :2].numpy()
        expected = plain_tally(rows, answer.last - answer.first, [1, 1])
        assert (tally.rounds, tally.tokens) == pytest.approx((expected.rounds, expected.tokens))
        np.testing.assert_allclose(tally.accepted_K, expected.accepted_K, atol=1e-12)
    assert simulate(c_BLK, [], 2) == []
    assert simulate(c_BLK, answers[1:2], 2)[0].rounds == 0
