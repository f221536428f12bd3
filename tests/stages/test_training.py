"""What the stage of training says: of the draft vocabulary, of how the head came to be, and of one that learned nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.heads.vocab import Coverage
from draftsmith.stages import training
from draftsmith.stages.training import Start, warn_of_untaught
from tests.eval.training.test_history import line, make_run


def make_session(run: Path, head: Path | None = None) -> Any:
    said: list[str] = []
    return SimpleNamespace(recipe=SimpleNamespace(run_dir=run), named_head=head, warn=said.append, said=said)


def test_a_head_that_learned_nothing_is_said_before_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the head that is measured; a log that cannot be read stops nothing."""
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    (bad / "train" / "metrics.jsonl").write_text(json.dumps(line(10, 1.01, heldout_accuracy=[0.12])) + "\n")
    for session, nothing in (
        (make_session(good), False),
        (make_session(bad), True),
        (make_session(good, head=bad), True),
        (make_session(bad, head=good), False),
        (make_session(tmp_path / "none"), False),
    ):
        warn_of_untaught(session)
        assert ["learned nothing" in text for text in session.said] == [True] * nothing
    (bad / "train" / "metrics.jsonl").write_text('{"tau": }\n')
    warn_of_untaught(session := make_session(bad))
    assert session.said == []
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("training_share", "chosen", "fix"),
    [
        (1.0, True, "chosen from more answers"),
        (0.9, True, "raise head.draft_vocab_size."),
        (1.0, False, "train a new head"),
    ],
)
def test_low_coverage_of_held_out_answers_is_a_warning(
    training_share: float, chosen: bool, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    covered = Coverage(training_share, 0.9, {"chat": 0.99, "code": 0.8})
    training._say_coverage(covered, 30, 100, chosen=chosen)
    first, *warnings = capsys.readouterr().err.splitlines()
    assert "30 of 100 tokens cover 90.00% of the held-out answers (chat 99.0%, code 80.0%)" in first
    assert len(warnings) == 2
    assert all(fix in warning for warning in warnings)


def test_what_run_json_keeps() -> None:
    start = Start(SimpleNamespace(), [0, 2, 3], [1], Coverage(1.0, 0.9, {"chat": 0.9}), 77)  # type: ignore[arg-type]
    covered = {"training": 1.0, "heldout": 0.9, "heldout_by_slice": {"chat": 0.9}}
    assert start.facts() == {"answers": 3, "heldout_answers": 1, "longest": 77, "coverage": covered}
