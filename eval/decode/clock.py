"""Measure wall-clock time in laps that wait for the device, and the peak of its memory."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Stopwatch:
    """Sum up the seconds of laps by name; `last` is the latest lap.

    wait: wait for a GPU before reading the clock; without it laps mean little there, but decoding is not slowed
    down."""

    def __init__(self, device: torch.device | str = "cpu", wait: bool = True) -> None:
        self.device, self.wait = torch.device(device), wait
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = 0.0
        self._last = self._now()

    def _now(self) -> float:
        if self.wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = self._now()
        self.last = now - self._last
        self.seconds[name] += self.last
        self._last = now


@dataclass
class Peak:
    """The largest GPU memory in use at once, in bytes; None without a GPU."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measure the peak of a GPU's memory while the block runs; the yielded Peak is filled at its end."""
    device, peak = torch.device(device), Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak.bytes = torch.cuda.max_memory_allocated(device)
