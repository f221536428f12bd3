"""Give the committed results the fields that `Measures` has since, as null: python -m scripts.bench.pages.results"""

import json
from dataclasses import fields
from pathlib import Path

from draftsmith.eval.results.result import Measures, Result
from draftsmith.storage import write_json

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def add_fields() -> None:
    """Write the committed results again, under the version of now."""
    nulls = dict.fromkeys(field.name for field in fields(Measures))
    for path in RESULTS.rglob("result.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] not in (Result.schema_version - 1, Result.schema_version):
            raise SystemExit(f"{path} has the version {value['schema_version']}: evaluate again")
        for drafter in value["drafters"].values():
            drafter["overall"] = nulls | drafter["overall"]
            drafter["slices"] = {name: nulls | measures for name, measures in drafter["slices"].items()}
        write_json(path, value | {"schema_version": Result.schema_version})


if __name__ == "__main__":
    add_fields()
