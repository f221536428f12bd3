"""Progress in a log and on a terminal: how often it is said, at which rate, and what turns it off."""

import io
import re

import pytest

from draftsmith import progress
from draftsmith.progress import Bar, choose_progress, hush, say, warn_anew


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test lets pass."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("tqdm.std.time", found)
    return found


@pytest.fixture(autouse=True)
def _new_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (progress.QUIET, "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    warn_anew()


def test_a_log_gets_a_line_at_the_start_every_30_seconds_and_at_the_end(clock: Clock) -> None:
    log = io.StringIO()
    with Bar(total=1000, desc="answers", unit="answer", file=log) as bar:
        for _ in range(900):
            clock.now += 0.125
            bar.update()
            bar.set_postfix_str("9 tok/s")
    lines = log.getvalue().splitlines()
    assert [line.split(" ")[1] for line in lines] == ["0/1000", "240/1000", "480/1000", "720/1000", "900/1000"]
    assert all(line.startswith("answers: ") for line in lines)
    assert "\r" not in log.getvalue()
    assert lines[2] == "answers: 480/1000 answer [01:00<01:05,  8.00answer/s, 9 tok/s]"


def test_a_loop_over_a_bar_is_logged_as_seldom(clock: Clock) -> None:
    log = io.StringIO()
    for _ in Bar(range(400), desc="tokenize", file=log):
        clock.now += 0.125
    assert [line.split(" ")[1] for line in log.getvalue().splitlines()] == ["0/400", "240/400", "400/400"]


def test_a_terminal_has_a_bar_that_is_drawn_over(clock: Clock) -> None:
    screen = Terminal()
    with Bar(total=4, file=screen) as bar:
        for _ in range(4):
            clock.now += 1
            bar.update()
    assert screen.getvalue().count("\r") > 4
    assert screen.getvalue().count("\n") == 1


def left(bar: Bar) -> str:
    """Return the time that is left, as the bar shows it."""
    found = re.search(r"<([\d:?]+)", str(bar))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_time_that_is_left_follows_from_the_recent_rate(clock: Clock, kind: type[io.StringIO]) -> None:
    bar = Bar(total=1000, file=kind())
    for _ in range(100):
        clock.now += 10
        bar.update()
    assert left(bar) == "2:30:00"  # 900 at 10 s
    for _ in range(100):
        clock.now += 1
        bar.update()
    assert left(bar) == "13:20"  # 800 at 1 s


@pytest.mark.parametrize("initial", [0, 500], ids=["kept in parts", "resumed"])
def test_what_an_earlier_process_did_has_no_part_in_the_rate(clock: Clock, initial: int) -> None:
    bar = Bar(total=1000, initial=initial, file=io.StringIO())
    clock.now += 5
    bar.update()
    bar.skip(600 - initial)
    clock.now += 5
    bar.update()
    assert bar.n == 602
    assert left(bar) == "33:10"  # 398 at 5 s


@pytest.mark.parametrize("name", ["TQDM_DISABLE", progress.QUIET])
def test_bars_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    log = io.StringIO()
    with Bar(total=2, file=log, disable=False) as bar:
        bar.update()
        bar.skip(1)
    assert log.getvalue() == ""


def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture) -> None:
    choose_progress(quiet=True)
    say("answers: 3")
    say("warning: few answers")
    say("verdict: Deploy eagle3.")
    assert capsys.readouterr().err == "warning: few answers\nverdict: Deploy eagle3.\n"


def test_a_warning_is_said_once_in_a_command(capsys: pytest.CaptureFixture) -> None:
    for _ in range(2):
        warn_anew()
        for _ in range(3):
            say("warning: few answers")
            say("more")
    assert capsys.readouterr().err == ("warning: few answers\n" + 3 * "more\n") * 2


def test_a_process_that_a_command_starts_repeats_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    say("warning: few answers")
    say("answers: reusing run", once=True)
    hush("features: reusing run")
    monkeypatch.setenv(progress.SAID, progress.said()[progress.SAID])
    warn_anew()
    say("warning: few answers")
    say("warning: no answers")
    for stage in ("answers", "features"):
        say(f"{stage}: reusing run", once=True)
    assert capsys.readouterr().err == "warning: few answers\nanswers: reusing run\nwarning: no answers\n"


def test_what_is_said_does_not_break_a_line_of_the_log(capsys: pytest.CaptureFixture) -> None:
    with Bar(total=2, desc="training", unit="step") as bar:
        say("warning: nothing is learned")
        bar.update(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["training: 0/2 step [00:00<?, ?step/s]", "warning: nothing is learned"]
    assert lines[2].startswith("training: 2/2 step [00:00<00:00, ")
    assert len(lines) == 3
