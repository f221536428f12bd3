"""Decoding in turns goes on from its journal: nothing is decoded twice, and what is damaged counts as not done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.decoder.answers import Decoded, Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.clocks.turns import Turns, run_systems
from draftsmith.eval.drafters import system
from draftsmith.eval.drafters.baselines import GENERATE, plain
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.foreign.records import Journal
from draftsmith.target.target import Target

REQUESTS = [Request(str(i), "ab"[i % 2], (3 + i, 5), 4) for i in range(8)]
AGAIN = SystemUnderTest("again", "prompt_lookup", lambda k: TargetAlone(), 1, 1, fixed_length=False)


def run(target: Target, journal: Journal | None = None) -> Turns:
    return run_systems(
        target, [AGAIN], [REQUESTS, REQUESTS], Sampling(0.8), batch=1, picks=[plain(target)], journal=journal
    )


def answers(turns: Turns) -> dict[str, list[list[list[int]]]]:
    return {
        name: [[g.output_ids for d in repeat for g in d.generations] for repeat in repeats]
        for name, repeats in turns.by_name.items()
    }


def test_an_interrupted_run_goes_on_with_the_turn_it_was_in(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "t0" / "parts.journal", 0

    def dies(*arguments: Any, **options: Any) -> Decoded:
        nonlocal calls
        calls += 1
        if calls == 2 + 2 * 5 + 2:  # two to warm up, five turns of two systems, and the second of the sixth
            raise KeyboardInterrupt
        return decode_batch(*arguments, **options)

    monkeypatch.setattr(system, "decode_batch", dies)
    with pytest.raises(KeyboardInterrupt):
        run(target, Journal(path, "machine"))
    calls = 100
    went_on = run(target, Journal(path, "machine"))
    assert calls == 100 + 2 + 2 * (16 - 5)
    assert {**answers(went_on), GENERATE: []} == {**answers(run(target)), GENERATE: []}, "generate draws from torch"
    calls = 0
    again = run(target, Journal(path, "machine"))
    assert calls == 0, "all is there, so that not even a warm-up is needed"
    assert again.by_name == went_on.by_name, "seconds, rounds and times of tokens included"
    assert again.clocks == went_on.clocks
    assert again.clocks.wall_s > 0


def test_a_system_that_the_journal_lacks_is_decoded_with_the_others(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "parts.journal"
    run(target, Journal(path, "machine"))
    other = replace(AGAIN, name="other")
    found = run_systems(
        target, [AGAIN, other], [REQUESTS], Sampling(0.8), batch=1, journal=Journal(path, "machine")
    ).by_name
    assert [[g.output_ids for g in d.generations] for d in found["other"][0]] == [
        [g.output_ids for g in d.generations] for d in found[""][0]
    ]


def written(path: Path) -> Journal:
    journal = Journal(path, "machine")
    for name in "abc":
        journal.add(name, {"seconds": 0.1, "ids": [1, 2]})
    return journal


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        (lambda data: data, "abc"),
        (lambda data: data[:-1], "ab"),
        (lambda data: data[:-5], "ab"),
        (lambda data: data.replace(b'"b"', b'"d"'), "a"),
        (lambda data: data + b"\0" * 100, "abc"),
        (lambda data: data.replace(b"machine", b"another"), ""),
        (lambda data: b"\xff" + data, ""),
        (lambda data: b"", ""),
    ],
)
def test_a_damaged_journal_keeps_what_stands_before_the_damage(tmp_path: Path, spoil: Any, kept: str) -> None:
    path = tmp_path / "parts.journal"
    written(path)
    path.write_bytes(spoil(path.read_bytes()))
    journal = Journal(path, "machine")
    assert [name for name in "abcd" if journal.get(name) is not None] == list(kept)
    assert path.exists() is bool(kept)
    journal.add("e", 1.5)
    again = Journal(path, "machine")
    assert again.get("e") == 1.5
    assert [name for name in "abc" if again.get(name) == {"seconds": 0.1, "ids": [1, 2]}] == list(kept)


def test_the_journal_of_another_key_begins_anew_and_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "parts.journal"
    written(path)
    assert Journal(path, "another machine").get("a") is None
    assert not path.exists()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"parts\.journal is a link, which this run did not make: remove it"):
        Journal(path, "machine")
