"""Foreign YAML: recipes and launch files, composed and measured before any value is made of them."""

from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import UserError, first_line
from draftsmith.foreign.json import MOST_DIGITS
from draftsmith.foreign.reading import MIB, read_text

MOST_YAML_BYTES = MIB
MOST_NODES = 10_000
"""The most values of a file, those that aliases repeat counted each time."""
MOST_LEVELS = 30


def read_yaml(path: Path | str, remedy: str) -> Any:
    """Return the value in a YAML file. Raises UserError, which ends in `remedy`: also for a key that stands twice in one
    mapping, for aliases that contain themselves or multiply, and for values that Python cannot hold."""
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


def _check_nodes(root: yaml.Node, path: Path | str, remedy: str) -> None:
    """Raise UserError for a tree of nodes that is deep, large, contains itself, or names a key twice."""
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
            _check_keys(node, path, remedy)
            inside = [part for pair in node.value for part in pair]
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else []
        for part in inside:
            if any(part is one for one in above):
                at = part.start_mark.line + 1
                raise UserError(f"{path}, line {at}: the value named by an anchor contains itself: {remedy}.")
            stack.append((part, (*above, part)))


def _check_keys(node: yaml.MappingNode, path: Path | str, remedy: str) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in seen:
                where = f"lines {seen[key.value]} and {line}" if line > seen[key.value] else f"line {line}"
                raise UserError(f"{path}: the key {key.value!r} stands there twice, in {where}: {remedy}.")
            seen[key.value] = line
