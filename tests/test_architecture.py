"""docs/architecture.md, docs/algorithms.md and docs/glossary.md are true: floors, ways, files, functions and rules."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_floors import FLOORS, ROOT, imports, parse, sources

DOCS = ROOT / "docs"
PAGES = ("architecture.md", "algorithms.md")
PLACE = r"`([\w./]+\.py): ([\w.]+)`"
MOST_FILES, MOST_CROSSINGS = 20, 6


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the functions, classes, methods ("Class.method") and constants that a file defines."""
    found = set()
    for node in parse(Path(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    return frozenset(found)


def ways() -> dict[str, list[tuple[str, str]]]:
    """Return title -> the files and names of its steps, of every way that the page lists."""
    parts = re.split(r"^### (.+)\n", read("architecture.md"), flags=re.MULTILINE)[1:]
    return {
        title: re.findall(rf"^\d+\. {PLACE}", text, re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_functions_of_a_page_exist(page: str) -> None:
    places = re.findall(PLACE, read(page))
    assert len(places) > 30
    assert not [(path, name) for path, name in places if not (ROOT / path).is_file() or name not in names_in(path)]


def test_the_picture_shows_the_floors() -> None:
    shown = re.findall(r"^ {4} ?(\d+)   (.+?) {2,}\S", read("architecture.md"), re.MULTILINE)
    floors = {int(number): tuple(names.split(", ")) for number, names in shown}
    assert [int(number) for number, _ in shown] == [*reversed(range(len(FLOORS)))]
    assert floors == dict(enumerate(FLOORS))


@pytest.mark.parametrize("title", ways())
def test_a_way_is_short_and_hangs_together(title: str) -> None:
    files = [path for path, _ in ways()[title]]
    assert len(files) >= 10
    assert len(set(files)) <= MOST_FILES
    crossings = sum(a.split("/")[0] != b.split("/")[0] for a, b in pairwise(files))
    assert crossings <= MOST_CROSSINGS
    known = {path: {other.as_posix() for other in imports(Path(path))} for path in files}
    for path in set(files):
        others = set(files) - {path}
        importers = {other for other in others if path in known[other]}
        assert importers | (others & known[path]), f"{path} imports no file of it"


def test_there_are_five_ways() -> None:
    assert [*ways()] == ["One training example", "One decoded prompt", "One run", "One evaluation", "One export"]


def test_an_evaluation_is_a_straight_way_without_a_session() -> None:
    """Each step reads the values that it names, and data seldom comes back to a file that it has left."""
    steps = ways()["One evaluation"]
    files = [path for path, _ in steps]
    stays = 1 + sum(a != b for a, b in pairwise(files))
    assert len(set(files)) <= 14
    assert stays - len(set(files)) <= 8
    for path, name in steps:
        (step,) = [node for node in ast.parse((ROOT / path).read_text()).body if getattr(node, "name", "") == name]
        assert "session" not in {getattr(node, "id", getattr(node, "arg", "")) for node in ast.walk(step)}, name


def test_every_rule_has_its_formula_source_code_and_tests() -> None:
    text = read("algorithms.md")
    rules = re.split(r"^### Rule (\d): .+\n", text.split("\n## Drafters")[0], flags=re.MULTILINE)[1:]
    assert rules[::2] == [*"12345678"]
    for rule in rules[1::2]:
        assert "\n- Source: " in rule
        assert re.search(rf"^- Code: {PLACE}", rule, re.MULTILINE)
        tests = rule.split("\n- Tests: ")[1]
        assert all(path.startswith("tests/") or "/conformance/" in path for path, _ in re.findall(PLACE, tests))
        assert re.search(PLACE, tests)


def test_rules_that_code_cites_are_on_the_page() -> None:
    """A citation names the page, since a number alone sends nobody anywhere."""
    rules = set(re.findall(r"^### Rule (\d)", read("algorithms.md"), re.MULTILINE))
    cited = set()
    for path in [*sources(), *(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))]:
        if path == Path("tests/test_architecture.py"):
            continue
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        named = re.findall(r"algorithms\.md, rule (\d)", text)
        assert len(re.findall(r"\brule \d", text)) == len(named), f"{path} cites a rule without its page"
        cited |= {*named}
    assert {"1", "3", "4", "7", "8"} <= cited <= rules


def test_every_method_is_described() -> None:
    """By the folders that its code is in."""
    from draftsmith.heads.registry import methods

    text = read("algorithms.md")
    assert not [name for name in methods() if f"`heads/{name}/" not in text]


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    words = re.findall(r"^\| ([^|]+) \|", read("glossary.md"), re.MULTILINE)[2:]
    assert len(words) >= 30
    assert len(words) == len(set(words))
