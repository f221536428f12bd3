"""Counting and comparing what an engine drafted: within the text, per answer, and every way to differ is seen."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.eval.engines.agreement import (
    AgreementRow,
    Counts,
    EngineAnswer,
    EngineRound,
    count,
    ratio_error,
    to_generations,
    trace_ours,
    within_text,
)
from draftsmith.heads.base import DraftHead
from scripts.bench.engines.compare import SAMPLED, OurSide, greedy_row, sampled_row
from scripts.bench.engines.served import Candidate, ServedTarget
from tests.exports import make_draft_model, make_medusa, make_target

pytestmark = pytest.mark.full

K = 4


def make_side(method: str = "draft_model", prompts: int = 5) -> OurSide:
    """A tiny target, and one with slightly other weights that drafts for it (or a random head, which is seldom right)."""
    target = make_target(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(3)
    requests = [
        Request.seeded(f"p{i}", "any", torch.randint(3, 160, (5 + i,), generator=generator).tolist(), 8 + i, seed=1)
        for i in range(prompts)
    ]
    if method == "medusa":
        head: DraftHead = make_medusa(target)
    else:
        head = make_draft_model(target, num_hidden_layers=2, num_key_value_heads=2)
        with torch.no_grad():
            for name, value in head.named_parameters():
                near = target.model.get_parameter(name)
                value.copy_(near + 0.04 * near.std() * torch.randn(near.shape, generator=generator))
    served = ServedTarget("tiny", target, Path("models/tiny"), requests, [])
    return OurSide(served, Candidate("h", (), head), K)


@pytest.fixture(scope="module")
def side() -> OurSide:
    side = make_side()
    accepted, drafted = sum(a.accepted for a in side.greedy), sum(a.drafted for a in side.greedy)
    assert 0.1 < accepted / drafted < 0.9
    return side


def as_vllm(side: OurSide, answers: list[EngineAnswer]) -> list[EngineAnswer]:
    """Our answers as vLLM counts them: drafts are never cut short, and go on past the end."""
    found = []
    for answer in answers:
        known, rounds = 1, []
        for r in answer.rounds:
            past = known + r.accepted == len(answer.output_ids)
            drafted = (*r.drafted, *[7] * (side.K - len(r.drafted)))
            rounds.append(EngineRound(drafted, side.K if past else r.accepted))
            known += r.accepted + 1
        found.append(EngineAnswer(answer.sample_id, answer.output_ids, tuple(rounds)))
    return found


def within(answers: list[EngineAnswer]) -> list[EngineAnswer]:
    return [within_text(answer) for answer in answers]


def agrees(side: OurSide, found: dict) -> bool:
    return side.row("eagle3", "vllm", "0", found).agrees


def test_within_text_cuts_what_lies_past_the_end_and_adds_plain_steps() -> None:
    answer = EngineAnswer("a", tuple(range(6)), (EngineRound((1, 2, 9), 2), EngineRound((4, 5, 6), 3)))
    cut = within_text(answer)
    assert cut.rounds == (EngineRound((1, 2, 9), 2), EngineRound((4, 5), 2))
    assert (cut.drafted, cut.accepted) == (5, 4)
    longer = within_text(replace(answer, output_ids=tuple(range(10))))
    assert longer.rounds == (*answer.rounds, EngineRound((), 0), EngineRound((), 0))
    # 5 and 9 tokens after the first ones.
    assert count([cut, longer]) == Counts(tokens=14, rounds=6, drafted=11, accepted=9)
    assert within_text(replace(answer, output_ids=(1,))).rounds == ()


def test_a_drafted_end_counts_as_accepted() -> None:
    """llama.cpp takes an end token inside a draft for the target's own."""
    answer = EngineAnswer("a", (7, 1, 2), (EngineRound((1, 2, 9), 1),))
    assert within_text(answer).rounds == (EngineRound((1, 2), 2),)
    assert within_text(replace(answer, output_ids=(7, 1, 3))).rounds == (EngineRound((1, 2), 1),)
    assert within_text(replace(answer, output_ids=(7, 1, 2, 2))).rounds[0] == EngineRound((1, 2, 9), 1)


def test_counts_are_those_of_our_own_tallies(side: OurSide) -> None:
    """`count` and the decoder's tally count the same rounds of the same answers."""
    requests, answers = side.requests, [within_text(a) for a in side.greedy]
    tally = total((tally_generation(g, K) for g in to_generations(requests, answers)), K)
    expected = Counts(int(tally.tokens), int(tally.rounds), int(tally.drafted), int(tally.accepted_K.sum()))
    assert count(answers) == expected
    assert count(answers).tau == tally.tau


