"""Bad result files, and bad pairs of them: what a report, a comparison or a gate is asked to read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.eval.gate.compare import compare_results
from draftsmith.eval.results.result import read_result
from tests.bad_inputs.cases import Case, Table, damaged, edit_json, remove, write

FILE = "result.json"
RESULT = Path(__file__).parents[2] / "docs" / "results" / "smollm2" / "eagle3" / "simulated" / "t0" / FILE


def make(folder: Path) -> None:
    """Copy a committed result."""
    shutil.copy(RESULT, folder / FILE)


TABLE = Table(
    "results",
    make,
    lambda folder: read_result(folder / FILE),
    (
        *damaged(FILE),
        Case("nan", write(FILE, '{"schema_version": NaN}'), (FILE,)),
    ),
)

OLD, NEW = "old.json", "new.json"


def make_pair(folder: Path) -> None:
    """Copy a committed result twice."""
    for file in (OLD, NEW):
        shutil.copy(RESULT, folder / file)


def compare(folder: Path) -> None:
    """Compare them as the command does."""
    files = str(folder / OLD), str(folder / NEW)
    compare_results(read_result(files[0]), read_result(files[1]), files)


def settings(*words: str, **changes: Any) -> Case:
    """Return the case of a new result that was measured with other settings."""
    return Case("-".join(changes), edit_json(NEW, "settings", **changes), (OLD, NEW, *words))


def drafters(name: str, change: Callable[[dict[str, Any]], object], *words: str) -> Case:
    """Return the case of a new result whose drafters are changed."""
    return Case(name, edit_json(NEW, drafters=lambda value: (change(value), value)[1]), (OLD, NEW, *words))


def _rename(value: dict[str, Any]) -> None:
    for name in list(value):
        value[f"other {name}"] = value.pop(name)


def _each(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda value: [change(drafter) for drafter in value.values()]


def _draft_longer(drafter: dict[str, Any]) -> None:
    drafter["draft"]["num_speculative_tokens"] = 9
    for measures in (drafter["overall"], *drafter["slices"].values()):
        measures["k_sweep"] = []


PAIRS = Table(
    "comparisons",
    make_pair,
    compare,
    (
        Case("old-missing", remove(OLD), (OLD,)),
        Case("new-missing", remove(NEW), (NEW,)),
        settings("temperature", temperature=0.7),
        settings("top-k", top_k=40),
        settings("top-p", top_p=0.5),
        settings("dtype", "float16", dtype="float16"),
        settings("temperature", "top-p", "dtype", temperature=0.7, top_p=0.5, dtype="float16"),
        drafters("no-drafters", dict.clear, "prompts"),
        drafters("other-names", _rename, "--drafter"),
        drafters("fewer-slices", _each(lambda one: one["slices"].popitem()), "prompts"),
        drafters("fewer-prompts", _each(lambda one: one["slices"]["chat"].update(prompts=1)), "prompts", "chat"),
        drafters("longer-drafts-without-a-curve", _each(_draft_longer), "tokens", "simulated"),
    ),
)
