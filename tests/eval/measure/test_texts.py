"""Answers against references, shares per slice, and the check of greedy equality, which goes on where it was interrupted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.decoder.answers import Generation, Request
from draftsmith.decoder.decode import decode
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.drafters.texts import PromptLookup
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.texts import check_lossless, judge_answer, judged_shares
from draftsmith.eval.simulate import answers
from draftsmith.eval.simulate.texts import simulate_prompt_lookup
from draftsmith.foreign.records import Journal
from draftsmith.target.target import Target
from tests.models import tiny_model


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
    assert judge_answer(answer, "chat", reference) == {"exact_match": right}
    assert judge_answer(answer, "chat") == {}


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"a": [1, {"b": null}]}', True),
        (" [] \n", True),
        ('Here you are:\n```json\n{"a": 1}\n```\nAnything else?', True),
        ('```\n{"a": 1\n```', False),
        ('Here you are: {"a": 1}', False),
        ('{"a": 1} {"b": 2}', False),
        ('{"a": 1', False),
        ("{'a': 1}", False),
        ('{"a": NaN}', False),
        ("7", False),
        ("null", False),
        ('"text"', False),
        ("", False),
    ],
)
def test_what_is_valid_json(answer: str, valid: bool) -> None:
    assert judge_answer(answer, "json") == {"valid_json": valid}


@pytest.mark.parametrize(
    ("name", "asked"),
    [("json", True), ("JSON", True), ("json-orders", True), ("tools_json2", True), ("jsonnet", False), ("chat", False)],
)
def test_which_slices_ask_for_json(name: str, asked: bool) -> None:
    assert ("valid_json" in judge_answer("{}", name)) == asked


def test_an_answer_may_be_valid_and_wrong() -> None:
    assert judge_answer('{"a": 2}', "json", {"a": 1}) == {"exact_match": False, "valid_json": True}


def test_shares_count_answers_of_which_something_can_be_told() -> None:
    def answers(*ids: int) -> list[Generation]:
        names = ("math", "math", "json", "json", "chat")
        return [Generation(Request(str(i), s, (1,), 9), [n]) for i, (s, n) in enumerate(zip(names, ids, strict=True))]

    def judge(generation: Generation) -> dict[str, bool]:
        """Token 1 is a right answer, 1 and 2 are valid JSON; the second JSON prompt has no reference."""
        (token,) = generation.output_ids
        told = {"exact_match": token == 1} if generation.request.sample_id in "012" else {}
        return told | ({"valid_json": token > 0} if generation.request.slice == "json" else {})

    assert judged_shares(answers(1, 0, 2, 0, 1), answers(1, 1, 0, 1, 1), judge) == {
        "overall": {
            "exact_match": 1 / 3,
            "exact_match_baseline": 2 / 3,
            "referenced": 3,
            "valid_json": 0.5,
            "valid_json_baseline": 0.5,
            "json_answers": 2,
        },
        "math": {"exact_match": 0.5, "exact_match_baseline": 1.0, "referenced": 2},
        "json": {
            "exact_match": 0.0,
            "exact_match_baseline": 0.0,
            "referenced": 1,
            "valid_json": 0.5,
            "valid_json_baseline": 0.5,
            "json_answers": 2,
        },
    }


REQUESTS = [Request(str(i), "ab"[i % 2], (3 + i, 5, 3 + i, 5), 6) for i in range(4)]
SYSTEMS = [
    SystemUnderTest("again", "prompt_lookup", lambda k: TargetAlone(), 1, 1, fixed_length=False),
    SystemUnderTest(
        "lookup",
        "prompt_lookup",
        PromptLookup,
        2,
        2,
        fixed_length=False,
        simulate=lambda target, answers, sampling, k: simulate_prompt_lookup(answers, k),
    ),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), path="tiny", fingerprint="0")


def test_an_interrupted_check_goes_on_with_the_answer_it_was_at(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = check_lossless(target, SYSTEMS, REQUESTS, Sampling())
    assert expected["lookup"]["overall"].equal == len(REQUESTS)
    assert expected["lookup"]["overall"].tau == expected["lookup"]["overall"].tau_simulated
    calls, cut = 0, len(REQUESTS) + 2
    last, path = cut, tmp_path / "parts.journal"

    def dies(*arguments: Any) -> Iterator[Generation]:
        nonlocal calls
        calls += 1
        if calls > last:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(answers, "decode", dies)
    with pytest.raises(KeyboardInterrupt):
        check_lossless(target, SYSTEMS, REQUESTS, Sampling(), journal=Journal(path))
    calls, last = 0, 10**6
    assert check_lossless(target, SYSTEMS, REQUESTS, Sampling(), journal=Journal(path)) == expected
    assert cut + calls == 3 * len(REQUESTS), "the target alone and two drafters"
    calls, other = 0, Target(tiny_model("llama"), path="tiny", fingerprint="1")
    check_lossless(other, SYSTEMS, REQUESTS, Sampling(), journal=Journal(path))
    assert calls == 3 * len(REQUESTS), "answers of other weights are not taken"
