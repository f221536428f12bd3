"""Which process of a training this is, as launchers tell it by environment variables."""

import os
import socket
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import UserError
from draftsmith.train.stopping import LAUNCHED


@dataclass(frozen=True)
class World:
    """The place of this process among those of a training: rank of size, local_rank on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def world() -> World:
    """Return what the launcher told this process. Raises UserError for variables that cannot be."""
    rank, size, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if size is None or size == 1:
        for name, value in (("RANK", rank), ("LOCAL_RANK", local)):
            if value:
                said = "is not set" if size is None else "is 1"
                raise UserError(
                    f"{name} is {value} in the environment, but WORLD_SIZE {said}: launchers set both; unset {name}."
                )
        return World()
    given: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR"),
        "MASTER_PORT": _port(),
    }
    for name, said_of in given.items():
        if said_of in (None, ""):
            raise UserError(
                f"WORLD_SIZE is {size} in the environment, but {name} is not set: start with torchrun or `accelerate launch`, which "
                "set it, or unset WORLD_SIZE to work in one process."
            )
    assert rank is not None
    assert local is not None
    for name, value in (("RANK", rank), ("LOCAL_RANK", local)):
        if value >= size:
            raise UserError(
                f"{name} is {value} in the environment, but WORLD_SIZE is {size}: ranks go from 0 to WORLD_SIZE - 1."
            )
    return World(rank, size, local)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    least = 1 if name == "WORLD_SIZE" else 0
    if not (text.isascii() and text.isdecimal() and len(text) < 7) or int(text) < least:
        raise UserError(
            f"{name} is {text[:40]!r} in the environment, and not a whole number from {least}: unset it, or start with torchrun or "
            "`accelerate launch`, which set it."
        )
    return int(text)


def _port() -> int | None:
    port = _number("MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT is {port} in the environment: a port is a number from 1 to 65535.")
    return port


def check_started() -> None:
    """Raise UserError where more processes were asked for than a training would have."""
    size, remedy = (
        world().size,
        "accelerate/ddp-8gpu for GPUs and accelerate/ddp-2cpu for CPUs, which `draftsmith recipes` shows",
    )
    asked = os.environ.get(LAUNCHED, "")
    if asked.isdecimal() and int(asked) != size:
        raise UserError(
            f"The launch file asks for {asked} processes, but {size} would train: take distributed_type MULTI_GPU, as in {remedy}."
        )
    if size > 1:
        return
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        # What accelerate sets for several processes that it leaves to MPI to start.
        raise UserError(
            "`accelerate launch` was asked for several processes but started one, as it does on CPUs (MULTI_CPU) and without "
            f"--multi_gpu: pass --config_file with one like {remedy}; for one process pass --num_processes 1 and unset MASTER_ADDR."
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if (os.environ.get(name, "").isdecimal()) and int(os.environ[name]) > 1 and "WORLD_SIZE" not in os.environ:
            raise UserError(
                f"{name} is {os.environ[name]}, but WORLD_SIZE is not set, so that each of these processes would train alone: start "
                f"one torchrun per machine, with train/head.py, or unset {name}."
            )
