"""Every bad input, of every kind, ends in one sentence, and changes nothing on disk."""

import importlib
import os
import pkgutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.bad_inputs
from draftsmith.errors import UserError
from tests.bad_inputs.cases import Case, Table, check_sentence

pytestmark = pytest.mark.full

TABLES: tuple[Table, ...] = tuple(
    value
    for found in pkgutil.iter_modules(tests.bad_inputs.__path__)
    for value in vars(importlib.import_module(f"tests.bad_inputs.{found.name}")).values()
    if isinstance(value, Table)
)
CASES = [pytest.param(table, case, id=f"{table.kind}:{case.name}") for table in TABLES for case in table.cases]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A case that waits for ever fails, and the next one goes on."""

    def wake(*_: object) -> None:
        raise TimeoutError("this bad input hangs")

    usual = signal.signal(signal.SIGALRM, wake)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what lies in a folder: sizes and times of change, links not followed."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        found[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns)
    return found


def test_there_are_many() -> None:
    assert len(CASES) >= 300
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("table", TABLES, ids=[table.kind for table in TABLES])
def test_the_good_input_is_good(table: Table, tmp_path: Path) -> None:
    table.make(tmp_path)
    before = snapshot(tmp_path)
    table.read(tmp_path)
    assert before
    assert before.items() <= snapshot(tmp_path).items()


@pytest.mark.parametrize(("table", "case"), CASES)
def test_one_sentence(table: Table, case: Case, tmp_path: Path) -> None:
    table.make(tmp_path)
    case.spoil(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as caught:
        table.read(tmp_path)
    text = str(caught.value)
    check_sentence(text)
    for word in case.words:
        assert word.lower() in text.lower(), text
    assert snapshot(tmp_path) == before
    assert os.getcwd() != str(tmp_path)
