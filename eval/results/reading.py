"""Read files of an evaluation: of this version alone, and with figures that something can have."""

from typing import Any, TypeVar

from draftsmith.errors import UserError
from draftsmith.foreign.records import read_dataclass

T = TypeVar("T")
_MOST = 1e15
"""More than any count, time or number of bytes that is measured."""
_ROUNDING = 1e-12
"""So much below zero a sum of shares may come by rounding."""


def read_current(kind: type[T], value: Any, source: str, again: str) -> T:
    """Build the dataclass `kind` from a JSON value, of the `schema_version` that is the default of that field.

    again: how to get a file of this version. Raises UserError for another version, and for a wrong, unknown or missing key.
    """
    current: int = kind.schema_version  # type: ignore[attr-defined]
    if isinstance(value, dict) and (version := value.get("schema_version")) != current:
        raise UserError(
            f"{source}: 'schema_version' is {version!r} but this draftsmith reads {current} alone; {again}."
        )
    return read_dataclass(kind, value, source)


def check_figures(measures: Any, where: str) -> None:
    """Raise UserError for counts, shares and times that nothing can have, and for an accepted length that no pass could have.

    measures: `Measures` of a result. where: names it, up to "says that".
    """
    again = "evaluate again, or restore the file"
    for key, value in vars(measures).items():
        numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float)]
        # Rounding may bring kl below zero, and by a little the difference of two equal shares.
        if key != "kl" and numbers and min(numbers) < -_ROUNDING:
            raise UserError(f"{where} {key} is {min(numbers):g}, below zero: {again}.")
        if numbers and max(numbers) > _MOST:
            raise UserError(f"{where} {key} is {max(numbers):g}, more than can be measured: {again}.")
    taus = [measures.tau, measures.tau_simulated, *(point.tau_simulated for point in measures.k_sweep or ())]
    if any(tau is not None and tau <= 0 for tau in taus):
        raise UserError(f"{where} an accepted length is zero or less, where every pass brings a token: {again}.")
    if measures.tokens and not measures.prompts:
        raise UserError(f"{where} there are {measures.tokens} tokens of no prompts: {again}.")
