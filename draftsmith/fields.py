"""What the sections of a recipe share."""

from typing import Any, Literal

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise a sentence that names the key, the value and the reason."""
    if not condition:
        raise UserError(f"{key} is {value!r}: {why}.")


def without_neutral(values: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys at the value that changes nothing: what was made before there were such keys stays usable."""
    return {key: value for key, value in values.items() if key not in neutral or value != neutral[key]}
