"""The folders stand on floors: imports go down or stay on a floor, and never round. docs/architecture.md draws them."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "heads", "train", "eval", "draftsmith", "scripts/bench")

FLOORS = (
    ("draftsmith", "draftsmith/foreign", "data"),  # the ground: errors, files, typed JSON; batches and packing
    ("draftsmith/target",),
    ("draftsmith/decoder",),
    ("draftsmith/decoder/drafters",),
    ("data/conversations",),
    ("data/features",),
    ("data/answers",),
    ("data/embedded",),
    ("heads", "heads/layers", "heads/losses", "heads/formats"),
    ("heads/eagle", "heads/block"),
    ("heads/*",),  # the methods: every folder of heads/ that registers one
    ("heads/export",),
    ("eval/simulate",),
    ("eval/drafters",),
    ("eval/conformance", "eval/results", "eval/training"),
    ("eval/clocks", "eval/gate", "eval/ledger"),
    ("eval/measure",),
    ("eval/planner", "eval/watch"),
    ("eval/tree_search", "eval/report", "eval/engines", "eval/parity"),
    ("eval/certificate",),
    ("draftsmith/recipe",),
    ("train",),
    ("draftsmith/estimate",),
    ("draftsmith/stages",),
    ("draftsmith/cli",),
    ("launchables of train",),
    ("scripts/bench", "scripts/bench/*"),
)
"""From the ground up. A folder may import from its own floor and from those below."""

TOP_ROOMS = (
    "draftsmith",
    "draftsmith/target",
    "draftsmith/decoder",
    "data",
    "heads",
    "eval",
    "draftsmith/recipe",
    "train",
    "draftsmith/estimate",
    "draftsmith/stages",
    "draftsmith/cli",
    "launchables of train",
    "scripts/bench",
)
"""The rooms as a whole, from the ground up: each imports from those before it alone."""

LAUNCHABLES = {"train/eagle.py", "train/head.py", "train/medusa.py"}
"""They stand in train/ for `accelerate launch`, on top of the command line."""

PUBLIC = "draftsmith/__init__.py"
"""What users import: it names parts of every floor, and loads them when they are asked for."""


def sources() -> Iterator[Path]:
    """Yield the product's Python files, links not followed."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if "__pycache__" not in inside.parts and not (room == "draftsmith" and is_link(inside)):
                yield inside


def is_link(path: Path) -> bool:
    return (ROOT / path.parts[0] / path.parts[1]).is_symlink()


def module_of(path: Path) -> str:
    """Return the name that a file is imported under."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] in ("draftsmith", "scripts") else ("draftsmith", *parts))


def folder_of(path: Path) -> str:
    return "launchables of train" if path.as_posix() in LAUNCHABLES else path.parent.as_posix()


def floor_of(folder: str) -> int:
    """Return the floor of a folder; a method's is that of "heads/*"."""
    for number, names in enumerate(FLOORS):
        if folder in names:
            return number
    family = f"{Path(folder).parent.as_posix()}/*"
    found = [number for number, names in enumerate(FLOORS) if family in names]
    assert found, f"{folder} stands on no floor: name it in FLOORS of {Path(__file__).name}"
    return found[0]


FILES = {module_of(path): path for path in sources()}


@cache
def parse(path: Path) -> ast.Module:
    """Return a parsed file of the repository, of which tests ask many things."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports, wherever in it; a relative import starts with a dot."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imports(path: Path) -> frozenset[Path]:
    """Return the product's files that a file imports."""
    return frozenset(FILES[name] for name in imported_names(path) if name in FILES)


def arrows() -> dict[tuple[str, str], set[str]]:
    """Return folder -> folder with the files that draw each arrow."""
    found = defaultdict(set)
    for path in FILES.values():
        if path.as_posix() == PUBLIC:
            continue
        for other in imports(path):
            if folder_of(path) != folder_of(other):
                found[folder_of(path), folder_of(other)].add(f"{path.as_posix()} -> {other.as_posix()}")
    return found


ARROWS = arrows()


def test_there_are_arrows_to_judge() -> None:
    assert ("draftsmith/cli", "draftsmith/stages") in ARROWS
    assert ("draftsmith/decoder", "draftsmith/target") in ARROWS
    assert len(ARROWS) > 100


def test_imports_go_down() -> None:
    up = {f"{a} -> {b}": files for (a, b), files in ARROWS.items() if floor_of(b) > floor_of(a)}
    assert not up


def top_room(folder: str) -> str:
    """Return the room that a folder is in; the files of the ground floor, batches and packing too, are one room."""
    if folder in FLOORS[0]:
        return TOP_ROOMS[0]
    return max((room for room in TOP_ROOMS[1:] if f"{folder}/".startswith(f"{room}/")), key=len)


def test_imports_of_top_rooms_go_down() -> None:
    rooms = {(top_room(a), top_room(b)): files for (a, b), files in ARROWS.items()}
    assert len(rooms) > 30
    assert not {pair: files for pair, files in rooms.items() if TOP_ROOMS.index(pair[1]) > TOP_ROOMS.index(pair[0])}


def test_floors_of_a_top_room_lie_together() -> None:
    rooms = [top_room(name.removesuffix("/*")) for names in FLOORS for name in names]
    assert [room for room, _ in groupby(rooms)] == [*TOP_ROOMS]


def test_no_imports_go_round() -> None:
    below: dict[str, set[str]] = defaultdict(set)
    for a, b in ARROWS:
        below[a].add(b)
    done: set[str] = set()

    def visit(folder: str, way: list[str]) -> None:
        if folder in way:
            pytest.fail(f"a circle of folders: {' -> '.join([*way[way.index(folder) :], folder])}")
        if folder not in done:
            for other in sorted(below[folder]):
                visit(other, [*way, folder])
            done.add(folder)

    for folder in sorted(below):
        visit(folder, [])


def test_what_finds_methods_imports_none() -> None:
    """Registry, formats, export and conformance suite find methods by their registration, as they find another package's."""
    from draftsmith.heads.registry import methods

    finders = ("heads", "heads/formats", "heads/export", "eval/conformance")
    named = [(a, b) for a, b in ARROWS if a in finders and b.removeprefix("heads/") in methods()]
    assert not named
