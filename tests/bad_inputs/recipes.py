"""Bad recipes: files that are no YAML, YAML that explodes, keys and values that mean nothing or that no machine can hold."""

import json
from pathlib import Path
from typing import Any

import yaml

from draftsmith.heads.formats.layout import find_layout
from draftsmith.recipe.parse import parse_recipe
from tests.bad_inputs.cases import Case, Table, link, pipe, remove, replace_by_folder, write

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
    text("not-a-mapping", "- a\n- b\n"),
    text("a-word", "hello"),
    text("a-number", "3"),
    text("tabs", "train:\n\tepochs: 3\n"),
    text("open-bracket", "data: [1, 2\n"),
    text("open-quote", 'name: "x\n'),
    text("key-twice", "name: a\nname: b\n", "name"),
    text("key-twice-inside", "train:\n  epochs: 1\n  epochs: 2\n", "epochs"),
    text("latin-1", "name: café\n".encode("latin-1"), "UTF-8"),
    text("control-characters", b"name: \x01\x02\n"),
    text("python-object", "name: !!python/object/apply:os.system ['true']\n"),
    text("python-tuple", "name: !!python/tuple [1]\n"),
    text("unknown-tag", "name: !thing x\n"),
    text("unknown-alias", "name: *nobody\n"),
    text("recursive-alias", "data: &a\n  sources: [*a]\n", "contains itself"),
    text("recursive-list", "data: &a [*a]\n", "contains itself"),
    text("recursive-key", "&a ? *a : 1\n"),
    text("integer-of-5000-digits", f"name: a\nseed: {'9' * 5000}\n", "line 2", "more than 40 digits"),
    text("billion-laughs", _laughs(), "values"),
    text("deep", "data: " + "[" * 5000 + "]" * 5000, "nested"),
    text("deep-blocks", "".join(f"{' ' * i}a:\n" for i in range(200)), "nested"),
    text("long-integer", f"seed: {'9' * 5000}\n"),
    text("bad-date", "name: 2020-13-45\n"),
    text("list-as-key", "? [a, b]\n: 1\n"),
    text("object-as-key", "? {a: b}\n: 1\n"),
    text("number-as-key", "1: 2\n", "key 1"),
    text("truth-as-key", "true: 2\n", "key True"),
    text("number-as-key-inside", "train:\n  1: 2\n", "train", "key 1"),
    text("date-as-key", "2020-01-01: 2\n", "2020"),
    text("date", "name: 2020-01-01\n", "name", "date"),
    text("time-inside", "data:\n  template: {today: 2020-01-01 10:00:00}\n", "today", "date"),
    text("bytes", "name: !!binary aGk=\n", "name", "bytes"),
    text("set", "name: !!set {a, b}\n", "name", "set"),
    *(
        text(f"tag-{tag}", f"name: !!{tag} x\n")
        for tag in ("bool", "timestamp", "int", "float", "binary", "null", "omap")
    ),
    text("tag-in-a-text", "name: '!!bool x'\n"),
    text("null-as-key", "~: 2\n", "key None"),
    text("two-documents", "name: a\n---\nname: b\n"),
    text("huge", "# " + "x" * 2**21, "MiB"),
    Case("file-missing", remove(FILE), (FILE,)),
    Case("file-folder", replace_by_folder(FILE), (FILE,)),
    Case("file-dangling", link(FILE, "nowhere.yaml"), (FILE,)),
    Case("file-loop", link(FILE, FILE), (FILE,)),
    Case("file-pipe", pipe(FILE), (FILE,)),
    Case("file-device", link(FILE, "/dev/zero"), (FILE,)),
)
_VALUES = (
    *(
        value(section, content)
        for section in ("data", "train", "evaluate", "export", "target")
        for content in ([1], "x", 3)
    ),
    value("unknown", 1),
    value("train.epoch", 1),
    value("train.loss.kind", "l2"),
    value("method", "eagle99"),
    value("method", ["eagle3"]),
    value("seed", "one"),
    value("seed", -1),
    value("seed", 10**30),
    value("seed", 1.5),
    value("name", ["a"]),
    value("name", "a/b"),
    value("name", "a\0b"),
    value("name", "x" * 5000),
    value("target.dtype", "float99"),
    value("target.path", ""),
    value("target.path", "a\0b"),
    value("data.limit", 0),
    value("data.limit", 10**15),
    value("data.max_length", 10**12),
    value("data.max_length", 0),
    value("data.heldout", -1),
    value("data.sources", "talk.jsonl\0"),
    value("data.sources", {"a": 1}),
    value("answers.temperature", -1),
    value("answers.temperature", float("nan")),
    value("answers.temperature", 1e300),
    value("answers.top_p", 2),
    value("answers.top_k", -1),
    value("answers.max_new_tokens", 10**12),
    value("answers.batch", 10**9),
    value("features.shard_mb", 10**12),
    value("features.batch_tokens", 10**15),
    value("features.layer_ids", ["a"]),
    value("train.epochs", 10**9),
    value("train.epochs", 0),
    value("train.epochs", "many"),
    value("train.max_steps", 10**15),
    value("train.row_tokens", 10**12),
    value("train.rows", 10**9),
    value("train.accumulation", 10**9),
    value("train.lr", 1e300),
    value("train.lr", float("inf")),
    value("train.lr", -1),
    value("train.lr", "fast"),
    value("train.muon_lr", 1e300),
    value("train.betas", [0.9]),
    value("train.betas", [2, 3]),
    value("train.betas", ["a", "b"]),
    value("train.weight_decay", 1e300),
    value("train.warmup", 7),
    value("train.clip", -1),
    value("train.evaluations", 10**9),
    value("train.checkpoint_minutes", 1e300),
    value("train.workers", 10**6),
    value("head.ttt_steps", 10**6),
    value("head.ttt_steps", 0),
    value("head.draft_vocab_size", 10**12),
    value("head.draft_vocab_size", -5),
    value("head.layer_ids", []),
    value("head.layer_ids", [3, 2, 1]),
    value("head.layer_ids", [-1, 0, 1]),
    value("head.layer_ids", "all"),
    value("head.layer_ids", list(range(2000))),
    value("head.no_such_key", 1),
    value("evaluate.num_speculative_tokens", 10**9),
    value("evaluate.num_speculative_tokens", 0),
    value("evaluate.max_k", 10**9),
    value("evaluate.max_new_tokens", 10**12),
    value("evaluate.batch", 10**9),
    value("evaluate.repeats", 10**9),
    value("evaluate.repeats", 0),
    value("evaluate.per_slice", 10**12),
    value("evaluate.temperatures", []),
    value("evaluate.temperatures", [0.0, 0.0]),
    value("evaluate.temperatures", ["hot"]),
    value("evaluate.temperatures", [float("inf")]),
    value("evaluate.drafts", [{"tree": "no_such.json", "acceptance": "typical", "epsilon": 2}]),
    value("evaluate.drafts", [{"tree": "chain", "depth": 399}]),
    value("evaluate.drafts", [{"tree": "dynamic", "depth": 399, "branching": 8, "total_tokens": 60}]),
    value("evaluate.drafts", [{"tree": "dynamic", "depth": 4, "branching": 10**9, "total_tokens": 60}]),
    value("evaluate.drafts", [{"tree": "dynamic", "depth": 4, "branching": 8, "total_tokens": 10**9}]),
    value("evaluate.drafts", "chain"),
    value("evaluate.beside", ["a"]),
    value("evaluate.baselines", [{"kind": "magic"}]),
    value("evaluate.max_new_tokens_by_slice", {"chat": -1}),
    value("export.layout", "no-such-layout"),
    value("export.tensor_parallel", 10**9),
    value("export.tensor_parallel", 0),
    value("tracking.wandb", "maybe"),
    value("tracking.wandb", True),
    value("tracking.backends", ["comet"]),
    value("tracking.backends", ["wandb", "wandb"]),
    value("tracking.backends", "wandb"),
    *(value(f"tracking.{key}", "x") for key in ("project", "entity", "group", "notes", "name")),
    value("tracking.tags", ["x"]),
    value("tracking.artifacts", "all"),
    value("tracking.artifacts", "some"),
)


def read(folder: Path) -> None:
    """Read a recipe, and what it names by words that the command line alone cannot judge."""
    recipe = parse_recipe(["--recipe", str(folder / FILE)])
    if recipe.export.layout is not None:
        find_layout(recipe.export.layout, recipe.method)


TABLE = Table("recipes", make, read, (*_FILES, *_VALUES))
