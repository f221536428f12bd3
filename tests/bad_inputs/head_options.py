"""Bad options of heads: numbers that no head of any method can have."""

import json
from collections.abc import Iterator
from pathlib import Path

from draftsmith.fields import find_ranges
from draftsmith.heads.registry import methods
from tests.bad_inputs.cases import Case, Table, write

FILE = "head.json"
VALUES = {"-1": -1, "10**12": 10**12, "10**100": 10**100, "1e300": 1e300, "nan": float("nan"), "inf": float("inf")}


def make(folder: Path) -> None:
    """Write good options."""
    (folder / FILE).write_text(json.dumps({"method": "eagle3", "head": {"ttt_steps": 3}}), encoding="utf-8")


def read(folder: Path) -> None:
    """Make the options of a method."""
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    methods()[found["method"]].options_class(**found["head"])


def _cases() -> Iterator[Case]:
    for name, method in methods().items():
        for key, allowed in find_ranges(method.options_class, ""):
            for said, value in VALUES.items():
                bad = json.dumps({"method": name, "head": {key: [value] if allowed.ascending else value}})
                yield Case(f"{name}-{key}-{said}", write(FILE, bad), (f"head.{key} is",))
            if allowed.ascending:
                for number, items in enumerate(([], [2, 1], [1, 1], list(range(2000)))):
                    bad = json.dumps({"method": name, "head": {key: items}})
                    yield Case(f"{name}-{key}-list-{number}", write(FILE, bad), (f"head.{key} is",))


TABLE = Table("head-options", make, read, tuple(_cases()))
