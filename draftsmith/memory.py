"""Memory of freed tensors on a CPU: kept for the next ones, and given back where they leave too much of it unused."""

import ctypes
import sys
from dataclasses import dataclass

import psutil

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
