"""Acceptance by condition: the groups add up to the whole, and are those that counting round by round finds."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from draftsmith.decoder.answers import Generation, Request, Round, Tally, tally_generation, total
from draftsmith.eval.results.conditions import Group, Thinking, acceptance_by_condition, explain_past
from draftsmith.eval.simulate.acceptance import expected_tallies
from draftsmith.eval.simulate.texts import simulate_prompt_lookup
from tests.helpers import tiny_tokenizer

K = 3


def random_answers(count: int = 40) -> list[Generation]:
    """Answers after prompts of all lengths, decoded with drafts that are accepted by chance, some cut by their limit."""
    random, answers = np.random.default_rng(3), []
    for i in range(count):
        prompt = tuple(random.integers(0, 5, int(random.integers(2, 140))).tolist())
        answer = Generation(Request(str(i), "ab"[i % 2], prompt, 90), [1], "length")
        for _ in range(int(random.integers(0, 40))):
            if len(answer.output_ids) == 90:
                break
            accepted = int(random.integers(0, K + 1))
            kept = min(accepted + 1, 90 - len(answer.output_ids))
            answer.rounds.append(Round(len(answer.output_ids) - 1, K, min(accepted, kept)))
            answer.output_ids += random.integers(0, 5, kept).tolist()
        answers.append(answer)
    return answers


def simulated(answers: list[Generation]) -> list[Tally]:
    return [tallies[K - 1] for tallies in simulate_prompt_lookup(answers, K).tallies]


def split(
    decoded: list[Any], simulated: list[Any], field: str = "contexts", trained: int | None = None
) -> tuple[Group, ...]:
    groups: tuple[Group, ...] = acceptance_by_condition(trained, lambda g: 0, decoded, simulated)[field]
    return groups


def by_hand(answers: list[Generation]) -> dict[str, list[int]]:
    """Rounds and tokens by context, counted one by one."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for answer in answers:
        ends = [round_.root for round_ in answer.rounds[1:]] + [len(answer.output_ids) - 1]
        for round_, end in zip(answer.rounds, ends, strict=True):
            before, low = len(answer.request.prompt_ids) + round_.root + 1, 1
            while before >= max(2 * low, 32):
                low = max(2 * low, 32)
            group = found[f"{low} to {max(2 * low, 32) - 1}"]
            group[0] += 1
            group[1] += end - round_.root
    return found


def alphas_by_hand(answers: list[Generation]) -> dict[str, tuple[float, ...]]:
    """How many of the rounds that drafted a position, and came that far, accepted it, by context."""
    found: dict[str, Any] = defaultdict(lambda: np.zeros((2, K)))
    for answer in answers:
        for round_ in answer.rounds:
            before = len(answer.request.prompt_ids) + round_.root + 1
            low = max(2 ** (before.bit_length() - 1), 32) if before >= 32 else 1
            for k in range(min(round_.accepted + 1, K, len(answer.output_ids) - 1 - round_.root)):
                found[f"{low} to {max(2 * low, 32) - 1}"][:, k] += (k < round_.accepted, 1)
    return {name: tuple(accepted / reached) for name, (accepted, reached) in found.items()}


def test_positions_of_all_roots_add_up_to_those_of_the_answer() -> None:
    """Decoded and simulated; expected rounds draft shorter at some roots, and at the answer's end."""
    random, tokens = np.random.default_rng(1), np.array([9, 4])
    c_STK = random.random((2, 9, K))
    c_STK[0, 2, 1:] = np.nan
    found = zip(expected_tallies(c_STK, tokens, K), c_STK, tokens.tolist(), strict=True)
    expected = [replace(tally, chances_TK=c_TK[:count]) for tally, c_TK, count in found]
    answers = random_answers()
    for tally in (*expected, *simulated(answers), *(tally_generation(g, K) for g in answers)):
        accepted_TK, reached_TK = tally.positions() or ()
        np.testing.assert_allclose(accepted_TK.sum(0), tally.accepted_K, atol=1e-5)
        np.testing.assert_allclose(reached_TK.sum(0), tally.reached_K, atol=1e-5)


