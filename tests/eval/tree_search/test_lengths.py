"""Where chains should end: the speed of any floors is what the simulation says of the same rule, and the search finds what a
hand-made text has."""

import numpy as np
import pytest
import torch

from draftsmith.decoder.answers import Request, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import LengthRule, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.conformance.spec import tiny_target
from draftsmith.eval.simulate.texts import head_simulator, to_sample
from draftsmith.eval.tree_search.lengths import (
    NEVER,
    TextChances,
    find_floors,
    fixed,
    read_chances,
    search_floors,
)
from draftsmith.heads.registry import find_method
from tests.eval.conformance.test_suite import SPECS


def made(answers: int = 40, tokens: int = 60, depth: int = 4) -> TextChances:
    """Answers whose drafts are certain or worthless, which the scores tell nine times out of ten."""
    generator = np.random.default_rng(0)
    good_STK = generator.random((answers, tokens, depth)) < 0.6
    told_STK = np.where(generator.random(good_STK.shape) < 0.9, good_STK, ~good_STK)
    accepted_STK = np.where(good_STK, 0.9, 0.1)
    for left in range(1, depth):
        accepted_STK[:, tokens - left, left:] = np.nan
    score_STK = np.where(told_STK, 0.9, 0.1).cumprod(2)
    names = tuple(str(answer) for answer in range(answers))
    return TextChances(accepted_STK, score_STK, np.full(answers, tokens), ("s",) * answers, names)


def per_token(ms: float) -> "np.ndarray":
    return 1 + ms * np.arange(5)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["medusa", "eagle3", "dspark"])
def test_any_floors_take_the_rounds_that_their_simulation_has(name: str, temperature: float) -> None:
    target, sampling = tiny_target(), Sampling(temperature)
    method, options, vocab = SPECS[name]
    torch.manual_seed(0)
    head = find_method(method).build(options, target, vocab).eval()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.15)
    prompts = torch.randint(3, 60, (5, 6), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [Request.seeded(str(i), "s", prompt, 9 + i, 0) for i, prompt in enumerate(prompts)]
    decoded = decode_batch(target, TargetAlone(), requests, sampling).generations
    texts = read_chances(target, head, [to_sample(one) for one in decoded], 3, sampling)
    middle = float(np.median(texts.score_STK[texts.score_STK > 0]))
    for floors in ((middle, middle, 0.0), (0.0, middle / 2, middle), fixed(2, 3), (NEVER,) * 3):
        spent = texts.spent(floors, lambda drafted: 1.0 + drafted)
        rule = LengthRule(floors)
        tally = total((one[-1] for one in head_simulator(head, rule=rule)(target, decoded, sampling, 3).tallies), 3)
        assert spent.tau == pytest.approx(tally.tau, abs=1e-6)
        assert spent.drafted == pytest.approx(tally.drafted / tally.rounds, abs=1e-6)
        assert spent.ms == pytest.approx((tally.rounds + tally.drafted) / tally.tokens, abs=1e-6)


def test_where_a_token_costs_nothing_no_draft_ends() -> None:
    texts = made()
    floors = search_floors(texts, lambda drafted: per_token(0.0)[drafted])
    assert texts.spent(floors, lambda drafted: 1.0 + 0 * drafted).drafted == pytest.approx(
        texts.spent(fixed(4, 4), lambda drafted: 1.0 + 0 * drafted).drafted
    )


def test_answers_that_are_shorter_than_the_longest_draft_are_searched() -> None:
    """No place has a later token."""
    short, whole = made(tokens=3), made()

    def cost(drafted: np.ndarray) -> np.ndarray:
        return per_token(0.05)[drafted]

    floors = search_floors(short, cost)
    assert len(floors) == 4
    assert floors[3] in (0.0, NEVER)
    assert search_floors(whole, cost)[0] != NEVER


def test_a_score_that_knows_beats_every_fixed_length_on_texts_that_the_search_has_not_seen() -> None:
    texts = made()

    def cost(drafted: np.ndarray) -> np.ndarray:
        return per_token(0.3)[drafted]

    best = min(texts.spent(fixed(k, 4), cost).ms for k in range(1, 5))
    floors, unseen = find_floors(texts, cost)
    assert unseen.ms < 0.9 * best
    assert floors == search_floors(texts, cost)


def test_a_score_that_knows_nothing_is_no_worse_than_the_best_fixed_length() -> None:
    """On the texts of the search, as fixed lengths are among the floors."""
    texts = made()
    blind = TextChances(
        texts.accepted_STK, np.random.default_rng(1).random(texts.score_STK.shape), *list(vars(texts).values())[2:]
    )
    for ms in (0.05, 0.3, 2.0):

        def cost(drafted: np.ndarray, ms: float = ms) -> np.ndarray:
            return per_token(ms)[drafted]

        best = min(blind.spent(fixed(k, 4), cost).ms for k in range(1, 5))
        assert blind.spent(search_floors(blind, cost), cost).ms <= best
    assert search_floors(blind, lambda drafted: per_token(50.0)[drafted])[0] == NEVER, "the target alone is faster"
