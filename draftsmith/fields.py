"""What the sections of a recipe share: checks that name the key, and what of a section a run's fingerprint holds."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Literal

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

LATER: Mapping[str, Any] = MappingProxyType({"later": True})
"""`field(default=..., metadata=LATER)` marks a field that was added after runs had been made: at its default it is left out of
the fingerprint, so that those runs are not out of date."""


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise UserError, which names the key, the value and the reason, unless `condition` holds."""
    if not condition:
        raise UserError(f"{key} is {value!r}: {why}.")


def require_positive(head: Any, *names: str, or_null: str = "") -> None:
    """Raise UserError for a field of the section `head` that is below 1. or_null: the end of the sentence where null is allowed."""
    for name in names:
        value = getattr(head, name)
        require(value is None or value >= 1, f"head.{name}", value, f"it must be at least 1{or_null}")


def fingerprint_fields(section: Any, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return what a run's fingerprint holds of a section (a dataclass), the dataclasses in it included: all fields but those
    of `leave_out` and those marked LATER that are at their defaults.

    A class whose runs have held inherited LATER fields from the first names them in `ALWAYS_IN_FINGERPRINT`.
    """
    always = getattr(section, "ALWAYS_IN_FINGERPRINT", ())
    return {
        one.name: _held(value)
        for one in fields(section)
        if one.name not in leave_out
        for value in [getattr(section, one.name)]
        if one.name in always or not one.metadata.get("later") or value != _default(one)
    }


def _held(value: Any) -> Any:
    if is_dataclass(value):
        return fingerprint_fields(value)
    return [_held(one) for one in value] if isinstance(value, list | tuple) else value


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
