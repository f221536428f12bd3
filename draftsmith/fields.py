"""Helpers of recipe sections and head options: checks of values, and values that are left out."""

from typing import Any, Literal

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise UserError, which names the key, the value and the reason, unless `condition` holds."""
    if not condition:
        raise UserError(f"{key} is {value!r}: {why}.")


def without_neutral(values: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys that have their neutral value, so that fingerprints from before there was such a key stay equal."""
    return {key: value for key, value in values.items() if key not in neutral or value != neutral[key]}
