"""Which samples go through the target together: little padding, and the same batches in every run."""

from collections.abc import Sequence
from dataclasses import dataclass

# Batches are formed inside windows of this many times batch_tokens: long enough for little padding, short enough
# that a window's features stay in memory (0.5 GB for an 8B target with three layers at the default).
WINDOW_BATCHES = 8


@dataclass(frozen=True)
class Window:
    """Consecutive samples start..end-1 and the forward passes that compute them, each a tuple of sample numbers."""

    start: int
    end: int
    batches: tuple[tuple[int, ...], ...]


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, ...]]:
    """Group numbers 0..len-1 by falling length so that rows * longest row <= batch_tokens (one row may exceed it)."""
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if current and (len(current) + 1) * lengths[current[0]] > batch_tokens:
            batches.append(tuple(current))
            current = []
        current.append(number)
    return [*batches, tuple(current)] if current else batches


def plan_windows(lengths: Sequence[int], batch_tokens: int) -> list[Window]:
    """Cut the samples, in order, into windows and each window into batches.

    A pure function of its arguments: the rounding of a state depends on the batch it was computed in, so a resumed
    run must form the same batches.
    """
    windows: list[Window] = []
    start = tokens = 0
    for end, length in enumerate(lengths, start=1):
        tokens += length
        if tokens >= WINDOW_BATCHES * batch_tokens or end == len(lengths):
            batches = plan_batches(lengths[start:end], batch_tokens)
            windows.append(Window(start, end, tuple(tuple(start + i for i in batch) for batch in batches)))
            start, tokens = end, 0
    return windows
