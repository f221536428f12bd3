"""Describe the environment of a run: commit, hardware, versions and date. On a CPU, keep the memory of freed tensors for the next ones, and
give it back where they leave too much of it unused."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import draftsmith

_CONTAINER = Path("/sys/fs/cgroup")
"""Where a container's memory stands; of a machine itself its root has no such files."""


@dataclass(frozen=True)
class Hardware:
    """The machine. cores: logical processors this process may use; threads: what torch computes with."""

    cpu: str
    cores: int
    threads: int
    memory_gib: float | None
    gpu: str | None


@dataclass(frozen=True)
class Clocks:
    """How quiet the machine was while it was timed.

    wall_s, cpu_s: seconds by the clock, and of this process on all cores. others: share of all cores that other programs used, None
    where this process does not see the whole machine. load: mean length of the queue for a core when it ended, None where the
    system does not say.
    """

    wall_s: float
    cpu_s: float
    others: float | None
    load: float | None

    @classmethod
    def together(cls, parts: "Sequence[Clocks]") -> "Clocks":
        """Return the clocks of several stretches of time; `load` is the highest."""
        wall, cpu = sum(c.wall_s for c in parts), sum(c.cpu_s for c in parts)
        known = [(c.others, c.wall_s) for c in parts if c.others is not None]
        others = sum(share * seconds for share, seconds in known) / wall if len(known) == len(parts) and wall else None
        return cls(wall, cpu, others, max((c.load for c in parts if c.load is not None), default=None))


class ClockWatch:
    """Watches the machine from its making on."""

    def __init__(self) -> None:
        self._wall, self._own, self._all = time.perf_counter(), time.process_time(), _busy_seconds()

    def read(self) -> Clocks:
        """Return what has happened since."""
        wall, own = time.perf_counter() - self._wall, time.process_time() - self._own
        cores = psutil.cpu_count() or 1
        whole = cores == available_cores() and wall > 0
        others = max(0.0, _busy_seconds() - self._all - own) / (wall * cores) if whole else None
        return Clocks(wall, own, others, os.getloadavg()[0] if hasattr(os, "getloadavg") else None)


def _busy_seconds() -> float:
    """Return the seconds that all cores together have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def command_line() -> str:
    """Return the command of draftsmith that is at work, as it is typed."""
    return shlex.join(["draftsmith", *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """Return `commit`, `date`, `hardware` and `versions` as `Result(**environment(), ...)` takes them.

    date: in UTC. versions: of python and of the packages that decide the numbers.
    """
    versions = {"python": platform.python_version(), "draftsmith": draftsmith.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "transformers")}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": git_commit(), "date": date, "hardware": hardware(), "versions": versions}


def environment_json() -> dict[str, Any]:
    """Return `environment()` as plain JSON."""
    facts = environment()
    return facts | {"hardware": asdict(facts["hardware"])}


def git_commit(folder: str | Path = ".") -> str | None:
    """Return the commit of the git checkout around `folder`, with "-dirty" if modified; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> Hardware:
    """Describe the machine this process runs on."""
    gib = round(psutil.virtual_memory().total / 2**30, 1)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Hardware(cpu_name(), available_cores(), torch.get_num_threads(), gib, ", ".join(gpus) or None)


def cpu_name() -> str:
    """Return the name of the processor, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def memory_of(device: torch.device | str) -> int:
    """Return the bytes of memory where a device computes: the GPU's, or the machine's, its container's if that is less."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    bound = _CONTAINER / "memory.max"
    limit = bound.read_text(encoding="utf-8").strip() if bound.is_file() else ""
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdecimal() else total


def available_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, at most those that it has for this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, most = psutil.virtual_memory().available, memory_of(device)
    if most == psutil.virtual_memory().total:
        return free
    taken, held = ((_CONTAINER / name).read_text(encoding="utf-8") for name in ("memory.current", "memory.stat"))
    files = dict(line.split() for line in held.splitlines())  # what gives way
    return max(0, min(free, most - int(taken) + int(files["active_file"]) + int(files["inactive_file"])))


def emulates_bf16(device: str) -> bool:
    """Whether a device computes in bf16 ten times slower than in fp32, or worse.

    Where a CPU has AVX512 but no instruction for bf16, products are made by way of fp32, at about its speed.
    """
    return device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


@cache
def faster_in_bf16(device: torch.device) -> bool:
    """Whether a device's products take clearly less time in bf16 than in fp32.

    A CPU that has instructions for it is timed, for a twentieth of a second: some that have AVX512-BF16 without AMX are slower with it.
    """
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    rows, weight = torch.ones(256, 768), torch.ones(768, 768)
    best = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    for _ in range(8):  # in turns, as the machine may be busy
        for dtype in best:
            x, w = rows.to(dtype), weight.to(dtype)
            started = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best[torch.bfloat16] < 0.8 * best[torch.float32]  # what is as fast shall not change from run to run


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second with which the device reads memory, the best of a few sums over a quarter of a GiB."""
    block = torch.ones(2**26, device=device)
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        block.sum().item()  # which waits for a GPU
        best = min(best, time.perf_counter() - started)
    return block.numel() * block.element_size() / best


# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT = 2**31 - 1
_GROWTH = 1.5
"""How much more memory than one step needs may be held."""


def keep_freed_memory() -> bool:
    """Let malloc keep the memory of freed tensors for the next ones; return whether malloc accepted the settings.

    glibc gives a tensor of 32 MiB or more a mapping of its own, and takes it back when the tensor is freed: every use
    then touches fresh pages, which the kernel has to clear first, dozens of times in a training step. Kept memory stays
    with the process, and grows where sizes change from step to step (`HeldMemory`). Does nothing outside glibc.
    """
    mallopt = _function("mallopt")
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT), (_M_TOP_PAD, 64 * 2**20))
    return mallopt is not None and all([mallopt(name, value) == 1 for name, value in settings])  # noqa: C419 - every setting is made


@dataclass
class HeldMemory:
    """Bounds what this process holds, for a loop whose tensors have other sizes in every step.

    A freed tensor leaves a hole that a larger one does not fit into, so that the heap grows without end; the pages of all holes
    are given back once it is half as large again as after one step. needed: bytes after a step that began without holes.
    """

    needed: int | None = None

    def step_ended(self) -> bool:
        """Give holes back where they have become too many, and return whether they had."""
        trim = _function("malloc_trim")
        if trim is None:
            return False
        held = psutil.Process().memory_info()
        own = held.rss - held.shared
        if self.needed is None:
            self.needed = own
        if own <= _GROWTH * self.needed:
            return False
        trim(0)
        self.needed = None
        return True


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    """Return a function of glibc, None where another C library is used."""
    try:
        return getattr(ctypes.CDLL(None), name) if sys.platform.startswith("linux") else None
    except (OSError, AttributeError):
        return None
