"""Answers against references: numbers, JSON and text, and the shares per slice."""

from typing import Any

import pytest

from draftsmith.eval.decode.answers import Generation, Request
from draftsmith.eval.measure.quality import exact_matches, is_right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("First 3 apples, then 4: 7.", 7, True),
        ("The answer is \\boxed{1,234}.", "1234", True),
        ("It is 7.50 dollars", 7.5, True),
        ("10-3", 3, True),
        ("It sank to -3 degrees", 3, False),
        ("7, as 3 + 4", 7, False),
        ("No idea", 7, False),
        ("<think>9</think>It is 7", 7, True),
        ("It is 7<think>", "7", True),
        ('{"b": 2, "a": [1]}', {"a": [1], "b": 2}, True),
        ('Here:\n```json\n{"a": 1}\n```\n', {"a": 1}, True),
        ('{"a": 1', {"a": 1}, False),
        ('{"a": "1"}', {"a": 1}, False),
        ("[1, 2]", [1, 2], True),
        (" Paris \n", "paris", True),
        ("Paris, France", "Paris", False),
    ],
)
def test_what_is_right(answer: str, reference: Any, right: bool) -> None:
    assert is_right(answer, reference) == right


def test_shares_count_answers_that_have_a_reference() -> None:
    def answers(*ids: int) -> list[Generation]:
        names = ("math", "math", "json", "chat")
        return [Generation(Request(str(i), s, (1,), 9), [n]) for i, (s, n) in enumerate(zip(names, ids, strict=True))]

    def judge(generation: Generation) -> bool | None:
        return None if generation.request.slice == "chat" else generation.output_ids == [1]

    found = exact_matches(answers(1, 0, 0, 1), answers(1, 1, 0, 1), judge)
    assert found == {
        "overall": {"exact_match": 1 / 3, "exact_match_baseline": 2 / 3, "referenced": 3},
        "math": {"exact_match": 0.5, "exact_match_baseline": 1.0, "referenced": 2},
        "json": {"exact_match": 0.0, "exact_match_baseline": 0.0, "referenced": 1},
    }
