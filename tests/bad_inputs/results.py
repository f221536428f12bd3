"""Bad result files: what a report, a comparison or a gate is asked to read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.eval.results.result import read_result
from tests.bad_inputs.cases import Case, Table, cut, edit_json, link, nested, pipe, remove, replace_by_folder, write

FILE = "result.json"
RESULT = Path(__file__).parents[2] / "docs" / "results" / "smollm2" / "eagle3" / "simulated" / "t0" / FILE


def make(folder: Path) -> None:
    """Copy a committed result."""
    shutil.copy(RESULT, folder / FILE)


def result(name: str, **changes: Any) -> Case:
    """Return the case of a result with other values."""
    return Case(name, edit_json(FILE, **changes), (FILE,))


def inside(name: str, change: Callable[[dict[str, Any]], object]) -> Case:
    """Return the case of a result that is changed in its depth."""

    def spoil(folder: Path) -> None:
        value = json.loads((folder / FILE).read_text())
        change(value)
        (folder / FILE).write_text(json.dumps(value))

    return Case(name, spoil, (FILE,))


def _first(value: dict[str, Any]) -> dict[str, Any]:
    return next(iter(value["drafters"].values()))


TABLE = Table(
    "results",
    make,
    lambda folder: read_result(folder / FILE),
    (
        Case("empty", write(FILE, ""), (FILE,)),
        Case("list", write(FILE, "[]"), (FILE,)),
        Case("null", write(FILE, "null"), (FILE,)),
        Case("cut", cut(FILE, 0.5), (FILE,)),
        Case("binary", write(FILE, b"\xff\x80" * 9), (FILE,)),
        Case("deep", write(FILE, '{"drafters": ' + nested(100_000) + "}"), (FILE,)),
        Case("long-integer", write(FILE, '{"schema_version": ' + "9" * 5000 + "}"), (FILE,)),
        Case("nan", write(FILE, '{"schema_version": NaN}'), (FILE,)),
        Case("missing", remove(FILE), (FILE,)),
        Case("folder", replace_by_folder(FILE), (FILE,)),
        Case("dangling", link(FILE, "nowhere"), (FILE,)),
        Case("pipe", pipe(FILE), (FILE,)),
        result("schema-next", schema_version=99),
        result("schema-text", schema_version="5"),
        result("schema-missing", schema_version=...),
        result("command-number", command=5),
        result("date-null", date=None),
        result("versions-list", versions=[1]),
        result("drafters-list", drafters=[]),
        result("drafters-numbers", drafters={"eagle3": 1}),
        result("settings-null", settings=None),
        result("hardware-text", hardware="a laptop"),
        result("unknown-key", colour="red"),
        result("supplement-list", supplement=[1]),
        result("supplement-object", supplement={"a": {"b": 1}}),
        inside("tau-text", lambda value: _first(value)["overall"].update(tau="high")),
        inside("tau-half-surrogate", lambda value: _first(value)["overall"].update(tau="\ud800")),
        inside("tau-missing", lambda value: _first(value)["overall"].pop("tau")),
        inside("interval-of-three", lambda value: _first(value)["overall"].update(tau_interval=[1, 2, 3])),
        inside("slice-overall", lambda value: _first(value)["slices"].update(overall=_first(value)["overall"])),
        inside("slice-null", lambda value: _first(value)["slices"].update(chat=None)),
    ),
)
