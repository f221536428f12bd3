"""What launchers tell a process and what is refused of it; SIGTERM and SIGHUP end what Ctrl-C ends, with exit codes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.cli import main as command_line
from draftsmith.cli.commands import Command
from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.train.process import (
    ENDING,
    LAUNCHED,
    Interrupt,
    World,
    check_started,
    end_with_launcher,
    on_signals,
    world,
)
from tests.helpers import hearing_signals

TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (*TWO, LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "is_"),
    [
        ({}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, World()),
        ({"RANK": ""}, World()),
        (TWO, World(1, 2, 1)),
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], is_: World, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    assert world() == is_


WRONG = [
    ({"RANK": "x"}, "RANK is 'x' in the environment, and not a whole number"),
    ({"RANK": "-1"}, "RANK is '-1'"),
    ({"RANK": "9" * 5000}, "not a whole number"),
    ({"RANK": "1"}, "RANK is 1 in the environment, but WORLD_SIZE is not set"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "but WORLD_SIZE is 1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' .* from 1"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ({"WORLD_SIZE": "2"}, "RANK is not set: start with torchrun"),
    ({**TWO, "RANK": "2"}, "RANK is 2 .* WORLD_SIZE is 2: ranks go from 0"),
    ({**TWO, "LOCAL_RANK": "7"}, "LOCAL_RANK is 7"),
    ({**TWO, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
]


@pytest.mark.parametrize(("variables", "why"), WRONG)
def test_places_that_cannot_be_are_refused(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(UserError, match=why):
        world()


@pytest.mark.parametrize("command", ["run", "evaluate", "export", "inspect"])
def test_only_data_and_training_take_several_processes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, TWO)
    assert main([command, "--recipe", "recipes/eagle3/tiny.yaml", "--redo", "train"]) == 2
    assert "works in one process" in capsys.readouterr().err


FEWER = [
    ({LAUNCHED: "2"}, "asks for 2 processes, but 1 would train"),
    (
        {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
        "was asked for several processes but started one",
    ),
    ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is 8, but WORLD_SIZE is not set"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "would train alone"),
]


@pytest.mark.parametrize(("variables", "why"), FEWER)
def test_fewer_processes_than_were_asked_for_are_refused(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(UserError, match=why):
        check_started()


@pytest.mark.parametrize(
    "variables", [{}, {LAUNCHED: "1"}, {"ACCELERATE_MIXED_PRECISION": "no"}, {**TWO, "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_what_was_asked_for_is_taken(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    check_started()


ROOT = Path(__file__).resolve().parents[2]


@hearing_signals()
def test_signals_within_one_press_of_ctrl_c_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("draftsmith.train.process.time.monotonic", lambda: now[0])
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
    monkeypatch.setattr("draftsmith.train.process.time.monotonic", lambda: now[0])
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
    monkeypatch.setattr("draftsmith.train.process.end_with_parent", lambda: pytest.fail("bound to its parent"))
    end_with_launcher()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_a_launched_process_ends_with_its_launcher() -> None:
    child = "import time; from draftsmith.train.process import end_with_parent; end_with_parent(); print('x', flush=True); time.sleep(60)"
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


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(2)", 2, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was ended by SIGKILL, as the system does when memory is short"),
    ],
)
def test_a_single_process_that_is_launched_ends_as_several_do(ends: str, code: int, said: str, tmp_path: Path) -> None:
    """Accelerate starts it another way."""
    (script := tmp_path / "ends.py").write_text(f"import os, signal, sys\n{ends}\n")
    words = [str(tmp_path), "--config_file", str(ROOT / "recipes/accelerate/cpu.yaml"), str(script)]
    command = [sys.executable, "-m", "draftsmith.cli.launcher", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
