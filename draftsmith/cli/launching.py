"""`--launch FILE` of `draftsmith run` and `train`: training in processes of their own, as `accelerate launch` starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import draftsmith.train
from draftsmith.cli.commands import LAUNCHED
from draftsmith.errors import UserError
from draftsmith.heads.registry import find_method
from draftsmith.recipe.schema import TrainSpec
from draftsmith.stages.pipeline import make_stages
from draftsmith.stages.session import Session
from draftsmith.train.parallel import check_launch, launch_settings


def check_config(spec: TrainSpec, config: str) -> None:
    """Refuse a launch file that is missing, cannot start here or contradicts the recipe, before answers and hidden
    states are made."""
    if not Path(config).exists():
        raise UserError(f"There is no accelerate configuration at {config}: recipes/accelerate/ holds examples.")
    settings = launch_settings(Path(config))
    check_launch(spec, Path(config))
    here = int(settings.get("num_processes", "1")) // max(1, int(settings.get("num_machines", "1")))
    gpus = torch.cuda.device_count()
    if here > max(1, gpus) and settings.get("use_cpu", "false").lower() != "true":
        raise UserError(
            f"{config} asks for {here} processes on this machine, which has {gpus} GPUs: set num_processes to what you "
            "have, or take recipes/accelerate/one-gpu.yaml or cpu.yaml."
        )


def find_script(method: str) -> Path:
    """Return the file in train/ that `accelerate launch` starts for a method."""
    return Path(next(iter(draftsmith.train.__path__))) / find_method(method).launcher


def train(session: Session, config: str, words: list[str]) -> None:
    """Make answers and hidden states here, then train as `accelerate launch --config_file CONFIG train/head.py` would, in
    processes of their own. words: those of the recipe, again.

    Ctrl-C reaches the training itself, which saves a checkpoint; this process waits for it.
    """
    make_stages(session, "extract")
    if "train" in session.redo:
        session.run.clear("train")
        session.redo.discard("train")
    session.drop_target()
    # Quiet: the launcher's own stack trace would bury the sentence of the training.
    options, script = ["--quiet", "--config_file", config], find_script(session.recipe.method)
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script), *words]
    interrupted = []
    # What is ignored stays so in the launcher, which would leave before its child; the child sees LAUNCHED and undoes it.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, env=os.environ | {LAUNCHED: "1"})
        signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, usual)
    if code and interrupted:
        raise KeyboardInterrupt
    if code:
        raise UserError(f"Training ended with exit code {code}: its own message is above.")
