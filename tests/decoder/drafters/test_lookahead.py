"""Lookahead decoding against a dense reimplementation of the paper's rule: one plain pass of the target for every guess."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft, TargetAlone
from draftsmith.decoder.drafters.lookahead import Lookahead, Pool
from draftsmith.decoder.sampling import Sampling, probs
from draftsmith.errors import UserError
from draftsmith.target.target import Target
from tests.decoder.spies import KnowsTexts, decode_together_and_alone, looping_target, repeating_requests
from tests.models import tiny_model

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def target() -> Target:
    return looping_target()


def most_likely(target: Target, ids: list[int]) -> int:
    """The target's next token, in one plain causal pass."""
    output = target.model(torch.tensor([ids], device=target.device))
    return int(output.logits[0, -1].argmax())


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """All paths of a row's draft down to each of its tokens."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(draft.nodes_B[row])):
        found[node] = (*found[int(draft.parents_BN[row, node])], int(draft.tokens_BN[row, node]))
    return {path for path in found.values() if path}


class Spy(KnowsTexts, Lookahead):
    """Checks every draft and every window against the rule, for texts that it keeps itself.

    window[r][c] and pool of each row are the oracle's own; only the first window, which is drawn, is taken over.
    """

    target: Target
    checked = drafted = 0

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self.oracle: list[tuple[list[list[int]], dict[int, list[tuple[int, ...]]]] | None] = [None] * rows

    def admit(self, prompts) -> None:  # type: ignore[no-untyped-def]
        super().admit(prompts)
        for row in prompts.rows_b.tolist():
            self.oracle[row] = None

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.oracle = [self.oracle[row] for row in rows.tolist()]

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        assert draft.tokens_BN.shape[1] <= self.max_nodes
        assert int(draft.depth_BN.max()) <= self.num_speculative_tokens
        for row, text in self.remember(state):
            if self.oracle[row] is None:
                first = [list(guesses) for guesses in self._requests[row].rows]
                assert {token for guesses in first for token in guesses} <= set(text)
                self.oracle[row] = (first, {})
            kept = self.oracle[row]
            assert kept is not None
            window, pool = kept
            window[0][0] = text[-1]
            assert self._requests[row].rows == window
            most = min(self.N - 1, int(state.limit_B[row]))
            guesses = [ngram[:most] for ngram in pool.get(text[-1], [])]
            assert paths(draft, row) == {ngram[:n] for ngram in guesses for n in range(1, most + 1)}
            self.checked, self.drafted = self.checked + 1, self.drafted + bool(guesses)
            self._step(text, window, pool)
        return draft

    def _step(self, text: list[int], window: list[list[int]], pool: dict[int, list[tuple[int, ...]]]) -> None:
        """The next token of column c follows the text, row 0 up to c, and the column below it."""
        new = []
        for c in range(self.W):
            seen = [*text, *window[0][1 : c + 1], *(window[r][c] for r in range(1, self.N - 1))]
            new.append(most_likely(self.target, seen))
        for c in range(self.W):
            first, *rest = [*(window[r][c] for r in range(self.N - 1)), new[c]]
            known = pool.setdefault(first, [])
            if tuple(rest) in known:
                known.remove(tuple(rest))
            pool[first] = [*known, tuple(rest)][-self.G :]
        window[:] = [*window[1:], new]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=8)], ids=str)
@pytest.mark.parametrize(
    ("W", "N", "G"),
    [
        (4, 3, 3),
        pytest.param(5, 4, 2, marks=pytest.mark.slow),
        (1, 3, 2),
        (1, 2, 1),
        pytest.param(6, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_every_draft_and_window_is_that_of_the_rule(target: Target, sampling: Sampling, W: int, N: int, G: int) -> None:
    spy = Spy(W, N, G)
    spy.target = target
    asked = [replace(r, max_new_tokens=n) for r, n in zip(repeating_requests(4), (20, 3, 12, 16), strict=True)]
    found = decode_together_and_alone(target, spy, lambda: Lookahead(W, N, G), asked, sampling, 2)
    assert spy.checked > 10
    assert spy.drafted > (0 if W == 1 else 3)
    for g in found:  # nothing of the window, which lies behind the draft, is ever accepted
        assert all(round_.accepted <= len(round_.levels) for round_ in g.rounds if round_.levels)
        assert all(round_.accepted == 0 for round_ in g.rounds if not round_.drafted)
        assert [b.root - a.root - 1 for a, b in pairwise(g.rounds)] == [r.accepted for r in g.rounds[:-1]]
    if sampling.greedy and W > 1:
        assert any(round_.accepted for g in found for round_ in g.rounds)
        assert max(round_.accepted for g in found for round_ in g.rounds) <= N - 1


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_sliding_windows_see_the_guesses_at_their_positions(kind: str) -> None:
    target = Target(tiny_model(kind, initializer_range=0.06), path="tiny", fingerprint="0")
    spy = Spy(4, 3, 3)
    spy.target = target
    asked = repeating_requests(2, 10)
    found = decode_batch(target, spy, asked, Sampling()).generations
    plain = decode_batch(target, TargetAlone(), asked, Sampling()).generations
    assert [g.output_ids for g in found] == [g.output_ids for g in plain]
    assert spy.checked > 5


@pytest.mark.slow
def test_sampled_texts_follow_the_distribution_of_the_target() -> None:
    """Frequencies of whole answers against the products of the target's probabilities, where guesses are accepted often."""
    small = Target(tiny_model("llama", vocab_size=8, eos_token_id=None), path="tiny", fingerprint="0")
    sampling, prompt, new, rows = Sampling(1.0, top_k=2), (3, 4, 5, 3, 4), 5, 3000
    asked = [Request.seeded(f"{i}", "a", prompt, new, 0) for i in range(rows)]
    found = decode_batch(small, Lookahead(3, 3, 4), asked, sampling, rows=500).generations
    assert sum(r.accepted for g in found for r in g.rounds) > rows / 4
    counts: dict[tuple[int, ...], int] = {}
    for g in found:
        counts[tuple(g.output_ids)] = counts.get(tuple(g.output_ids), 0) + 1
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        texts = [*expected]
        with torch.no_grad():
            logits = small.model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1]
        table = probs(logits, sampling).tolist()
        pairs = product(zip(texts, table, strict=True), range(8))
        expected = {(*text, token): expected[text] * p[token] for (text, p), token in pairs if p[token] > 0}
    assert set(counts) <= set(expected)
    chi2 = sum((counts.get(text, 0) - rows * p) ** 2 / (rows * p) for text, p in expected.items() if rows * p > 5)
    degrees = sum(rows * p > 5 for p in expected.values())
    assert degrees > 8
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5


def test_the_pool_keeps_the_latest_ngrams_and_each_path_once() -> None:
    pool = Pool(2)
    for ngram in [(1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 5, 6), (2, 7, 7)]:
        pool.add(ngram)
    branches = pool.draft(1, 2)  # (1, 2, 4) was added the longest time ago
    assert list(zip(branches.tokens, branches.parents, strict=True)) == [(2, 0), (3, 1), (5, 0), (6, 3)]
    assert pool.draft(1, 1).tokens == [2, 5]
    assert pool.draft(3, 2).tokens == []


def test_a_window_beyond_the_context_is_refused(target: Target) -> None:
    request = replace(repeating_requests(1)[0], max_new_tokens=256 - 10 - 5)
    with pytest.raises(UserError, match="6 drafted"):
        decode_batch(target, Lookahead(5, 4, 2), [request], Sampling())
