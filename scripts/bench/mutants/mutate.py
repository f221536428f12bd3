"""Mutants of a Python file: the same text but for one operator, number, name or statement."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "*",
    "**": "*",
    "@": "-",
    "&": "|",
    "|": "&",
    "and": "or",
    "or": "and",
    "in": "not in",
    "not in": "in",
}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "argmax": "argmin"}
NAMES |= {
    "logical_or": "logical_and",
    "logical_and": "logical_or",
    "zeros": "ones",
    "ones": "zeros",
    "cumsum": "cumprod",
}
NAMES |= {"minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"}
GUARDS = ("frozen", "strict", "maxsize")
"""Arguments that refuse what no caller does, or that decide speed alone: `dataclass(frozen=...)`, `zip(strict=...)`, caches."""


@dataclass(frozen=True)
class Mutant:
    """One fault. line: where it is. before, after: the text that is replaced, at `start` of the file's text, and its substitute."""

    line: int
    start: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the file's text with the fault."""
        return text[: self.start] + self.after + text[self.start + len(self.before) :]

    def lines(self, text: str) -> tuple[str, str]:
        """Return the line that changes (the first of several), without and with the fault."""
        before, after = text.splitlines()[self.line - 1], self.apply(text).splitlines()[self.line - 1]
        return before.strip(), after.strip()


def mutants(text: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text: none in types, assertions, guards and the texts of messages."""
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))

    def place(line: int, column: int) -> int:
        # The parser counts bytes.
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: dict[tuple[int, str], Mutant] = {}
    for node in _walk(ast.parse(text)):
        for start, end, after in _changes(node, text, place):
            found[start, after] = Mutant(text.count("\n", 0, start) + 1, start, text[start:end], after)
    return [found[key] for key in sorted(found)]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    types = (getattr(node, "annotation", None), getattr(node, "returns", None))
    for child in ast.iter_child_nodes(node):
        if (
            child not in types
            and not isinstance(child, ast.JoinedStr | ast.Assert)
            and getattr(child, "arg", None) not in GUARDS
        ):
            yield from _walk(child)


def _changes(node: ast.AST, text: str, place) -> Iterator[tuple[int, int, str]]:  # type: ignore[no-untyped-def]
    """Yield (start, end, substitute) for what can be changed at one node."""

    def begin(one: ast.expr | ast.stmt) -> int:
        return place(one.lineno, one.col_offset)

    def finish(one: ast.expr | ast.stmt) -> int:
        return place(one.end_lineno, one.end_col_offset)

    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = list(itertools.pairwise(sides))
    elif isinstance(node, ast.BoolOp):
        pairs = list(itertools.pairwise(node.values))
    elif isinstance(node, ast.BinOp) and not isinstance(node.left, ast.JoinedStr):
        pairs = [(node.left, node.right)]
    for left, right in pairs:
        between = text[finish(left) : begin(right)]
        operator = re.sub(r"[()\s]+", " ", between).strip()
        if operator in OPERATORS and operator in between:
            start = finish(left) + between.index(operator)
            yield start, start + len(operator), OPERATORS[operator]
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and hasattr(node, "lineno"):
        after = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield begin(node), finish(node), after
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        yield begin(node), begin(node) + (4 if isinstance(node.op, ast.Not) else 1), ""
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield finish(node) - len(node.attr), finish(node), NAMES[node.attr]
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield begin(node), finish(node), NAMES[node.id]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where" and len(node.args) == 3:
        one, other = node.args[1:]
        gap = text[finish(one) : begin(other)]
        swapped = text[begin(other) : finish(other)] + gap + text[begin(one) : finish(one)]
        yield begin(one), finish(other), swapped
        yield begin(node), finish(node), text[begin(other) : finish(other)]
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield begin(node), finish(node), "pass"
