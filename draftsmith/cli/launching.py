"""`--launch FILE`: several processes make answers and hidden states and train, as `accelerate launch` starts them."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import draftsmith.train
from draftsmith.errors import UserError
from draftsmith.eval.training.history import read_history, tell
from draftsmith.heads.registry import find_method
from draftsmith.progress import hush, said, say
from draftsmith.recipe.parse import find_file
from draftsmith.recipe.record import DATA_STAGES
from draftsmith.recipe.schema import TrainSpec
from draftsmith.stages.data import kept_warnings
from draftsmith.stages.pipeline import COMMAND_STAGES, make_stages
from draftsmith.stages.session import Session
from draftsmith.stages.training import learned
from draftsmith.train.meeting import DATA, wait_for_port
from draftsmith.train.parallel import check_launch, launch_settings
from draftsmith.train.process import ENDING, LAUNCHED, check_started, on_signals, world

_ONE = ("NO", "MULTI_CPU")
"""Kinds of launch with which Accelerate starts one process, however many are asked for."""


@dataclass(frozen=True)
class Launch:
    """What a launch file asks for. processes: on all machines together. machine: the number of this one, from 0. address: of
    machine 0, "host:port"; empty for one machine."""

    config: str
    processes: int
    machine: int
    address: str


def check_launching(session: Session, config: str | None, command: str) -> Launch | None:
    """Return what the launch file `config` asks for, to carry out a command; None where none is named.

    Raises UserError for a launch that cannot start. Without a launch file this process may be one that a launcher started: then
    it raises where that launcher started another number of processes than it was asked for."""
    if config is None:
        check_started()
        return None
    if world().size > 1:
        raise UserError(
            f"WORLD_SIZE is {world().size}, but --launch starts processes itself: leave out one of the launchers."
        )
    recipe = session.recipe
    launch = check_config(recipe.train, config, session.device)
    if _spreads(session, launch):
        # Refused where its processes would load the layers of a target that one process spreads over their GPUs.
        if command not in ("run", "train"):
            raise UserError(
                f"target.gpus is {recipe.target.gpus}: one process makes answers and hidden states on these GPUs, so leave --launch out of "
                f"`draftsmith {command}`."
            )
        online = recipe.features.source == "online"
        if online or find_method(recipe.method).needs_layers(recipe.head):
            what, remedy = f"method: {recipe.method}", "leave"
            if online:
                what, remedy = "features.source: online", "set it to store, or leave"
            raise UserError(
                f"target.gpus is {recipe.target.gpus}, but with {what} each process of --launch needs all layers of the target on its own GPU: "
                f"{remedy} --launch out."
            )
    shared = recipe.target.tensor_parallel
    if command == "evaluate" and shared == 1:
        raise UserError(
            "`draftsmith evaluate` measures in one process, and in several only where these share the target: leave --launch out, or set "
            "target.tensor_parallel."
        )
    if launch.processes % shared:
        raise UserError(
            f"target.tensor_parallel is {shared}, but {launch.config} has num_processes: {launch.processes}: take a multiple of {shared}."
        )
    return launch


def _spreads(session: Session, launch: Launch) -> bool:
    """Return whether the target needs GPUs that other processes of the launch compute on."""
    return session.recipe.target.gpus > 1 and launch.processes > 1


def check_config(spec: TrainSpec, config: str, device: str = "cpu") -> Launch:
    """Return what a launch file asks for. device: the recipe's.

    Raises UserError where the file is missing, cannot start here or contradicts the recipe."""
    config = find_file(config)
    if not Path(config).exists():
        raise UserError(
            f"There is no accelerate configuration at {config}: name a file, or one of those that `draftsmith recipes` lists."
        )
    settings = launch_settings(Path(config))
    check_launch(spec, Path(config))
    machines, processes = (int(settings.get(key, "1")) for key in ("num_machines", "num_processes"))
    machine = int(settings.get("machine_rank", "0"))
    kind, cpu = settings["distributed_type"].upper(), settings.get("use_cpu", "false").lower() == "true"
    if processes > 1 and kind in _ONE:
        raise UserError(
            f"{config} asks for {processes} processes, but with distributed_type {kind} Accelerate starts one: set MULTI_GPU, as in "
            "accelerate/ddp-8gpu for GPUs and accelerate/ddp-2cpu for CPUs, which `draftsmith recipes` shows."
        )
    if processes % machines or machine >= machines:
        raise UserError(
            f"{config} has num_processes: {processes}, num_machines: {machines} and machine_rank: {machine}: every machine has as many "
            "processes, and machine_rank counts from 0."
        )
    address = ""
    if machines > 1:
        if "main_process_ip" not in settings or "main_process_port" not in settings:
            raise UserError(
                f"{config} has num_machines: {machines}: name an address of machine 0 with main_process_ip and main_process_port."
            )
        address = f"{settings['main_process_ip']}:{settings['main_process_port']}"
    here, gpus = processes // machines, torch.cuda.device_count()
    if here > max(1, gpus) and not cpu:
        raise UserError(
            f"{config} asks for {here} processes on this machine, which has {gpus} GPUs: set num_processes to what you "
            "have, or take --launch accelerate/one-gpu, accelerate/cpu or accelerate/ddp-2cpu."
        )
    if cpu and device != "cpu":
        raise UserError(f"{config} has use_cpu: true, but the recipe computes on {device}: add --target.device cpu.")
    return Launch(config, processes, machine, address)


def find_script(method: str) -> Path:
    """Return the file in train/ that `accelerate launch` starts for a method."""
    return Path(next(iter(draftsmith.train.__path__))) / find_method(method).launcher


def check_script(script: str | None, method: str) -> None:
    """Raise UserError where the file of train/ that was launched does not train the recipe's method."""
    if script is not None and find_method(method).launcher != script:
        raise UserError(
            f"train/{script} does not train the method {method!r} of the recipe: launch train/{find_method(method).launcher}, or "
            "train/head.py, which trains any."
        )


