"""Foreign JSON: parsed within limits of depth and number, and with text that can be written again.

What Python's parser takes beyond JSON, or turns into values that break later, is refused here: NaN and infinity, halves of
surrogate pairs, integers of thousands of digits, and nesting that overflows whatever walks through it.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.foreign.reading import MOST_BYTES, decode_text, read_bytes, read_lines

MOST_DEPTH = 100
"""The most levels of lists and objects. Formats we read have up to a dozen, tool schemas of conversations some more."""
MOST_DIGITS = 40
"""The most digits of an integer: tokenizer_config.json holds 10^30 for "no limit"."""

# Only a text with one of these needs the walk through its values, which costs more than parsing does.
_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]|\d{41}")


def parse_json(text: str | bytes, source: str, remedy: str, *, infinite: bool = False) -> Any:
    """Return the value of a JSON text.

    source: names the text in the sentence, such as "answers.jsonl, line 3". infinite: take NaN and Infinity, which
    transformers writes into configurations. Raises UserError, which ends in `remedy`.
    """
    text = text if isinstance(text, str) else decode_text(text, source, remedy)
    try:
        value = json.loads(text) if infinite else json.loads(text, parse_float=_finite, parse_constant=_finite)
        if text.count("[") + text.count("{") > MOST_DEPTH:
            _check_depth(value)
        if _SUSPECT.search(text):
            _check_values(value)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
        raise UserError(f"{source} is not JSON ({error.msg} at {where}): {remedy}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} holds {_what(error)}: {remedy}.") from error
    return value


def read_json(path: Path | str, remedy: str, *, most: int = MOST_BYTES, infinite: bool = False) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raises UserError, which ends in `remedy`."""
    return parse_json(read_bytes(path, remedy, most), str(path), remedy, infinite=infinite)


def read_object(path: Path | str, remedy: str, *, most: int = MOST_BYTES, infinite: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError, which ends in `remedy`, also for any other value."""
    value = read_json(path, remedy, most=most, infinite=infinite)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object but {kind_of(value)}; {remedy}.")
    return value


def read_json_lines(path: Path | str, remedy: str) -> Iterator[tuple[int, Any]]:
    """Yield number and value of every line of a JSON Lines file. Raises UserError, naming file and line."""
    for number, line in enumerate(read_lines(path, remedy), start=1):
        source = f"{path}, line {number}"
        if not line.strip():
            raise UserError(f"{source}: the line is empty: {remedy}.")
        yield number, parse_json(line, source, remedy)


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words: "a list", "null"."""
    if value is None:
        return "null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


def is_text(value: str) -> bool:
    """Return whether a string can be written as UTF-8: whether it holds no half of a surrogate pair."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _finite(text: str) -> float:
    """Return a number as the parser read it. Raises ValueError for NaN, infinity, and what is too large to be another."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {number}")
    return number


def _check_depth(value: Any) -> None:
    """Raise RecursionError for lists and objects nested too deep; level by level, as a tokenizer.json has a million values."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MOST_DEPTH):
        level = [
            item
            for one in level
            for item in (one if isinstance(one, list) else one.values())
            if isinstance(item, (list, dict))
        ]
    if level:
        raise RecursionError


def _check_values(value: Any) -> None:
    """Raise ValueError for what no file of ours may hold, at any depth; without recursion."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack.extend(one)
        elif isinstance(one, dict):
            stack.extend((*one, *one.values()))
        elif isinstance(one, str):
            if not is_text(one):
                raise ValueError("half a surrogate pair")
        elif isinstance(one, int) and abs(one) >= 10**MOST_DIGITS:
            raise ValueError("digits")


def _what(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"lists or objects nested deeper than {MOST_DEPTH} levels"
    if "digits" in str(error):
        return f"an integer of more than {MOST_DIGITS} digits"
    return f"{error}, which cannot be written again as JSON"
