"""Progress on standard error: lines of text, and a bar for each long piece of work, which is a line now and then in a log."""

import os
import sys
from typing import Any

from tqdm import tqdm

from draftsmith.errors import printable

QUIET = "DRAFTSMITH_QUIET"
"""The environment variable by which `--quiet` reaches this process and those that it starts."""
SAID = "DRAFTSMITH_SAID"
"""The environment variable by which processes that are started here learn which warnings have been printed."""
_LOG_SECONDS = 30
"""Seconds between two lines of a bar that is not on a terminal."""
_SMOOTHING = 0.1
"""The weight of the time since a bar was last drawn in the rate that it shows; a line in a log has the rate since the last line."""
_LINE = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_WARNING = "warning: "
_said: set[str] = set()


def say(text: str, *, once: bool = False, kept: bool = False) -> None:
    """Print a line of progress; results go to standard output. A warning is printed once, and what is said to be so, also where
    several processes find it; with `--quiet` nothing but warnings, the verdict and what is `kept`."""
    if text in _said or (os.environ.get(QUIET) and not kept and not text.startswith((_WARNING, "verdict: "))):
        return
    if once or text.startswith(_WARNING):
        _said.add(text)
    tqdm.write(printable(text), file=sys.stderr)  # above the bars
    sys.stderr.flush()


def hush(*texts: str) -> None:
    """Take lines as printed: what they say is known, or a process that was started here has said it."""
    _said.update(texts)


def said() -> dict[str, str]:
    """Return the environment variable for processes that are started here, so that they do not repeat what is said once."""
    return {SAID: "\n".join(sorted(_said))}


def warn_anew() -> None:
    """Let lines be said again that were said before, but not by the process that started this one."""
    _said.clear()
    _said.update(filter(None, os.environ.get(SAID, "").split("\n")))


def choose_progress(*, quiet: bool) -> None:
    """Choose what is printed from here on. quiet: warnings alone. Libraries show no bars where ours are lines, or none; call this
    before they are imported."""
    if quiet:
        os.environ[QUIET] = "1"
    if _off() or not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):  # transformers obeys the first one
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def _off() -> bool:
    return bool(os.environ.get(QUIET)) or os.environ.get("TQDM_DISABLE", "0").lower() not in ("", "0", "false")


class Bar(tqdm):
    """tqdm's bar, whose rate is the recent one.

    Not on a terminal it is a line at the start, every 30 seconds and at the end. TQDM_DISABLE and `--quiet` turn it off.
    """

    disable: bool

    def __init__(self, *args: Any, file: Any = None, disable: bool = False, **kwargs: Any) -> None:
        file = sys.stderr if file is None else file
        self._in_log = not file.isatty()
        self._said_at: float | None = None
        self._said_n: float | None = None
        if self._in_log:
            # The last two keep tqdm from deciding itself when to print.
            kwargs |= {"bar_format": _LINE, "mininterval": _LOG_SECONDS, "miniters": 1}
        smoothing = 1.0 if self._in_log else _SMOOTHING
        super().__init__(*args, file=file, disable=disable or _off(), smoothing=smoothing, **kwargs)

    def skip(self, count: int) -> None:
        """Count what an earlier process did: it has no part in the rate, from which the time that is left follows."""
        if self.disable:
            return
        self.initial += count
        self.last_print_n += count
        self.n += count
        self.refresh()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Show it as it is now; in a log at most every 30 seconds."""
        if not self._in_log:
            return super().display(msg, pos)  # type: ignore[no-any-return]
        now = self._time()
        if self._said_at is None or now - self._said_at > _LOG_SECONDS - 0.1:  # tqdm's own clock is a little ahead
            self._print(now)
        return True

    def clear(self, nolock: bool = False) -> None:
        """Take the bar off the terminal; a line in a log stays."""
        if not self._in_log:
            super().clear(nolock)

    def close(self) -> None:
        """End with how far it came."""
        if not self.disable and self._in_log:
            if self.n != self._said_n:
                self._ema_dt = lambda: None  # the rate over all, as tqdm ends with
                self._print(self._time())
            self.disable = True
            self._decr_instances(self)
        else:
            super().close()

    def _print(self, now: float) -> None:
        self._said_at, self._said_n = now, self.n
        self.fp.write(f"{self}\n")
        self.fp.flush()
