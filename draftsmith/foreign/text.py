"""Foreign text: plain files opened and read within limits, and parsed as JSON or YAML, with a sentence for whatever is none.

What Python's parsers take beyond the formats, or turn into values that break later, is refused: NaN and infinity, halves of surrogate
pairs, integers of thousands of digits, and nesting that overflows whatever walks through it.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from draftsmith.errors import UserError, first_line, one_line, why_not

if TYPE_CHECKING:
    import yaml  # elsewhere late: `draftsmith doctor` works without it

MIB = 2**20
MOST_BYTES = 512 * MIB
"""The most bytes of a file that is read whole. A tokenizer.json has up to 40 MB, the index of a large feature store more."""
MOST_LINE_BYTES = 64 * MIB
"""The most bytes of a line of JSON Lines."""

_KINDS = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}


def open_file(path: Path | str, remedy: str) -> BinaryIO:
    """Return a plain file opened for reading bytes.

    Raises UserError, which ends in `remedy`, where the path is anything else (a folder, a pipe, a device, a dangling link)
    or cannot be opened. A pipe is noticed without waiting for its writer.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UserError(f"{one_line(path)} cannot be read ({why_not(error, path)}): {remedy}.") from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "a device")
    raise UserError(f"{one_line(path)} is {kind}, not a file: {remedy}.")


def read_bytes(path: Path | str, remedy: str, most: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file of at most `most` bytes. Raises UserError, which ends in `remedy`."""
    with open_file(path, remedy) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(
                f"{path} has {size} bytes, far more than such a file has (the limit is {most / MIB:.3g} MiB): {remedy}."
            )
        return _read(file, path, remedy, most)


def read_text(path: Path | str, remedy: str, most: int = MOST_BYTES) -> str:
    """Return the text of a plain UTF-8 file, a byte-order mark left out. Raises UserError, which ends in `remedy`."""
    return decode_text(read_bytes(path, remedy, most), str(path), remedy)


def decode_text(data: bytes, source: str, remedy: str) -> str:
    """Return UTF-8 bytes as text, a byte-order mark left out. source: names them in the sentence."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start}): {remedy}.") from error


def read_lines(path: Path | str, remedy: str, most: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a plain file with their ends; none is longer than `most` bytes, nor is a file read whole.

    Raises UserError, which names the line and ends in `remedy`.
    """
    with open_file(path, remedy) as file:
        number = 0
        while line := _read(file, path, remedy, most + 1, lines=True):
            number += 1
            if len(line) > most:
                raise UserError(f"{path}, line {number}: the line has more than {most / MIB:.3g} MiB: {remedy}.")
            yield line


def _read(file: BinaryIO, path: Path | str, remedy: str, most: int, lines: bool = False) -> bytes:
    try:
        return file.readline(most) if lines else file.read(most)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({why_not(error)}): {remedy}.") from error


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
            # Level by level, as a tokenizer.json has a million values.
            level = [value] if isinstance(value, list | dict) else []
            for _ in range(MOST_DEPTH):
                inside = [item for one in level for item in (one if isinstance(one, list) else one.values())]
                level = [item for item in inside if isinstance(item, list | dict)]
            if level:
                raise RecursionError
        if _SUSPECT.search(text):
            # At any depth, without recursion.
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
    kinds: dict[type, str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
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


def _what(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"lists or objects nested deeper than {MOST_DEPTH} levels"
    if "digits" in str(error):
        return f"an integer of more than {MOST_DIGITS} digits"
    return f"{error}, which cannot be written again as JSON"


MOST_YAML_BYTES = MIB
MOST_NODES = 10_000
"""The most values of a file, those that aliases repeat counted each time."""
MOST_LEVELS = 30


def read_yaml(path: Path | str, remedy: str) -> Any:
    """Return the value in a YAML file. Raises UserError, which ends in `remedy`: also for a key that stands twice in one
    mapping, for aliases that contain themselves or multiply, and for values that Python cannot hold."""
    import yaml

    text = read_text(path, remedy, MOST_YAML_BYTES)
    try:
        return parse_yaml(text, path, remedy)
    except yaml.MarkedYAMLError as error:
        at = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        remedy = "indent with spaces, not with tabs" if "'\\t'" in str(error.problem) else remedy
        raise UserError(f"{path}{at} is not YAML ({error.problem or first_line(error)}): {remedy}.") from error


def parse_yaml(text: str, path: Path | str, remedy: str) -> Any:
    """Return the value of a YAML text. path: names it in the sentence. Raises MarkedYAMLError where the text is no YAML, and
    UserError, which ends in `remedy`, for all else that `read_yaml` refuses."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, path, remedy)
        return loader.construct_document(node)
    except (yaml.MarkedYAMLError, UserError):
        raise
    except RecursionError as error:
        raise UserError(f"{path} is nested deeper than {MOST_LEVELS} levels: {remedy}.") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise UserError(f"{path} holds a value that cannot be read ({first_line(error)}): {remedy}.") from error
    except (LookupError, AttributeError) as error:  # of the library's readers of `!!bool x` and `!!timestamp x`
        raise UserError(f"{path} holds a value that is not what its tag says: {remedy}.") from error


def _check_nodes(root: "yaml.Node", path: Path | str, remedy: str) -> None:
    """Raise UserError for a tree of nodes that is deep, large, contains itself, or names a key twice."""
    import yaml

    stack: list[tuple[yaml.Node, tuple[yaml.Node, ...]]] = [(root, (root,))]
    count = 0
    while stack:
        node, above = stack.pop()
        count += 1
        if count > MOST_NODES:
            raise UserError(f"{path} holds more than {MOST_NODES} values (aliases multiply them?): {remedy}.")
        if len(above) > MOST_LEVELS:
            raise UserError(f"{path} is nested deeper than {MOST_LEVELS} levels: {remedy}.")
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            at = node.start_mark.line + 1
            raise UserError(f"{path}, line {at}, holds an integer of more than {MOST_DIGITS} digits: {remedy}.")
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in seen:
                        where = f"lines {seen[key.value]} and {line}" if line > seen[key.value] else f"line {line}"
                        raise UserError(f"{path}: the key {key.value!r} stands there twice, in {where}: {remedy}.")
                    seen[key.value] = line
            inside = [part for pair in node.value for part in pair]
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else []
        for part in inside:
            if any(part is one for one in above):
                at = part.start_mark.line + 1
                raise UserError(f"{path}, line {at}: the value named by an anchor contains itself: {remedy}.")
            stack.append((part, (*above, part)))
