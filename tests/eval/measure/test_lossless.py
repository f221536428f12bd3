"""The check of greedy equality: it finds a text that differs, and goes on where it was interrupted."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.decoder.answers import Decoded, Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.drafters.prompt_lookup import PromptLookup
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure import lossless
from draftsmith.eval.measure.lossless import check_lossless
from draftsmith.eval.simulate.headless import simulate_prompt_lookup
from draftsmith.foreign.journal import Journal
from draftsmith.target.target import Target
from tests.models import tiny_model

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


@pytest.mark.parametrize("batch", [1, 3])
def test_an_interrupted_check_goes_on_with_the_answer_it_was_at(
    batch: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = check_lossless(target, SYSTEMS, REQUESTS)
    assert expected["lookup"]["overall"].equal == len(REQUESTS)
    assert expected["lookup"]["overall"].tau == expected["lookup"]["overall"].tau_simulated
    calls, last = 0, len(REQUESTS) // batch + 2

    def dies(*arguments: Any, **options: Any) -> Decoded:
        nonlocal calls
        calls += 1
        if calls > last:
            raise KeyboardInterrupt
        return decode_batch(*arguments, **options)

    monkeypatch.setattr(lossless, "decode_batch", dies)
    path, now, before = tmp_path / "parts.journal", list[int](), list[int]()
    with pytest.raises(KeyboardInterrupt):
        check_lossless(target, SYSTEMS, REQUESTS, batch=batch, journal=Journal(path))
    calls, cut, last = 0, last, 10**6
    found = check_lossless(
        target,
        SYSTEMS,
        REQUESTS,
        batch=batch,
        journal=Journal(path),
        on_batch=now.append,
        on_kept=before.append,
    )
    assert found == expected
    assert len(before) == cut
    assert len(now) == calls
    assert sum(before) + sum(now) == 3 * len(REQUESTS), "the target alone and two drafters"


def test_answers_of_other_weights_are_not_taken(target: Target, tmp_path: Path) -> None:
    path, now = tmp_path / "parts.journal", list[int]()
    check_lossless(target, SYSTEMS, REQUESTS, journal=Journal(path))
    other = Target(tiny_model("llama"), path="tiny", fingerprint="1")
    check_lossless(other, SYSTEMS, REQUESTS, journal=Journal(path), on_batch=now.append)
    assert sum(now) == 3 * len(REQUESTS)
