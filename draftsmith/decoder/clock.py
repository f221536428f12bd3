"""Measure wall-clock time in laps that wait for the device."""

import time
from collections import defaultdict

import torch


class Stopwatch:
    """Sum up the seconds of laps by name; `last` is the latest lap.

    wait: wait for a GPU before reading the clock; without it laps mean little there, but nothing is slowed down."""

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

    def skip(self) -> None:
        """Forget the time since the last lap."""
        self._last = self._now()
