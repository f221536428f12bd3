"""Drafters that read texts: prompt lookup against a search that tries every n-gram at every place; each in a changing batch, and
against its simulation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.decoder.answers import Generation
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, TargetAlone
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixDecoding, SuffixRules, speculate
from draftsmith.decoder.drafters.texts import Branches, PromptLookup, TextDrafter, find_continuation
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.texts import Simulation, simulate_prompt_lookup, simulate_suffix_decoding
from draftsmith.target.target import Target
from tests.decoder.spies import (
    KnowsTexts,
    check_simulated,
    decode_together_and_alone,
    looping_target,
    repeating_requests,
)
from tests.models import tiny_model

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


class Spy(KnowsTexts):
    """Checks that every proposal is the expected one for a text that it keeps itself."""

    checked = drafted = 0

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        for row, text in self.remember(state):
            expected = self.expected(text, min(self.num_speculative_tokens, int(state.limit_B[row])))
            count = int(draft.nodes_B[row])
            assert draft.tokens_BN[row, 1:count].tolist() == expected.tokens
            assert draft.parents_BN[row, 1:count].tolist() == expected.parents
            self.checked, self.drafted = self.checked + 1, self.drafted + (count > 1)
        return draft


class LookupSpy(Spy, PromptLookup):
    def expected(self, text: list[int], most: int) -> Branches:
        start = slow_continuation(text, self.max_ngram)
        return Branches.chain(text[start : start + most])


class SuffixSpy(Spy, SuffixDecoding):
    def expected(self, text: list[int], most: int) -> Branches:
        return speculate(np.array(text), most, self.rules, self.outputs)


WAYS = {
    "prompt lookup": None,
    "suffix chain": SuffixRules(),
    "suffix tree": SuffixRules(alpha=3, tree=True, min_token_prob=0.05),
}
EVERY_WAY = pytest.mark.parametrize("rules", WAYS.values(), ids=WAYS)
SAMPLINGS = pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=8)], ids=str)


def make(rules: SuffixRules | None, length: int, outputs: Outputs, spy: bool = False) -> TextDrafter:
    if rules is None:
        return (LookupSpy if spy else PromptLookup)(length)
    return (SuffixSpy if spy else SuffixDecoding)(length, rules, outputs)


def simulate(rules: SuffixRules | None, found: Sequence[Generation], outputs: Outputs) -> Simulation:
    return simulate_prompt_lookup(found, 5) if rules is None else simulate_suffix_decoding(found, 5, rules, outputs)


@pytest.fixture(scope="module")
def target() -> Target:
    return looping_target()


def earlier(target: Target, sampling: Sampling) -> Outputs:
    """The target's answers to two of the prompts."""
    answers = decode_batch(target, TargetAlone(), repeating_requests(2), sampling).generations
    return Outputs([answer.output_ids for answer in answers])


@EVERY_WAY
@SAMPLINGS
def test_in_a_batch_that_changes_texts_and_drafts_are_right(
    target: Target, sampling: Sampling, rules: SuffixRules | None
) -> None:
    limits = zip(repeating_requests(6), (24, 3, 12, 1, 24, 9), strict=True)
    asked, outputs = [replace(r, max_new_tokens=n) for r, n in limits], earlier(target, sampling)
    spy = make(rules, 4, outputs, spy=True)
    decode_together_and_alone(target, spy, lambda: make(rules, 4, outputs), asked, sampling, 2)
    assert spy.checked >= spy.drafted > 5
    assert rules is not None or spy.checked > spy.drafted, "nothing occurred before"


@EVERY_WAY
@SAMPLINGS
@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_simulation_is_what_was_decoded(
    target: Target, sampling: Sampling, length: int, rules: SuffixRules | None
) -> None:
    """At any temperature: what was proposed, all nodes of a tree, what was accepted, and how often nothing was proposed."""
    outputs = earlier(target, sampling)
    found = decode_batch(target, make(rules, length, outputs), repeating_requests(6), sampling, rows=3).generations
    decoded = check_simulated(found, simulate(rules, found, outputs).tallies, length)
    assert decoded.accepted_K[-1 if sampling.greedy and rules is None else 0] > 0
    assert rules is not None or any(r.drafted == 0 for g in found for r in g.rounds)


@EVERY_WAY
def test_answers_that_end_early_are_simulated_as_they_were_drafted(rules: SuffixRules | None) -> None:
    """A decoder does not know where an answer will end, so its drafts may go further."""
    model, outputs, requests = tiny_model("llama", initializer_range=0.06), Outputs([]), repeating_requests(6)
    plain = Target(model, path="tiny", fingerprint="0")
    *_, answer = decode_batch(plain, TargetAlone(), requests, Sampling()).generations
    model.generation_config.eos_token_id = answer.output_ids[11]  # where it leaves a loop
    ending = Target(model, path="tiny", fingerprint="0")
    found = decode_batch(ending, make(rules, 5, outputs), requests, Sampling()).generations
    assert any(g.finish_reason == "eos" and g.rounds for g in found)
    check_simulated(found, simulate(rules, found, outputs).tallies, 5)


def test_a_finished_row_may_hold_more_new_tokens_than_its_text() -> None:
    """It ended at the first of several that were accepted, behind a prompt of one token."""
    drafter, states_BnX = PromptLookup(3), torch.zeros(2, 5, 1)
    drafter.start(2, 16)
    length_B, count_B, limit_B = torch.tensor([[3, 1], [2, 5], [4, 0]])
    new = NewTokens(torch.arange(1, 11).view(2, 5), states_BnX, states_BnX, count_B)
    state = DecodeState(torch.tensor([2, 10]), length_B, limit_B, torch.zeros(2, dtype=torch.long), new, Sampling())
    (text, limit), (_, none) = drafter.read(state)
    assert (text.tolist(), limit, none) == ([0, 0, 1, 2], 4, 0)
