"""Bad trees of drafts: files that hold no tree."""

import json
from pathlib import Path
from typing import Any

from draftsmith.decoder.trees import load_tree
from tests.bad_inputs.cases import Case, Table, damaged, write

FILE = "tree.json"


def make(folder: Path) -> None:
    """Write a tree of three nodes."""
    (folder / FILE).write_text(json.dumps([[0], [1], [0, 0]]), encoding="utf-8")


def tree(name: str, value: Any, *words: str) -> Case:
    """Return the case of a file that holds `value`, a text as it stands."""
    return Case(name, write(FILE, value if isinstance(value, str | bytes) else json.dumps(value)), ("tree", *words))


TABLE = Table(
    "trees",
    make,
    lambda folder: load_tree(str(folder / FILE)),
    (
        *damaged(FILE, "tree", without="list"),
        tree("list", [], "at least one node"),
        tree("open", "[[0],", "is not JSON"),
        tree("number", 5),
        tree("text", '"chain"'),
        tree("object", {"tree": [[0]]}, "list of paths of whole numbers"),
        tree("choices-null", {"choices": None}),
        tree("choices-text", {"choices": "chain"}),
        tree("empty-path", [[]], "at least one node"),
        tree("numbers", [0, 1]),
        tree("texts", [[0], ["1"]], "list of paths of whole numbers"),
        tree("floats", [[0.5]]),
        tree("booleans", [[True]], "list of paths of whole numbers"),
        tree("negative", [[-1]], "negative rank"),
        tree("without-parent", [[0], [0, 1, 0]], "has the node [0, 1, 0] but not its parent [0, 1]"),
        tree("twice", [[0], [0]], "names the node [0] twice"),
        tree("huge-rank", [[10**12]]),
        tree("of-399-levels", [[0] * depth for depth in range(1, 400)]),
        tree("of-100000-nodes", [[rank] for rank in range(100_000)]),
        tree("nan", "[[NaN]]"),
    ),
)
