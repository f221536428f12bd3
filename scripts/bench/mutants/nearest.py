"""The tests of a file, run in forked processes: once to learn which of its lines each test reaches, then once a mutant.

Libraries are imported once, before the first fork; every process imports the product and the tests anew, from the copy.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.bench.mutants.mutate import Mutant

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = (
    *("torch", "transformers", "accelerate", "peft", "datasets", "safetensors.torch", "wandb", "jsonargparse"),
    *("pytest", "hypothesis", "yaml", "rich.console"),
)
_COLLECT_SECONDS = 90
_PATIENCE, _MORE_SECONDS = 10, 30
"""A test may take this many times as long as without a mutant, and these seconds more."""


@dataclass
class Survey:
    """What the tests of a file do without a mutant: by test, its seconds and the lines of the file that it reaches."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)


class _Recorder:
    """A plugin for pytest that fills a survey of one file and writes it to `output`."""

    def __init__(self, file: Path, output: Path) -> None:
        self.file, self.output = str(file), output
        self.survey = Survey()
        self.reached: set[int] = set()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        # Only frames of the file are followed line by line.
        return self.line if frame.f_code.co_filename == self.file else None

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.reached.add(frame.f_lineno)
        return self.line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # What an earlier test had the product remember, this one must reach itself.
        for name in [name for name in sys.modules if name.startswith("draftsmith.")]:
            for remembers in [value for value in vars(sys.modules[name]).values() if hasattr(value, "cache_clear")]:
                remembers.cache_clear()
        self.reached, self.began = set(), time.perf_counter()
        sys.settrace(self.trace)
        threading.settrace(self.trace)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.survey.seconds[nodeid] = time.perf_counter() - self.began
        self.survey.lines[nodeid] = sorted(self.reached)

    def pytest_sessionfinish(self) -> None:
        self.output.write_text(json.dumps(vars(self.survey)), encoding="utf-8")


class _Nearest:
    """A plugin for pytest that keeps the tests which reach the mutant's line, the quickest first, each with a time limit.

    It keeps all where none does: lines that run as the module is imported.
    """

    def __init__(self, survey: Survey, line: int) -> None:
        self.survey, self.near = survey, {test for test, lines in survey.lines.items() if line in lines}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.survey.seconds[item.nodeid])
        items[:] = [item for item in items if item.nodeid in self.near] or items

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(int(_MORE_SECONDS + _PATIENCE * self.survey.seconds[nodeid]))


def load_libraries() -> None:
    """Import what every process needs and no mutant touches."""
    for name in LIBRARIES:
        import_module(name)


def survey(copy: Path, file: str, tests: tuple[str, ...]) -> Survey | None:
    """Run the tests of `file` in the checkout `copy` without a mutant; None where they fail."""
    output = copy / "survey.json"
    if _run(copy, tests, _Recorder(copy / "draftsmith" / file, output), seconds=0, compiled=True):
        return None
    return Survey(**json.loads(output.read_text(encoding="utf-8")))


def verdict(copy: Path, file: str, mutant: Mutant, tests: tuple[str, ...], known: Survey) -> str:
    """Return what the tests say of a mutant: "killed", "survived" or "too slow", which is killed as well."""
    path = copy / file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(text), encoding="utf-8")
    # Compiled files carry sizes and whole seconds, which do not tell one mutant from the next.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    try:
        code = _run(copy, tests, _Nearest(known, mutant.line), seconds=_COLLECT_SECONDS)
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: "survived", -signal.SIGALRM: "too slow"}.get(code, "killed")


def _run(copy: Path, tests: tuple[str, ...], plugin: object, seconds: int, compiled: bool = False) -> int:
    """Run pytest in a forked process; return its exit code, or minus the signal that ended it. seconds: to collect, 0 for any."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(seconds)
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.chdir(copy)
        # For this process, and for those that tests start.
        sys.dont_write_bytecode = not compiled
        os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"} | (
            {} if compiled else {"PYTHONDONTWRITEBYTECODE": "1"}
        )
        for name in [name for name in sys.modules if name.split(".")[0] in ("draftsmith", "scripts", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        import_module("torch").set_num_threads(1)
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        os._exit(int(import_module("pytest").main([*options, *tests], plugins=[plugin])))
    finally:
        os._exit(70)