@pytest.mark.parametrize("method", ["draft_model", "medusa"])
def test_equal_greedy_answers_agree(method: str) -> None:
    side = make_side(method)
    theirs = as_vllm(side, side.greedy)
    assert sum(a.drafted for a in theirs) > sum(a.drafted for a in side.greedy)
    found = greedy_row(side, within(side.greedy), within(theirs))
    assert found["equal_answers"] == len(side.requests)
    assert found["equal_rounds"] == found["ours"].rounds == found["theirs"].rounds > 0
    assert found["simulated"] == pytest.approx(found["ours"].tau, abs=1e-12)
    assert agrees(side, found)


def change(answers: list[EngineAnswer], place: int, **fields: object) -> list[EngineAnswer]:
    return [*answers[:place], replace(answers[place], **fields), *answers[place + 1 :]]


def test_a_token_that_differs_is_listed_and_excused_where_it_is_a_close_call(
    side: OurSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = side.greedy[1].output_ids
    answers = change(within(side.greedy), 1, output_ids=(*output[:3], output[3] ^ 1, *output[4:]))
    found = greedy_row(side, within(side.greedy), answers)
    assert len(found["differences"]) == 1
    assert not agrees(side, found)
    monkeypatch.setattr("scripts.bench.engines.compare.CLOSE", math.inf)
    found = greedy_row(side, within(side.greedy), answers)
    assert agrees(side, found)
    assert len(found["close_calls"]) == 1
    assert "p1: output at token 3" in found["close_calls"][0]


def sampled_answers(side: OurSide) -> list[EngineAnswer]:
    """Answers at temperature 1 with greedy drafts, as vLLM makes them."""
    requests = [replace(request, key=request.key + 9) for request in side.requests]
    return trace_ours(side.target, side.drafter(greedy_drafts=True), requests, SAMPLED)


@pytest.mark.slow
def test_sampled_answers_agree_with_the_simulator_on_the_same_text() -> None:
    side = make_side(prompts=12)
    found = sampled_row(side, sampled_answers(side))
    assert found["ours"] == found["theirs"]
    assert abs(found["z"]) < 5
    assert not found["differences"]


@pytest.mark.slow
def test_a_sampled_round_that_accepts_otherwise_is_seen() -> None:
    """An accepted draft that is counted as the target's own token splits a round in two."""
    side = make_side(prompts=12)
    answers = sampled_answers(side)
    place = next(i for i, a in enumerate(answers) if any(r.accepted for r in a.rounds))
    rounds = list(answers[place].rounds)
    at = next(i for i, r in enumerate(rounds) if r.accepted)
    rounds[at : at + 1] = [replace(rounds[at], accepted=rounds[at].accepted - 1), EngineRound((), 0)]
    found = sampled_row(side, change(answers, place, rounds=tuple(rounds)))
    assert [d.split(":")[0] for d in found["differences"]] == [answers[place].sample_id]
    assert not agrees(side, found)


def test_acceptance_beyond_three_standard_errors_does_not_agree() -> None:
    counts = Counts(10, 5, 10, 5)
    row = AgreementRow(
        "h", "m", "l", "e", "v", "f32", 1.0, 4, "greedy", 1, None, None, counts, counts, counts, 2.0, 0.1, z=3.1
    )
    assert not row.agrees
    assert replace(row, z=-2.9).agrees
    assert not replace(row, z=0.0, differences=("x",)).agrees


def test_ratio_error_is_that_of_repeated_draws() -> None:
    """The delta method against the spread of the ratio itself over many sets."""
    random.seed(0)

    def draw() -> tuple[float, float]:
        rounds = random.randint(5, 40)
        return rounds * random.uniform(1.2, 2.8), rounds

    sets = [[draw() for _ in range(60)] for _ in range(400)]
    ratios = [sum(t for t, _ in s) / sum(r for _, r in s) for s in sets]
    mean = sum(ratios) / len(ratios)
    spread = (sum((x - mean) ** 2 for x in ratios) / (len(ratios) - 1)) ** 0.5
    assert sum(map(ratio_error, sets)) / len(sets) == pytest.approx(spread, rel=0.1)
    assert math.isnan(ratio_error([(1.0, 1.0)]))
