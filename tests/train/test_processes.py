"""Two processes give the trajectory of one with twice the accumulation: for every method, sharded by FSDP2 and ZeRO-2, launched, stopped,
killed and resumed, and on machines that meet.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from draftsmith.cli.main import main
from draftsmith.heads.registry import methods
from draftsmith.train.checkpoints import latest_checkpoint
from tests.train.runs import ROOT, TinyRun, launch_two, make_run

pytestmark = pytest.mark.slow

LAUNCHED = str(ROOT / "tests" / "train" / "launched.py")
IN_ONE_PAIR = sorted(set(methods()) - {"eagle3"})


def check(run: TinyRun, said: str) -> None:
    progress = [run.progress(name) for name in ("one", "two")]
    assert [p["window"] for p in progress] == [2, 2], said
    assert [p["layout"] for p in progress] == ["plain", "plain"]
    run.check_same("two")


def test_the_real_command_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, "eagle3")
    run.copy("two")
    script = [f"train/{methods()['eagle3'].launcher}", "--train.checkpoint_minutes", "0.001"]
    check(run, run.launch("two", script, {"ACCELERATE_USE_CPU": "true"}))


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, TinyRun], str]:
    """A run of every other method, each trained by one process, and all of them by one pair."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {method: make_run(folder / method, method) for method in IN_ONE_PAIR}
    for run in runs.values():
        run.copy("two")
    script = [LAUNCHED, "several", str(folder), *IN_ONE_PAIR]
    return runs, launch_two(script, {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("method", IN_ONE_PAIR)
def test_two_processes_are_one_with_twice_the_accumulation(
    method: str, trained: tuple[dict[str, TinyRun], str]
) -> None:
    runs, said = trained
    check(runs[method], said)
    runs[method].check_heldout("two")
    # Counts with wishes, and the step's sums.
    assert json.loads((runs[method].folder / "collectives.json").read_text()) == [2], said


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def launcher_environment(name: str) -> dict[str, str]:
    """Return what `accelerate launch --config_file` would tell its processes."""
    file = ROOT / "recipes" / "accelerate" / f"{name}.yaml"
    args = launch_command_parser().parse_args(["--config_file", str(file), "train/eagle.py"])
    args, defaults, _ = _validate_launch_command(args)
    return _told(args, list(defaults.deepspeed_config))


def _told(args: argparse.Namespace, deepspeed_fields: list[str]) -> dict[str, str]:
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(deepspeed_fields)
        told = prepare_deepspeed_cmd_env(args)[1]
    else:
        told = prepare_multi_gpu_env(args)
    return {key: value for key, value in told.items() if os.environ.get(key) != value and key != "PYTHONPATH"}


# A head alone, and one that tunes its target, whose model is no part of what is sharded.
WAYS = [
    ("eagle3", "fsdp2-8gpu", "FSDP2"),
    pytest.param("medusa2", "zero2-8gpu", "DeepSpeed on 2 processes", marks=needs_deepspeed),
    ("medusa2", "fsdp2-8gpu", "FSDP2"),
    pytest.param("eagle3", "zero2-8gpu", "DeepSpeed on 2 processes", marks=needs_deepspeed),
    ("dflash", "fsdp2-8gpu", "FSDP2"),
]


@pytest.mark.parametrize(("method", "name", "layout"), WAYS)
def test_interrupted_and_resumed_shards_train_as_one_process(
    method: str, name: str, layout: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path, method)
    run.copy(name)
    script = [LAUNCHED, "train"]
    environment = launcher_environment(name) | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    said = run.launch(name, script, environment | {"STOP_AT": "20"})
    assert "run the same command again" in said
    assert len(run.metrics(name)) == 21, "processes agree on the end at the next step's count"
    assert run.progress(name)["layout"] == layout
    said = run.launch(name, script, environment)
    assert (run.folder / name / "train" / "summary.json").exists(), said
    assert run.progress(name)["window"] == 2, "two processes with accumulation 1"
    run.check_same(name)
    run.check_heldout(name)


TWO_CPUS = ROOT / "recipes" / "accelerate" / "ddp-2cpu.yaml"
OFTEN = ["--train.checkpoint_minutes", "0.0001"]


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("launched"))


def launch(
    run: TinyRun, name: str, file: Path = TWO_CPUS, extra: tuple[str, ...] = (), command: str = "train"
) -> subprocess.Popen[str]:
    words = [command, *run.words(name), *OFTEN, *extra, "--launch", str(file)]
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


def test_answers_and_hidden_states_are_made_by_all(run: TinyRun) -> None:
    """In chunks, with the bytes of one process; then training goes on in the same processes, without tokenizing again."""
    small = ["--answers.batch", "2", "--features.batch_tokens", "64"]
    assert main(["extract", *run.words("alone"), *small]) == 0
    started = launch(run, "shared", extra=tuple(small), command="extract")
    _, said = started.communicate(timeout=300)
    assert started.returncode == 0, said
    assert not sentences(said)
    files = [
        {
            file.name: file.read_bytes()
            for folder in (made, made / "features")
            for file in folder.iterdir()
            if file.suffix != ".json" and file.is_file()
        }
        for made in (run.folder / name for name in ("alone", "shared"))
    ]
    assert files[0] == files[1]
    assert {"answers.jsonl", "ids.bin", "shard-00000.safetensors"} <= files[0].keys()
    assert main(["train", *run.words("alone"), *small, "--train.accumulation", "2"]) == 0
    started = launch(run, "shared", extra=tuple(small))
    _, said = started.communicate(timeout=300)
    assert started.returncode == 0, said
    heads = [load_file(run.folder / name / "train" / "best" / "model.safetensors") for name in ("alone", "shared")]
    assert all(float((heads[1][key] - value).abs().max()) < 5e-5 for key, value in heads[0].items())


def test_more_processes_than_samples_are_refused_and_nothing_is_lost(run: TinyRun) -> None:
    started = launch(run, "few", extra=("--data.limit", "1"), command="extract")
    _, said = started.communicate(timeout=300)
    assert started.returncode == 2, said
    (sentence,) = sentences(said)
    assert "2 processes were started for 1 samples" in sentence
    assert main(["extract", *run.words("few"), "--data.limit", "1"]) == 0


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
