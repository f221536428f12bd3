"""Mutants differ from the file in one place, and are Python still."""

import ast

import pytest

from scripts.bench.mutants.bench import CORE, EQUIVALENT
from scripts.bench.mutants.mutate import mutants
from scripts.bench.mutants.nearest import ROOT

pytestmark = pytest.mark.full

TEXT = '''
def f(a: int | None, b=1) -> int | None:
    """Add 1 < 2."""
    assert a != b
    c = f"{1 + 2} {any(b)}", zip(a, b, strict=True)
    if not a and b < 2:
        a += torch.where(a, -b, b.min())
    return a is None
'''


def test_every_kind_of_change() -> None:
    changed = {f"{one.before} -> {one.after}" for one in mutants(TEXT)}
    assert changed == {
        *("1 -> 2", "not  -> ", "and -> or", "< -> <=", "2 -> 3", "a += torch.where(a, -b, b.min()) -> pass"),
        *(
            "-b, b.min() -> b.min(), -b",
            "torch.where(a, -b, b.min()) -> b.min()",
            "- -> ",
            "min -> max",
            "is -> is not",
        ),
    }


@pytest.mark.parametrize("file", CORE)
def test_mutants_of_the_core_are_python(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    found = mutants(text)
    assert len(found) >= 10
    for one in found[::9]:
        assert one.apply(text) != text
        ast.parse(one.apply(text))


def test_the_tests_are_there_and_the_equivalents_still_mutants() -> None:
    for file, tests in CORE.items():
        assert all((ROOT / test).exists() for test in tests), file
    for file, *lines in EQUIVALENT:
        text = (ROOT / file).read_text(encoding="utf-8")
        # One mutant and no other, or a fault that matters would hide behind one that does not.
        assert [one.lines(text) for one in mutants(text)].count(tuple(lines)) == 1, (file, lines)
