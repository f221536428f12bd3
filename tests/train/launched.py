"""What torchrun starts in test_processes.py.

launched.py train ...                  # the command line under FSDP2 or DeepSpeed on CPUs, which only tests do
launched.py several FOLDER METHOD ...  # FOLDER/METHOD is a TinyRun, whose run "two" is trained: one pair of processes for all

Accelerate keeps FSDP2 and DeepSpeed for GPUs: this sets up its process state over gloo first, and keeps it from choosing plain CPU
processes. STOP_AT=N in the environment presses Ctrl-C in step N. What held-out passes find goes to OUTPUT/heldout-RANK.json.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import accelerate
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from torch import distributed

from draftsmith.cli.main import main
from draftsmith.train import loop, metrics
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


def note_heldout() -> list[dict[str, Any]]:
    """Make what passes over held-out answers find alone, too, as one process does; return what is noted of each, by then and later."""
    noted: list[dict[str, Any]] = []
    reads, read = [0], metrics.read_batch

    def count(*args: Any) -> Any:
        reads[0] += 1
        return read(*args)

    def twice(real: Any) -> Any:
        def found(*args: Any) -> Any:
            shared, reads[0] = [], 0
            shared.append(real(*args))
            share, reads[0] = reads[0], 0
            joined, distributed.is_initialized = distributed.is_initialized, lambda: False
            try:
                shared.append(real(*args))
            finally:
                distributed.is_initialized = joined
            figures = [one if isinstance(one, dict) else asdict(one) for one in shared]
            noted.append(
                {"what": real.__name__, "shared": figures[0], "alone": figures[1], "passes": [share, reads[0]]}
            )
            return shared[0]

        return found

    metrics.read_batch = count
    loop.evaluate_heldout, loop.calibrate_best = twice(loop.evaluate_heldout), twice(loop.calibrate_best)
    return noted


def note_collectives() -> set[int]:
    """Return what holds the numbers of messages of ours that the processes waited for in a step; those of gradients are DDP's own."""
    noted, calls, reduced, step = set[int](), [0], distributed.all_reduce, loop._Run._step

    def all_reduce(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return reduced(*args, **options)

    def counted(*args: Any) -> Any:
        calls[0] = 0
        taken = step(*args)
        noted.add(calls[0])
        return taken

    distributed.all_reduce, loop._Run._step = all_reduce, counted
    return noted


def train_and_note(words: list[str], noted: list[dict[str, Any]]) -> int:
    """Run a command line, and write what is noted to its output folder; return its exit code."""
    code = main(words)
    file = Path(words[words.index("--output_dir") + 1]) / f"heldout-{PartialState().process_index}.json"
    file.write_text(json.dumps(noted))
    noted.clear()
    return code


def train_several(folder: Path, methods: list[str], noted: list[dict[str, Any]]) -> int:
    """Train the run "two" of each method; return the worst exit code."""
    codes, collectives = [], note_collectives()
    for method in methods:
        # Checkpoints all the time: the processes must agree on when.
        words = [*TinyRun(folder / method, method).words("two"), "--train.checkpoint_minutes", "0.001"]
        codes.append(train_and_note(["train", *words], noted))
        (folder / method / "collectives.json").write_text(json.dumps(sorted(collectives)))
        collectives.clear()
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return max(codes)


if __name__ == "__main__":
    heldout = note_heldout()
    if sys.argv[1] == "several":
        code = train_several(Path(sys.argv[2]), sys.argv[3:], heldout)
    else:
        join_processes()
        if "STOP_AT" in os.environ:
            press_ctrl_c(int(os.environ["STOP_AT"]))
        code = train_and_note(sys.argv[1:], heldout)
    PartialState().wait_for_everyone()
    # Gloo often aborts while the interpreters exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
