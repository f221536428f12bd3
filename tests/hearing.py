"""Signals for tests of what they do."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hearing_signals() -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP heard, also where the tests were started in the background or under nohup; a decorator, too."""
    usual = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, before in usual.items():
            signal.signal(number, before)
