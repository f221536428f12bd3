"""Every test can fail: it asserts something, itself or through what it calls."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_floors import ROOT, parse

TESTS = Path(__file__).resolve().parent
ASSERTS = re.compile(r"^(assert_\w+|check\w*|raises|warns|fail|run_conformance)$")
"""Functions that raise where something is not so, by their last name: of pytest, torch.testing, numpy.testing and our own."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def called(node: ast.AST) -> set[str]:
    """The last names of all that is called inside a node."""
    functions = [item.func for item in ast.walk(node) if isinstance(item, ast.Call)]
    names = {one.attr for one in functions if isinstance(one, ast.Attribute)}
    return names | {one.id for one in functions if isinstance(one, ast.Name)}


@cache
def asserts_itself(function: Function) -> bool:
    """Whether a function has an assertion or calls one of ASSERTS."""
    has_assert = any(isinstance(item, ast.Assert) for item in ast.walk(function))
    return has_assert or any(ASSERTS.match(name) for name in called(function))


def without_assertion(tree: ast.Module, helpers: dict[str, list[Function]]) -> list[str]:
    """The tests of a module that assert nothing; helpers: the functions of all tests by name."""

    def asserts(function: Function, seen: frozenset[str]) -> bool:
        if asserts_itself(function):
            return True
        names = called(function)
        further = [(name, one) for name in names - seen for one in helpers.get(name, ())]
        return any(asserts(one, seen | {name}) for name, one in further)

    tests = [item for item in ast.walk(tree) if isinstance(item, Function) and item.name.startswith("test_")]
    return [test.name for test in tests if not asserts(test, frozenset({test.name}))]


def test_every_test_asserts_something() -> None:
    trees = {path: parse(path.relative_to(ROOT)) for path in sorted(TESTS.rglob("*.py"))}
    helpers: dict[str, list[Function]] = {}
    for tree in trees.values():
        for item in ast.walk(tree):
            if isinstance(item, Function):
                helpers.setdefault(item.name, []).append(item)
    tests = {path: tree for path, tree in trees.items() if path.name.startswith("test_")}
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path, tree in tests.items()
        for name in without_assertion(tree, helpers)
    ]
    assert len(tests) > 100
    assert not found


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        ("assert a", True),
        ("a()", False),
        ("with pytest.raises(ValueError):\n  a()", True),
        ("helper()", True),
        ("loop()", False),
    ],
)
def test_the_rule_sees_what_asserts(body: str, fine: bool) -> None:
    text = "def helper():\n  assert 1\ndef loop():\n  loop()\ndef test_it():\n " + body.replace("\n", "\n ")
    tree = ast.parse(text)
    helpers = {item.name: [item] for item in tree.body if isinstance(item, ast.FunctionDef)}
    assert without_assertion(tree, helpers) == ([] if fine else ["test_it"])
