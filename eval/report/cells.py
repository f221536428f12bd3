"""Write numbers as the cells of tables and the words of sentences show them. Pure."""

from collections.abc import Callable, Sequence

DASH = "–"


def some(values: Sequence[object]) -> bool:
    """Whether anything was measured."""
    return any(value is not None for value in values)


def off(value: float | None) -> str:
    """Return a setting that null switches off."""
    return "off" if value is None else f"{value:g}"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return e.g. "2.87 ms", a dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}{unit}"


def significant(value: float | None, unit: str = "") -> str:
    """Return three significant digits without an exponent, thousands separated."""
    if value is None:
        return DASH
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:,.{digits}f}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share of 1 as percent."""
    return DASH if value is None else f"{100 * value:.{digits}f}%"


def times(value: float | None) -> str:
    """Return a ratio, e.g. "1.68×"."""
    return number(value, 2, "×")


def between(text: str, spread: tuple[float, float] | None, show: Callable[[float], str]) -> str:
    """Append "(low to high)" to a number that has a spread."""
    return text if spread is None else f"{text} ({show(spread[0])} to {show(spread[1])})"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds in three significant digits."""
    return significant(None if seconds is None else 1000 * seconds, " ms")


def whole(value: int | None) -> str:
    """Return a count."""
    return DASH if value is None else f"{value:,}"