def train(session: Session, launch_: Launch, words: list[str]) -> bool:
    """Make answers and hidden states and train as `accelerate launch --config_file CONFIG train/head.py` would.

    Return whether this machine goes on with the other stages: of several machines the first. A signal reaches the processes, which
    save a checkpoint. words: the recipe's, for the processes.
    """
    session.processes = launch_.processes
    if not session.recipe.target.shared and learned(session):
        return not launch_.machine
    if _spreads(session, launch_) and not launch_.machine:
        # Here; the processes train from the store, for which they load no layers.
        make_stages(session, "train", train_here=False)
    launch(session, launch_, "train", words)
    past = read_history(session.recipe.run_dir)
    hush(f"train: reusing {session.run.path}", *(() if past is None else tell(past)))
    if launch_.machine:
        say("trained; machine 0 goes on with what comes next")
    return not launch_.machine


def launch(session: Session, asked: Launch, command: str, words: list[str]) -> None:
    """Carry out a command, one of `COMMAND_STAGES`, in the processes of a launch. Raises SystemExit where they fail."""
    if asked.machine:
        host, port = asked.address.rsplit(":", 1)
        say(f"waiting for machine 0 at {asked.address}")
        if not wait_for_port(host, int(port), DATA):
            raise UserError(
                f"Machine 0 did not begin at {asked.address} within {DATA.days} days: see there whether it is still at work."
            )
    session.drop_target()
    folder = session.recipe.run_dir / "train"
    main = [str(Path(__file__).with_name("main.py")), *command.split()]
    script = [str(find_script(session.recipe.method))] if command == "train" else main
    redo = [word for stage in COMMAND_STAGES[command] if stage in session.redo for word in ("--redo", stage)]
    session.redo.difference_update(COMMAND_STAGES[command])
    started = [str(folder), "--config_file", asked.config, *script, *words, *redo]
    if code := run_launcher(started, asked.processes):
        raise SystemExit(code)
    for stage in DATA_STAGES:
        warned = (f"warning: {text}" for text in kept_warnings(session, stage))
        hush(f"{stage}: reusing {session.directory(stage).path}", *warned)


def run_launcher(words: list[str], processes: int) -> int:
    """Run draftsmith/cli/launcher.py with `words` until it ends, pass signals on to it, and return its exit code."""
    asked: list[int] = []

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        process.send_signal(number)

    # No module of the working folder, nor of the script's, stands for one that is installed.
    environ = os.environ | {LAUNCHED: str(processes), "PYTHONSAFEPATH": "1"} | said()
    command = [sys.executable, "-m", "draftsmith.cli.launcher", *words]
    # In a session of its own, as torchrun gives the processes: the terminal sends Ctrl-C to this process alone, which hands it on.
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    with on_signals(hand_on, (signal.SIGINT, *ENDING)):
        code = process.wait()
    return 128 + asked[0] if code and asked else abs(code)
