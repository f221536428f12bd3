"""What the sections of a recipe share."""

from typing import Any, Literal

from draftsmith.errors import UserError
from draftsmith.eval.sampling import Sampling

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise a sentence that names the key, the value and the reason."""
    if not condition:
        raise UserError(f"{key} is {value!r}: {why}.")


def make_sampling(
    section: str, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float
) -> Sampling:
    """Return how tokens are chosen. Raises UserError that names the key of the section."""
    try:
        return Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    except UserError as error:
        raise UserError(f"{section}.{error}") from error


def without_neutral(values: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    """Leave out keys at the value that changes nothing: what was made before there were such keys stays usable."""
    return {key: value for key, value in values.items() if key not in neutral or value != neutral[key]}
