"""What torchrun starts in test_processes.py.

launched.py train ...                  # the command line under FSDP2 or DeepSpeed on CPUs, which only tests do
launched.py several FOLDER METHOD ...  # FOLDER/METHOD is a TinyRun, whose run "two" is trained: one pair of processes for all

Accelerate keeps FSDP2 and DeepSpeed for GPUs: this sets up its process state over gloo first, and keeps it from choosing plain CPU
processes. STOP_AT=N in the environment presses Ctrl-C in step N.
"""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState

from draftsmith.cli.main import main
from draftsmith.train import loop
from tests.train.runs import TinyRun


class Accelerator(accelerate.Accelerator):
    """Does not insist on plain CPU processes, as the loop asks for a target on the CPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"cpu": False}))


def join_processes() -> None:
    """Start gloo, and let Accelerate think of GPUs where it shards on nothing else."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # An all-reduce in shared memory, which takes a minute to compile; gloo does.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    state = PartialState(cpu=False, backend="gloo")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state.distributed_type = DistributedType.MULTI_GPU
    accelerate.Accelerator = Accelerator


def press_ctrl_c(step: int) -> None:
    """Interrupt the first process when it sets the learning rate of that step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell has ignored
    real, calls = loop.set_lr, [0]

    def set_lr(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == step and PartialState().is_main_process:
            signal.raise_signal(signal.SIGINT)
        real(*args)

    loop.set_lr = set_lr


def train_several(folder: Path, methods: list[str]) -> int:
    """Train the run "two" of each method; return the worst exit code."""
    codes = []
    for method in methods:
        # Checkpoints all the time: the processes must agree on when.
        words = [*TinyRun(folder / method, method).words("two"), "--train.checkpoint_minutes", "0.001"]
        codes.append(main(["train", *words]))
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return max(codes)


if __name__ == "__main__":
    if sys.argv[1] == "several":
        code = train_several(Path(sys.argv[2]), sys.argv[3:])
    else:
        join_processes()
        if "STOP_AT" in os.environ:
            press_ctrl_c(int(os.environ["STOP_AT"]))
        code = main(sys.argv[1:])
    PartialState().wait_for_everyone()
    # Gloo often aborts while the interpreters exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