def test_groups_have_intervals_of_their_prompts_where_these_are_enough() -> None:
    answers = random_answers(80)
    decoded = [(g, tally_generation(g, K)) for g in answers]
    for group in split(decoded, []):
        assert group.interval is not None
        assert group.tau is not None
        assert group.interval[0] < group.tau < group.interval[1]
    assert all(group.interval is None for group in split(decoded[:9], []))


def test_groups_of_contexts_are_those_counted_round_by_round_and_add_up() -> None:
    answers = random_answers()
    decoded = [tally_generation(g, K) for g in answers]
    expected = simulated(answers)
    groups = split(list(zip(answers, decoded, strict=True)), list(zip(answers, expected, strict=True)))
    assert [g.name for g in groups] == ["1 to 31", "32 to 63", "64 to 127", "128 to 255"]
    counted = by_hand(answers)
    assert {g.name: g.rounds for g in groups} == {name: rounds for name, (rounds, _) in counted.items()}
    assert {g.name: g.tau for g in groups} == pytest.approx({n: t / r for n, (r, t) in counted.items()})
    assert {g.name: g.alpha_at for g in groups} == {n: pytest.approx(a) for n, a in alphas_by_hand(answers).items()}
    whole, exact = total(decoded, K), total(expected, K)
    assert sum(g.rounds or 0 for g in groups) == whole.rounds
    assert sum((g.rounds or 0) * (g.tau or 0) for g in groups) == pytest.approx(whole.tokens)
    assert sum(g.rounds_simulated or 0 for g in groups) == pytest.approx(exact.rounds)
    assert sum((g.rounds_simulated or 0) * (g.tau_simulated or 0) for g in groups) == pytest.approx(exact.tokens)


def test_expected_rounds_at_a_root_are_the_mean_of_many_decoded_ones() -> None:
    """Accept every draft by chance, thousands of times: the means are the expectation, root by root."""
    random, tokens, draws = np.random.default_rng(0), 6, 20_000
    c = random.random((1, tokens, K))
    c[0, 2, 1:] = np.nan  # a round that drafts one token only
    found = expected_tallies(c, np.array([tokens]), K)[0]
    rounds, emitted = np.zeros(tokens), np.zeros(tokens)
    for _ in range(draws):
        root = 0
        while root < tokens:
            step = 0
            while step < min(K, tokens - root) and random.random() < c[0, root, step]:  # NaN ends the draft
                step += 1
            step = min(step + 1, tokens - root)
            rounds[root] += 1
            emitted[root] += step
            root += step
    np.testing.assert_allclose(found.rounds_T, rounds / draws, atol=0.015)
    np.testing.assert_allclose(found.tokens_T, emitted / draws, atol=0.03)


def test_a_sum_of_answers_keeps_no_roots() -> None:
    tallies = [tally_generation(g, K) for g in random_answers(3)]
    assert tallies[0].rounds_T is not None
    assert total(tallies, K).rounds_T is None


@pytest.mark.parametrize("decode", [True, False])
def test_a_fall_past_the_trained_length_is_said_with_its_size(decode: bool) -> None:
    good, bad = (
        Generation(Request(name, "a", (0,) * prompt, 99), [1], rounds=[Round(K * i, 2, 2 * keeps) for i in range(4)])
        for name, prompt, keeps in (("short", 10, True), ("long", 500, False))
    )
    good.output_ids += [1] * 12
    bad.rounds = [Round(i, 2, 0) for i in range(4)]
    bad.output_ids += [1] * 4
    pairs = [(g, tally_generation(g, K)) for g in (good, bad)]
    sides = (pairs, []) if decode else ([], pairs)
    groups = split(*sides, "training_split", 400)
    assert [g.name for g in groups] == ["within", "past"]
    said = explain_past(400, groups)
    assert "50% of its rounds past the 400 tokens" in said
    assert "falls by 67%, from 3.00 to 1.00" in said
    assert explain_past(12, split(sides[0][:1], sides[1][:1], "training_split", 12)) == ""
    assert explain_past(5000, split(pairs, [], "training_split", 5000)) == ""


