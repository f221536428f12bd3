"""Signals: SIGTERM and SIGHUP end what Ctrl-C ends, with exit codes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.cli import main as command_line
from draftsmith.cli.commands import Command
from draftsmith.train.stopping import ENDING, Interrupt, end_with_launcher, on_signals
from tests.hearing import hearing_signals

ROOT = Path(__file__).resolve().parents[2]


@hearing_signals()
def test_signals_within_one_press_of_ctrl_c_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("draftsmith.train.stopping.time.monotonic", lambda: now[0])
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked == signal.SIGINT
        now[0] += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", ENDING)
@hearing_signals()
def test_sigterm_and_sighup_ask_however_often_they_come(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr("draftsmith.train.stopping.time.monotonic", lambda: now[0])
    with Interrupt() as interrupt:
        for _ in range(3):
            signal.raise_signal(number)
            now[0] += 2
        assert interrupt.asked == number
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
@hearing_signals()
def test_a_command_that_a_signal_ends_says_so(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command_line.COMMANDS, "doctor", Command("", function="x:y", takes_recipe=False))
    monkeypatch.setattr(Command, "run", lambda *_: signal.raise_signal(number))
    assert command_line.main(["doctor"]) == code
    assert capsys.readouterr().err == "draftsmith: interrupted; run the same command again to go on from here.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signals(lambda *_: pytest.fail("handled"), ENDING):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_nobody_launched_outlives_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAFTSMITH_LAUNCHED", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("draftsmith.train.stopping.end_with_parent", lambda: pytest.fail("bound to its parent"))
    end_with_launcher()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_a_launched_process_ends_with_its_launcher() -> None:
    child = "import time; from draftsmith.train.stopping import end_with_parent; end_with_parent(); print('x', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); p.wait()"
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    assert started.stdout.readline() == "x\n"
    started.kill()
    started.wait()
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the process lives on")
