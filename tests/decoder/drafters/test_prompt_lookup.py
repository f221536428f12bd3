"""Prompt lookup against a search that tries every n-gram at every place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.drafters.texts import PromptLookup, find_continuation
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.headless import simulate_prompt_lookup
from draftsmith.target.target import Target
from tests.decoder.spies import (
    KnowsTexts,
    check_simulated,
    decode_together_and_alone,
    looping_target,
)
from tests.decoder.spies import (
    repeating_requests as requests,
)

pytestmark = pytest.mark.full


def slow_continuation(ids: list[int], max_ngram: int) -> int:
    """What the paper says: the longest suffix first, its occurrences from the left."""
    for size in range(max_ngram, 0, -1):
        for start in range(len(ids) - size):
            if ids[start : start + size] == ids[len(ids) - size :]:
                return start + size
    return len(ids)


@pytest.mark.parametrize("symbols", [2, 4, 30])
@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_the_continuation_is_that_of_a_slow_search(symbols: int, max_ngram: int) -> None:
    generator = np.random.default_rng(symbols)
    found, lost = 0, 0
    for length in [*range(1, 12), 40, 200]:
        for _ in range(8):
            ids = generator.integers(0, symbols, length)
            expected = slow_continuation(ids.tolist(), max_ngram)
            assert find_continuation(ids, max_ngram) == expected, ids
            found, lost = found + (expected < length), lost + (expected == length)
    assert found > 20
    assert lost > 2


def test_of_several_occurrences_the_first_is_taken_as_in_transformers() -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = torch.Generator().manual_seed(0)
    reference = PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=3, max_length=10_000)
    for length in range(2, 60):
        ids = torch.randint(0, 4, (1, length), generator=generator)
        candidates, _ = reference.get_candidates(ids)
        start = find_continuation(ids[0].numpy())
        assert candidates[0, length:].tolist() == ids[0, start : start + 5].tolist()


def proposed(draft: Draft) -> list[list[int]]:
    return [tokens[1:count] for tokens, count in zip(draft.tokens_BN.tolist(), draft.nodes_B.tolist(), strict=True)]


@pytest.fixture(scope="module")
def target() -> Target:
    return looping_target()


class Spy(KnowsTexts, PromptLookup):
    """Checks every proposal against the slow search over a text that it keeps itself."""

    checked = drafted = 0

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        drafted = proposed(draft)
        for row, text in self.remember(state):
            start, limit = slow_continuation(text, self.max_ngram), int(state.limit_B[row])
            assert drafted[row] == text[start : start + min(self.num_speculative_tokens, limit)]
            self.checked, self.drafted = self.checked + 1, self.drafted + bool(drafted[row])
        return draft


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=8)], ids=str)
def test_in_a_batch_that_changes_texts_and_drafts_are_right(target: Target, sampling: Sampling) -> None:
    asked = [replace(r, max_new_tokens=n) for r, n in zip(requests(6), (24, 3, 12, 1, 24, 9), strict=True)]
    spy = Spy(4)
    decode_together_and_alone(target, spy, lambda: PromptLookup(4), asked, sampling, 2)
    assert spy.checked > spy.drafted > 5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=8)], ids=str)
@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_simulation_is_what_was_decoded(target: Target, sampling: Sampling, length: int) -> None:
    """At any temperature: what was proposed, what was accepted, and how often nothing was proposed."""
    found = decode_batch(target, PromptLookup(length), requests(6), sampling, rows=3).generations
    decoded = check_simulated(found, simulate_prompt_lookup(found, 5).tallies, length)
    assert decoded.accepted_K[-1 if sampling.greedy else 0] > 0
    assert any(r.drafted == 0 for g in found for r in g.rounds)