def test_nothing_is_said_of_a_few_rounds_and_what_stands_before_is_not_invented() -> None:
    few = (Group("within", 990, 2.0), Group("past", 10, 1.0))
    assert explain_past(100, few) == ""
    assert explain_past(100, (replace(few[1], rounds=30),)) == (
        "100% of its rounds past the 100 tokens of the longest text that it learned from, with a tau of 1.00: train on texts "
        "as long as those that you serve (data.max_length)"
    )


MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "thought", "rest"),
    [
        ("hi", "<think>\nso it is\n</think>", "\n\nYes."),
        ("hi<think>\n", "so it is</think>", " Yes."),  # the template opens thought
        ("hi<think>\n\n</think>\n\n", "", "Yes."),  # and closes it, for an answer without
        ("what does <think> mean?" + " well" * 40, "", "Nothing."),  # far from the end it is what the user said
        ("hi", "<think>\nso it is and so", ""),  # cut off in thought
        ("hi", "", "Yes, no mark at all."),
    ],
)
def test_thought_ends_with_the_token_that_completes_the_mark(prompt: str, thought: str, rest: str) -> None:
    """Marks of several tokens, and those that share a token with what follows."""
    tokenizer = tiny_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids = encode(thought + rest)
    answer = Generation(Request("1", "a", tuple(encode(prompt)), 99), ids, "eos")
    found = Thinking(partial(tokenizer.decode, skip_special_tokens=False), MARKS)(answer)
    expected = next((n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n]).startswith(thought)), len(ids))
    assert found == (expected if thought else 0)


def test_groups_of_thought_and_answer_add_up_and_split_at_the_mark() -> None:
    answers = [g for g in random_answers() if len(g.output_ids) > 12]
    decoded = [(g, tally_generation(g, K)) for g in answers]
    expected = list(zip(answers, simulated(answers), strict=True))
    thought_of = {id(g): i % 13 for i, g in enumerate(answers)}
    found = acceptance_by_condition(None, lambda g: thought_of[id(g)], decoded, expected)["thinking"]
    rounds = {"thinking": 0, "answer": 0}
    for g in answers:
        for round_ in g.rounds:
            # The first token of its draft stands behind the root.
            rounds["thinking" if round_.root + 1 < thought_of[id(g)] else "answer"] += 1
    assert {group.name: group.rounds for group in found} == rounds
    assert min(rounds.values()) > 0
    assert acceptance_by_condition(None, lambda g: 0, decoded, expected)["thinking"] is None


@pytest.mark.parametrize(
    ("past", "said"), [(2.4, ""), (2.0, ""), (1.995, ""), (1.98, "tau falls by 1%"), (1.96, "tau falls by 2%")]
)
def test_a_warning_of_long_texts_needs_a_fall(past: float, said: str) -> None:
    found = explain_past(10, (Group("within", 100, 2.0), Group("past", 100, past)))
    assert said in found if said else found == ""


def test_the_answer_is_what_stands_behind_the_thought_though_marks_are_special() -> None:
    """A text without special tokens no longer tells where the thought ended."""
    words = {"[T]": 0, "[/T]": 1, "maybe": 2, "yes": 3}
    decode = {number: word for word, number in words.items()}

    def spell(ids: Any) -> str:
        return " ".join(decode[i] for i in ids)

    thinking = Thinking(spell, ("[T]", "[/T]"))
    asked = Request("1", "a", (3,), 9)
    assert thinking.answer(Generation(asked, [0, 2, 1, 3], "eos")) == [3]
    assert thinking.answer(Generation(asked, [3, 2], "eos")) == [3, 2]
    assert thinking.answer(Generation(asked, [0, 2], "length")) == []
