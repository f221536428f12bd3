"""The check of greedy equality: it finds a text that differs, and goes on where it was interrupted."""

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
from draftsmith.eval.measure.lossless import check_lossless
from draftsmith.eval.simulate import answers
from draftsmith.eval.simulate.texts import simulate_prompt_lookup
from draftsmith.foreign.records import Journal
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
