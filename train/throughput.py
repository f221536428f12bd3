"""The clock of a training process, and Ctrl-C between steps."""

import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_ONE_PRESS = 1.0
"""Seconds in which signals are one press of Ctrl-C: the terminal sends it to every process, and torchrun to its own."""


@dataclass
class Pace:
    """Clock readings of this process: they never reach files that a resume must reproduce."""

    first_tokens: int
    seconds: float = 0.0
    saved_at: float = field(default_factory=time.perf_counter)

    def speed(self, tokens: int) -> float:
        """Tokens per second of training since the process began, evaluations and checkpoints left out."""
        return (tokens - self.first_tokens) / max(self.seconds, 1e-9)


class Interrupt:
    """Turns Ctrl-C into a wish that the loop grants between two steps, where every state is whole."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers; elsewhere Ctrl-C keeps its usual meaning.
        self._usual: Any = None
        if threading.current_thread() is threading.main_thread():
            self._usual = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        if self.asked and time.monotonic() - self._since > _ONE_PRESS:
            # The second Ctrl-C does not wait.
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._since = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
