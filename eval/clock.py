"""Wall-clock laps that wait for the device before reading the clock."""

import time
from collections import defaultdict

import torch


class Stopwatch:
    """Adds the seconds since the last lap to a named sum."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = self._now()
        self.seconds[name] += now - self._last
        self._last = now
