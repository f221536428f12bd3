"""Bad recipes: files that are no YAML, YAML that explodes, keys and values that mean nothing or that no machine can hold."""

import json
from pathlib import Path
from typing import Any

import yaml

from draftsmith.heads.formats.layout import find_layout
from draftsmith.recipe.parse import parse_recipe
from tests.bad_inputs.cases import Case, Table, damaged, write

FILE = "recipe.yaml"
GOOD: dict[str, Any] = {"name": "good", "method": "eagle3", "head": {"layer_ids": [1, 2, 3]}, "train": {"epochs": 1}}


def make(folder: Path) -> None:
    """Write a good recipe."""
    (folder / FILE).write_text(yaml.safe_dump(GOOD), encoding="utf-8")


def text(name: str, content: str | bytes, *words: str) -> Case:
    """Return the case of a file with this content; its sentence names the file."""
    return Case(f"file-{name}", write(FILE, content), (FILE, *words))


def value(key: str, content: Any) -> Case:
    """Return the case of a recipe with one more value, by its dotted key; the sentence names the key's last word."""
    parts = key.split(".")
    inner: Any = content
    for part in reversed(parts[1:]):
        inner = {part: inner}
    recipe = GOOD | {parts[0]: {**GOOD.get(parts[0], {}), **inner} if len(parts) > 1 else inner}
    shown = json.dumps(content, default=str)
    return Case(f"{key}-{shown if len(shown) < 90 else shown[:87]}", write(FILE, yaml.safe_dump(recipe)), (parts[-1],))


def _laughs() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(lines)


_FILES = (
    text("empty-name", "name: ''\n", "name"),
    text("latin-1", "name: café\n".encode("latin-1"), "UTF-8"),
    text("control-characters", b"name: \x01\x02\n"),
    text("python-object", "name: !!python/object/apply:os.system ['true']\n"),
    text("unknown-alias", "name: *nobody\n"),
    text("recursive-alias", "data: &a\n  sources: [*a]\n", "contains itself"),
    text("integer-of-5000-digits", f"name: a\nseed: {'9' * 5000}\n", "line 2", "more than 40 digits"),
    text("billion-laughs", _laughs(), "values"),
    text("deep", "data: " + "[" * 5000 + "]" * 5000, "nested"),
    text("long-integer", f"seed: {'9' * 5000}\n"),
    text("bad-date", "name: 2020-13-45\n"),
    text("list-as-key", "? [a, b]\n: 1\n"),
    text("number-as-key", "1: 2\n", "key 1"),
    text("date-as-key", "2020-01-01: 2\n", "2020"),
    text("date", "name: 2020-01-01\n", "name", "date"),
    text("time-inside", "data:\n  template: {today: 2020-01-01 10:00:00}\n", "today", "date"),
    *(
        text(f"tag-{tag}", f"name: !!{tag} x\n")
        for tag in ("bool", "timestamp", "int", "float", "binary", "null", "omap")
    ),
    text("tag-in-a-text", "name: '!!bool x'\n"),
    text("two-documents", "name: a\n---\nname: b\n"),
    text("huge", "# " + "x" * 2**21, "MiB"),
    *damaged(FILE, without="empty cut list null word binary deep long-integer half-surrogate"),
)
_VALUES = (
    *(value(section, content) for section in ("data", "export") for content in ([1], "x", 3)),
    *(
        value(key, content)
        for key, contents in {
            "unknown": (1,),
            "method": ("eagle99", ["eagle3"]),
            "seed": ("one", 10**30, 1.5),
            "name": (["a"], "a/b", "a\0b", "x" * 5000),
            "target.dtype": ("float99",),
            "target.path": ("", "a\0b"),
            "data.sources": ("talk.jsonl\0", {"a": 1}),
            "features.layer_ids": (["a"],),
            "train.lr": (float("inf"), "fast"),
            "train.betas": ([0.9], ["a", "b"]),
            "train.rows": (2**16,),
            "head.layer_ids": ("all",),
            "evaluate.temperatures": ([], ["hot"]),
            "evaluate.drafts": ([{"tree": "no_such.json", "acceptance": "typical", "epsilon": 2}], "chain"),
            "evaluate.beside": (["a"],),
            "evaluate.baselines": ([{"kind": "magic"}],),
            "export.layout": ("no-such-layout",),
            "tracking.wandb": ("maybe", True),
            "tracking.backends": (["comet"], ["wandb", "wandb"], "wandb"),
            **dict.fromkeys([f"tracking.{key}" for key in ("project", "entity", "group", "notes", "name")], ("x",)),
            "tracking.tags": (["x"],),
            "tracking.artifacts": ("all", "some"),
        }.items()
        for content in contents
    ),
)


def read(folder: Path) -> None:
    """Read a recipe, and what it names by words that the command line alone cannot judge."""
    recipe = parse_recipe(["--recipe", str(folder / FILE)])
    if recipe.export.layout is not None:
        find_layout(recipe.export.layout, recipe.method)


TABLE = Table("recipes", make, read, (*_FILES, *_VALUES))
