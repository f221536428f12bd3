"""Every key of every recipe takes or refuses every kind of value: never with a traceback, and never at length."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from draftsmith.errors import UserError
from draftsmith.heads.registry import find_method, method_names
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from tests.bad_inputs.cases import check_sentence

LONGEST = 600
"""The most letters of a sentence, besides those of the recipe's path."""
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 10**30, 1.5, float("nan"), "", "x" * 5000, [], [None, [1]], ["y" * 3000] * 5),
    *({}, {"k" * 3000: 1}, {1: {None: 2}}, date(2020, 1, 1), b"\0\xff"),
)


def keys_of(kind: type, group: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and of those in it, sections included."""
    for name, hint in get_type_hints(kind).items():
        if name in {one.name for one in fields(kind)}:
            yield group + name
            if is_dataclass(hint):
                yield from keys_of(hint, f"{group}{name}.")  # type: ignore[arg-type]


KEYS = [("eagle3", key) for key in keys_of(Recipe)] + [
    (method, key) for method in method_names() for key in keys_of(find_method(method).options_class, "head.")
]


def recipe_with(method: str, key: str, value: Any) -> dict[str, Any]:
    """Return a recipe with one value by its dotted key."""
    recipe: dict[str, Any] = {"name": "good", "method": method}
    *groups, last = key.split(".")
    place = recipe
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = value
    return recipe


def check(method: str, key: str, value: Any, folder: Path) -> None:
    """Read the recipe with this value; what refuses it is a sentence."""
    file = folder / "r.yaml"
    file.write_text(yaml.safe_dump(recipe_with(method, key, value)), encoding="utf-8")
    try:
        parse_recipe(["--recipe", str(file)])
    except UserError as error:
        said = str(error)
        check_sentence(said)
        assert len(said.replace(str(file), "")) <= LONGEST, said
        assert "typing." not in said, said


def test_there_are_thousands() -> None:
    assert len(KEYS) * len(VALUES) >= 2268


@pytest.mark.full
@pytest.mark.parametrize("kind", range(len(VALUES)), ids=[repr(value)[:20] for value in VALUES])
def test_a_share_of_the_keys_with_every_kind_of_value(kind: int, tmp_path: Path) -> None:
    """Each key meets two kinds here, and another key's two are others; the next test has all."""
    for number, (method, key) in enumerate(KEYS):
        if (number + kind) % (len(VALUES) // 2) == 0:
            check(method, key, VALUES[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "key"), KEYS)
def test_every_key_with_every_kind_of_value(method: str, key: str, tmp_path: Path) -> None:
    for value in VALUES:
        check(method, key, value, tmp_path)
