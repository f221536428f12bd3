"""Where a run computes: the device, the processes that share it, and how memory of the CPU is kept."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.errors import UserError
from draftsmith.train.meeting import STEP, meeting
from draftsmith.train.world import world

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT = 2**31 - 1


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


def keep_freed_memory() -> bool:
    """Let malloc keep the memory of freed tensors for the next ones; return whether malloc accepted the settings.

    glibc gives a tensor of 32 MiB or more a mapping of its own, and takes it back when the tensor is freed: every use
    then touches fresh pages, which the kernel has to clear first, dozens of times in a training step. Kept memory stays
    with the process until it ends, at most as much as was in use at once. Does nothing outside glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT), (_M_TOP_PAD, 64 * 2**20))
    return all([mallopt(name, value) == 1 for name, value in settings])  # noqa: C419 - every setting is made
