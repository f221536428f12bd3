"""Commands of draftsmith in processes of their own, each with a log."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import last_line


def run_command(command: str, words: Sequence[str], log: Path) -> str:
    """Run a command of draftsmith, whose output goes to `log`; return the log's last line where it fails, else nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    call = [sys.executable, "-m", "draftsmith.cli.main", command, *words]
    # Lines in the order in which they are said: the error is the last.
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(call, stdout=output, stderr=subprocess.STDOUT, env=env, check=False)
    return last_line(log.read_text(encoding="utf-8")) if done.returncode else ""
