"""Every number of a recipe has a range, which is checked and which --help shows."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from math import inf, nan
from typing import Any, get_args, get_type_hints

import pytest

from draftsmith.errors import UserError
from draftsmith.fields import find_ranges
from draftsmith.heads.registry import methods
from draftsmith.recipe.evaluate import BaselineSpec, DraftSpec
from draftsmith.recipe.parse import recipe_parser
from draftsmith.recipe.schema import Recipe


def sections(kind: type) -> Iterator[type]:
    yield kind
    for hint in get_type_hints(kind).values():
        if is_dataclass(hint):
            yield from sections(hint)


KINDS = [*sections(Recipe), DraftSpec, *(method.options_class for method in methods().values())]


def is_number(hint: Any) -> bool:
    """Whether a field holds a number, or a list or mapping with numbers."""
    return hint in (int, float) or any(map(is_number, get_args(hint)))


@pytest.mark.parametrize("kind", [*KINDS, BaselineSpec], ids=lambda kind: kind.__name__)
def test_every_number_has_a_range(kind: type) -> None:
    hints = get_type_hints(kind)
    assert [one.name for one in fields(kind) if is_number(hints[one.name]) and "range" not in one.metadata] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_section_checks_its_own_ranges_and_texts(kind: type) -> None:
    """So that what no machine can hold is refused, however a section is made."""
    good = kind()
    for one in fields(kind):
        default = getattr(good, one.name)
        if allowed := one.metadata.get("range"):
            ends = [allowed.least] * allowed.above + [allowed.most] * allowed.below
            for number in (10 * allowed.most, 10**100, allowed.least - 1, nan, inf, *ends):
                bad = {"kl": number} if isinstance(default, dict) else [number] if allowed.ascending else number
                shown = rf"{number:.0f}\D" if number == 10 * allowed.most else ""
                with pytest.raises(UserError, match=rf"{one.name}.* is {shown}.*it must be {allowed}"):
                    replace(good, **{one.name: bad})
            for items in ([], [2, 1], [1, 1], list(range(2000))) if allowed.ascending else ():
                with pytest.raises(UserError, match=rf"{one.name} is \["):
                    replace(good, **{one.name: items})
        elif isinstance(default, str):
            for text in ("", "a\0b", "x" * 4097):
                with pytest.raises(UserError, match=rf"{one.name} is '.*: a text has 1 to 4096 characters"):
                    replace(good, **{one.name: text})


def test_help_shows_the_ranges() -> None:
    parser = recipe_parser("eagle3", "draftsmith train")
    shown = {action.dest: action.help or "" for action in parser._actions}
    head = methods()["eagle3"].options_class
    for key, allowed in (*find_ranges(Recipe, ""), *find_ranges(head, "head.")):
        assert shown[key].endswith(f"; {allowed}."), key
