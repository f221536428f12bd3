import json
import re
from collections import Counter

import pytest

from draftsmith.data.conversations.masks import tokenize_conversation
from draftsmith.data.embedded.corpus import GENERATORS, TOKEN_SHARES, generate_conversations, generate_prompts
from scripts.bench.embedded.make import train_tokenizer

CONVERSATIONS = generate_conversations(1500, seed=0)


def exchanges(slice_: str) -> list[tuple[str, str]]:
    return [(c.messages[0]["content"], c.messages[1]["content"]) for c in CONVERSATIONS if c.slice == slice_]


def test_same_seed_same_corpus_and_a_longer_one_only_appends() -> None:
    assert generate_conversations(200, seed=0) == CONVERSATIONS[:200]
    assert generate_conversations(200, seed=1) != CONVERSATIONS[:200]
    assert generate_prompts(3, seed=0) == generate_prompts(3, seed=0)


def test_questions_and_ids_are_distinct() -> None:
    assert len({c.id for c in CONVERSATIONS}) == len(CONVERSATIONS)
    assert len({c.messages[0]["content"] for c in CONVERSATIONS}) == len(CONVERSATIONS)


@pytest.mark.parametrize("seed", [0, 7])
def test_prompts_are_held_out_from_every_training_corpus(seed: int) -> None:
    prompts = generate_prompts(40, seed)
    assert Counter(p.slice for p in prompts) == dict.fromkeys(GENERATORS, 40)
    assert all([m["role"] for m in p.messages] == ["user"] for p in prompts)
    trained = {c.messages[0]["content"] for c in generate_conversations(3000, seed)}
    assert trained.isdisjoint(p.messages[0]["content"] for p in prompts)


@pytest.mark.parametrize("count", [300, 1500])
def test_slices_keep_their_share_of_tokens_in_every_prefix(count: int) -> None:
    tokenizer = train_tokenizer((m["content"] for c in CONVERSATIONS for m in c.messages), 1024)
    tokens: Counter[str] = Counter()
    for conversation in CONVERSATIONS[:count]:
        tokens[conversation.slice] += len(tokenize_conversation(tokenizer, conversation)[0].ids)
    for name, share in TOKEN_SHARES.items():
        assert tokens[name] / tokens.total() == pytest.approx(share, abs=0.04), name


def test_json_answers_are_the_records_of_the_question_with_quotes() -> None:
    for question, answer in exchanges("json"):
        record = json.loads(answer)
        assert question.endswith(answer.replace('"', ""))
        assert len(record) >= 3


def test_rag_answers_quote_the_passage() -> None:
    for question, answer in exchanges("rag"):
        *facts, asked = question.removeprefix("Read: ").split(". ")
        assert len(facts) in (1, 2, 3)
        assert asked.endswith("?")
        assert sum(fact in answer for fact in facts) == 1


def test_math_answers_compute_right_and_end_with_the_last_result() -> None:
    for _, answer in exchanges("math"):
        results = []
        for left, sign, right, result in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer):
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result)
            results.append(result)
        assert len(results) == 2
        assert re.findall(r"\d+", answer)[-1] == results[-1]


def test_code_answers_do_what_the_question_says() -> None:
    seen = set()
    for question, answer in exchanges("code"):
        scope: dict = {}
        exec(answer, scope)  # our own generated text
        name = question.split()[1].split("(")[0]
        number = int(re.findall(r"\d+", question)[0])
        values = [1, 25, 25, number, 99]
        if found := re.search(r"counts the \w+ (over|under)", question):
            expected = sum(v > number if found[1] == "over" else v < number for v in values)
        elif found := re.search(r"each of the \w+ (plus|times|minus)", question):
            expected = [{"plus": v + number, "times": v * number, "minus": v - number}[found[1]] for v in values]
        elif found := re.search(r"the (largest|smallest|sum|number) of \w+, or", question):
            assert scope[name]([]) == number
            expected = {"largest": max, "smallest": min, "sum": sum, "number": len}[found[1]](values)
        else:
            found = re.search(r"the (sum|difference|product|ratio) times", question)
            assert found
            expected = number * {"sum": 11, "difference": 5, "product": 24, "ratio": 8 / 3}[found[1]]
            values = []
        seen.add(found[1])
        assert (scope[name](values) if values else scope[name](8, 3)) == pytest.approx(expected)
    assert len(seen) == 12


@pytest.mark.parametrize("slice_", list(GENERATORS))
def test_answers_differ(slice_: str) -> None:
    answers = [answer for _, answer in exchanges(slice_)]
    assert len(set(answers)) > 0.9 * len(answers)
