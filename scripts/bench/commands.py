"""What benches share: commands of draftsmith in processes of their own, each with a log, and how a result is kept."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import last_line
from draftsmith.machine import environment_json
from draftsmith.storage import write_json


def facts_of(bench: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return a bench's command, and the machine and versions that it ran with."""
    return {"command": shlex.join(["python", "-m", f"scripts.bench.{bench}", *argv]), **environment_json()}


def keep(output: Path | None, facts: dict[str, Any], shown: dict[str, Any] | None = None) -> int:
    """Write a result to `output`, if that is named, and print it, or what is `shown` of it; return 0."""
    if output:
        write_json(output, facts)
    print(json.dumps(shown or facts, indent=2))
    return 0


def run_command(command: str, words: Sequence[str], log: Path) -> str:
    """Run a command of draftsmith, whose output goes to `log`; return the log's last line where it fails, else nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    call = [sys.executable, "-m", "draftsmith.cli.main", command, *words]
    # Lines in the order in which they are said: the error is the last.
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(call, stdout=output, stderr=subprocess.STDOUT, env=env, check=False)
    return last_line(log.read_text(encoding="utf-8")) if done.returncode else ""
