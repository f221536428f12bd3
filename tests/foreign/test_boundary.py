"""Foreign bytes come in through draftsmith/foreign alone: nobody else parses, and libraries that do work within its guard."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_floors import parse, sources

PARSERS = {
    "json.loads",
    "json.load",
    "yaml.safe_load",
    "yaml.load",
    "yaml.compose",
    "tomllib.load",
    "pickle.load",
    "pickle.loads",
}
READS = {"read_text", "read_bytes", "read_parquet"}
GUARDED = {
    "from_pretrained",
    "safe_open",
    "load_file",
    "load_dataset",
    "from_config",
    "apply_chat_template",
    "torch.load",
}
GUARDS = {"foreign_code", "explain_config"}
OURS = {
    "data/embedded": "the packed texts are shipped with the code",
    "heads/formats/engines.py": "served.json is shipped with the code, and start lines are text",
    "heads/export/tuned.py": "reads back what it has just written",
    "heads/formats/layout.py": "targets.json is shipped with the code",
    "eval/engines": "talks to servers and processes that it has started",
    "draftsmith/machine.py": "reads /proc and /sys",
    "draftsmith/cli/doctor.py": "reads /proc, /sys and accelerate's own settings with patterns",
    "draftsmith/stages/gguf.py": "looks for an option in a script that the user has named to be run",
    "train/trackers.py": "the identifier that it wrote itself",
    "train/meeting.py": "what the processes of one training tell each other",
    "train/loop.py": "makes plain JSON of a recipe",
    "draftsmith/recipe/record.py": "makes plain JSON of settings",
    "draftsmith/recipe/parse.py": "recipes are shipped with the code",
    "eval/results/result.py": "makes plain JSON of a result",
    "data/conversations/templates.py": "answers are rendered after the same template has been tried and guarded",
}
"""Files, or folders, that read what is no foreign data, and why."""


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield every call below a node, and whether it stands within a guard."""
    if isinstance(node, ast.With):
        inner = [name_of(item.context_expr.func) for item in node.items if isinstance(item.context_expr, ast.Call)]
        guarded = guarded or any(name.rpartition(".")[2] in GUARDS for name in inner)
    if isinstance(node, ast.Call):
        yield node, guarded
    for child in ast.iter_child_nodes(node):
        yield from calls(child, guarded)


def offences(path: Path) -> Iterator[str]:
    for call, guarded in calls(parse(path), False):
        name = name_of(call.func)
        last = name.rpartition(".")[2]
        unguarded = not guarded and (last in GUARDED or name in GUARDED) and "Embedding" not in ast.unparse(call.func)
        if name in PARSERS or ("." in name and last in READS) or unguarded:
            yield f"{path}:{call.lineno} {name}"


FILES = [path for path in sources() if path.parts[0] != "scripts" and path.parts[:2] != ("draftsmith", "foreign")]


def is_ours(path: Path) -> bool:
    return any(path.as_posix().startswith(one) for one in OURS)


def test_foreign_data_is_read_at_the_boundary() -> None:
    assert not [offence for path in FILES if not is_ours(path) for offence in offences(path)]


@pytest.mark.parametrize("name", OURS)
def test_an_exception_that_is_none_any_more_goes(name: str) -> None:
    assert any(list(offences(path)) for path in FILES if path.as_posix().startswith(name))


def test_servers_are_asked_in_one_place() -> None:
    """Its bounds of bytes, lines and time, and its refusal of redirects, hold for everything that asks a server."""
    asking = {
        path.as_posix()
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.split(".")[0] in ("urllib", "http", "requests", "httpx", "aiohttp")
    }
    assert asking == {"draftsmith/foreign/server.py"}
