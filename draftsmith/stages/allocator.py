"""Large tensors on the CPU without a visit to the kernel each time.

glibc gives a tensor of 32 MiB or more a mapping of its own, and takes it back when the tensor is freed: every use then
touches fresh pages, which the kernel has to clear first. A training step makes dozens of such tensors, over and over.
"""

import ctypes
import sys

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let malloc keep what large tensors leave behind, for the next ones; return whether it could be told.

    Memory stays with the process until it ends, at most as much as was in use at once. Does nothing outside glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT), (_M_TOP_PAD, 64 * 2**20))
    told = [mallopt(name, value) == 1 for name, value in settings]
    return all(told)
