"""`--launch` as a user starts it, on CPUs: processes that are stopped, killed and resumed, and machines that meet."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from draftsmith.cli.main import main
from draftsmith.train.checkpoints import latest_checkpoint
from tests.train.runs import ROOT, TinyRun, make_run

pytestmark = pytest.mark.slow

TWO_CPUS = ROOT / "recipes" / "accelerate" / "ddp-2cpu.yaml"
OFTEN = ["--train.checkpoint_minutes", "0.0001"]


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("launched"))


def launch(run: TinyRun, name: str, file: Path = TWO_CPUS, extra: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    words = ["train", *run.words(name), *OFTEN, *extra, "--launch", str(file)]
    return subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli.main", *words], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def await_checkpoint(run: TinyRun, name: str) -> None:
    for _ in range(3000):
        if list((run.folder / name / "train").glob("step_*/DONE")):
            return
        time.sleep(0.1)
    pytest.fail("no checkpoint in five minutes")


def sentences(said: str) -> list[str]:
    return [line for line in said.replace("\r", "\n").splitlines() if line.startswith("draftsmith: ")]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_sigterm_saves_a_checkpoint_from_which_one_process_goes_on(run: TinyRun) -> None:
    run.copy("stopped")
    started = launch(run, "stopped")
    await_checkpoint(run, "stopped")
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=300)
    assert started.returncode == 143
    assert "training: 2 processes x 1 (accumulation) x 1 rows of 64 tokens = up to 128 tokens a step" in said
    (sentence,) = sentences(said)
    assert "Training was interrupted at step" in sentence
    assert main(["train", *run.words("stopped"), "--train.accumulation", "2"]) == 0
    run.check_same("stopped")


def test_a_killed_rank_is_named_with_the_checkpoint(run: TinyRun) -> None:
    run.copy("killed")
    started = launch(run, "killed", extra=("--train.epochs", "50"))
    await_checkpoint(run, "killed")
    ranks = [child for child in descendants(started.pid) if child.environ().get("RANK") == "1"]
    ranks[0].kill()
    _, said = started.communicate(timeout=300)
    assert started.returncode == 1
    (sentence,) = sentences(said)
    assert sentence.startswith(f"draftsmith: Rank 1 on {socket.gethostname()} was ended by SIGKILL")
    assert sentence.endswith(
        f"run the same command again to go on from {latest_checkpoint(run.folder / 'killed' / 'train')}."
    )


def test_ranks_end_when_the_command_that_launched_them_is_killed(run: TinyRun) -> None:
    run.copy("orphaned")
    started = launch(run, "orphaned", extra=("--train.epochs", "50"))
    await_checkpoint(run, "orphaned")
    others = descendants(started.pid)
    started.kill()
    started.wait()
    _, alive = psutil.wait_procs(others, timeout=60)
    assert not alive
    assert latest_checkpoint(run.folder / "orphaned" / "train") is not None


def test_two_machines_on_loopback_train_as_one_process(run: TinyRun) -> None:
    run.copy("machines")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = []
    for machine in (0, 1):
        keys = {"num_machines": 2, "machine_rank": machine, "main_process_ip": "127.0.0.1", "main_process_port": port}
        files.append(run.folder / f"machine-{machine}.yaml")
        files[-1].write_text(yaml.safe_dump(yaml.safe_load(TWO_CPUS.read_text()) | keys))
    second = launch(run, "machines", files[1])
    first = launch(run, "machines", files[0])
    said = [one.communicate(timeout=400)[1] for one in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert f"waiting for machine 0 at 127.0.0.1:{port}" in said[1]
    assert "machine 0 goes on with what comes next" in said[1]
    run.check_same("machines")
