"""Where a run computes: the device, and the processes that share it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.errors import UserError
from draftsmith.memory import keep_freed_memory
from draftsmith.train.meeting import STEP, meeting
from draftsmith.train.world import world


def choose_device(named: str) -> str:
    """Return the device for `target.device`: auto takes a GPU if there is one. Raises UserError for one that is not here."""
    device = named
    if device != "auto" and device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"target.device is {device!r}: it is auto, cpu, cuda or cuda:N.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = world()
    if device == "cuda" and here.size > 1:
        device = f"cuda:{here.local_rank}"  # one GPU per process, also before Accelerate starts
        if here.local_rank >= torch.cuda.device_count() > 0:
            raise UserError(
                f"LOCAL_RANK is {here.local_rank}, but torch sees {torch.cuda.device_count()} GPU(s) here: start as many processes "
                "as there are GPUs."
            )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"target.device is {device!r} but torch sees no GPU here: use cpu, or run `draftsmith doctor`.")
    if device.startswith("cuda:") and here.size == 1:
        # Accelerate takes the current device, whatever the recipe says.
        torch.cuda.set_device(device)
    if device == "cpu":
        keep_freed_memory()
        # DeepSpeed, which Accelerate imports, warns where it finds no GPU by itself.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return device


@contextmanager
def main_process_first(device: str) -> Iterator[bool]:
    """Let one process make the files that all of them then reuse; yield whether this is that process."""
    met = meeting()
    if met is None:
        yield True
        return
    from accelerate import PartialState  # here, as it is slow to import and one process needs none

    PartialState(cpu=device == "cpu", timeout=STEP)
    with met.first() as first:
        yield first
