"""Wall-clock laps that wait for the device before reading the clock, and the peak of its memory."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Stopwatch:
    """Adds the seconds since the last lap to a named sum; `last` is the latest lap.

    wait: wait for a GPU before reading the clock; without it laps mean little there, but nothing is held up."""

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
        """Book the time since the last lap under `name`."""
        now = self._now()
        self.last = now - self._last
        self.seconds[name] += self.last
        self._last = now


@dataclass
class Peak:
    """bytes: the largest GPU memory that was in use at once; None without a GPU."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Watch the memory of a GPU while the block runs; fills the yielded Peak at its end."""
    device, peak = torch.device(device), Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak.bytes = torch.cuda.max_memory_allocated(device)
