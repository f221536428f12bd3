"""Bad result files: what a report, a comparison or a gate is asked to read."""

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.eval.results.result import read_result
from tests.bad_inputs.cases import Case, Table, damaged, edit_json, write

FILE = "result.json"
RESULT = Path(__file__).parents[2] / "docs" / "results" / "smollm2" / "eagle3" / "simulated" / "t0" / FILE


def make(folder: Path) -> None:
    """Copy a committed result."""
    shutil.copy(RESULT, folder / FILE)


def result(name: str, **changes: Any) -> Case:
    """Return the case of a result with other values."""
    return Case(name, edit_json(FILE, **changes), (FILE,))


def inside(name: str, *way: str, **changes: Any) -> Case:
    """Return the case of a result whose first drafter is changed."""
    drafter = next(iter(json.loads(RESULT.read_text(encoding="utf-8"))["drafters"]))
    return Case(name, edit_json(FILE, "drafters", drafter, *way, **changes), (FILE,))


TABLE = Table(
    "results",
    make,
    lambda folder: read_result(folder / FILE),
    (
        *damaged(FILE),
        Case("nan", write(FILE, '{"schema_version": NaN}'), (FILE,)),
        result("command-number", command=5),
        result("date-null", date=None),
        result("versions-list", versions=[1]),
        result("drafters-numbers", drafters={"eagle3": 1}),
        result("settings-null", settings=None),
        result("hardware-text", hardware="a laptop"),
        inside("tau-text", "overall", tau="high"),
        inside("interval-of-three", "overall", tau_interval=[1, 2, 3]),
        inside("slice-overall", "slices", overall={}),
        inside("slice-null", "slices", chat=None),
    ),
)
