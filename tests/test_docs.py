"""Every command in the pages of docs/ runs here, or is marked with what it needs that a test has not got.

A page's blocks run in order in a folder of its own with a miniature target, conversations and prompts. What a line of
HTML right before a block says:

    <!-- file: NAME -->     yaml, json, jsonl, jinja: written to the folder before anything runs
    <!-- exits with N -->   bash: its last line ends with this exit code; everything else ends with 0
    <!-- needs REASON -->   bash: not run, but its options are parsed and the files that it names are there
    <!-- output -->         text: comes out of the bash block before it, numbers aside; ... stands for anything

A yaml block without a name is a part of a recipe and is parsed as one; a jsonl block without a name holds conversations.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.cli.commands import COMMANDS
from draftsmith.cli.main import main
from draftsmith.data.conversations.load import load_conversations
from draftsmith.eval.clocks.costs import measure_costs, measure_table
from draftsmith.eval.gate.gate import parse_thresholds
from draftsmith.heads.registry import methods
from draftsmith.recipe.options import take_options
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from tests.helpers import save_target, write_rows

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "README.md"]  # a table of contents
REASONS = ("a GPU", "SLURM", "the Hub", "an engine", "an account", "trained heads", "a terminal")
PATH = r"(?<![\w./-])(?:recipes|train|scripts|runs|models)/[\w./-]*\w(?![\w./*-])"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SOURCES = ("data", "heads", "train", "eval", "draftsmith", "scripts")
LANGUAGES = ("bash", "yaml", "json", "jsonl", "jinja", "text", "python")

# Sizes that a page gives for a real model, at the measure of the miniature one; nothing else of a recipe is changed.
SIZES: dict[str, dict[str, Any]] = {
    "data": {"max_length": 160, "heldout": 6},
    "answers": {"max_new_tokens": 10, "batch": 32},
    "features": {"batch_tokens": 512},
    "train": {"epochs": 1, "row_tokens": 160, "rows": 4, "evaluations": 2},
    "evaluate": {"per_slice": 1, "max_new_tokens": 8, "repeats": 1, "max_k": 5, "plan_batches": [1]},
}
DRAFT_VOCAB = 200


@dataclass(frozen=True)
class Block:
    """A fenced block. note: what the HTML comment on the line before it says, "" without one."""

    language: str
    text: str
    note: str
    line: int

    @property
    def file(self) -> str | None:
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else None

    @property
    def needs(self) -> str | None:
        return self.note.removeprefix("needs ") if self.note.startswith("needs ") else None

    @property
    def exit_code(self) -> int:
        found = re.fullmatch(r"exits with (\d+)", self.note)
        return int(found[1]) if found else 0

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks, start = [], None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start = number
        elif start is not None and line.rstrip() == "```":
            note = re.fullmatch(r"<!-- (.+) -->", lines[start - 1])
            text = "\n".join(lines[start + 1 : number]) + "\n"
            blocks.append(Block(lines[start][3:].strip(), text, note[1] if note else "", start + 1))
            start = None
    assert start is None, f"{page.name}: the block in line {start} is not closed"
    return blocks


def make_workplace(folder: Path) -> None:
    """What a reader has: the repository, a target (here a tiny one), conversations and prompts."""
    for name in ("recipes", "train", "scripts", "docs"):
        (folder / name).symlink_to(ROOT / name)
    models = folder / "models"
    save_target(models / "my-model", initializer_range=0.08)
    save_target(models / "my-small-model", num_hidden_layers=2)
    tuned = save_target(models / "my-model-v2", initializer_range=0.08)
    tuned.get_decoder().layers[-1].mlp.up_proj.weight.data += 0.01  # as after a fine-tune
    tuned.save_pretrained(models / "my-model-v2")
    for name, count in (("conversations", 48), ("prompts", 12)):
        asked = ([{"role": "user", "content": f"{name} {i}: why {i * 7}?"}] for i in range(count))
        write_rows(
            folder / f"{name}.jsonl",
            *({"id": f"{name}-{i}", "slice": ("chat", "code")[i % 2], "messages": one} for i, one in enumerate(asked)),
        )


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows; recipes at the measure of the miniature target."""
    for block in blocks_of(page):
        if block.file is None:
            continue
        text = block.text
        if block.language == "yaml" and "target" in (content := yaml.safe_load(text)):
            for section, values in SIZES.items():
                content[section] = content.get(section, {}) | values
            if "draft_vocab_size" in content.get("head", {}):
                content["head"]["draft_vocab_size"] = DRAFT_VOCAB
            text = yaml.safe_dump(content)
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(text, encoding="utf-8")


def run_line(line: str, folder: Path) -> tuple[int, str]:
    """Run one line as a shell would and return its exit code and output; plain calls of draftsmith in this process."""
    operators = [t for t in shlex.shlex(line, posix=True, punctuation_chars=True) if set(t) <= set("();<>|&")]
    words = shlex.split(line, comments=True)
    if words[0] != "draftsmith" or operators or "$" in line:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=folder,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            code = main(words[1:])
        except SystemExit as exit_:  # --help
            code = int(exit_.code or 0)
    return code, told.getvalue()


def check_marked(line: str) -> None:
    """Parse the options of a line that is not run, and look for the files that it names."""
    words = shlex.split(line, comments=True)
    named = [line, *(Path(word).read_text(encoding="utf-8") for word in words if word.endswith(".yaml"))]
    for path in re.findall(PATH, "\n".join(named)):
        assert Path(path).exists(), f"{line}: there is no {path}"
    for word in words:
        if word.startswith("{"):
            json.loads(word)
    if words[0] == "draftsmith":
        assert words[1] in COMMANDS
        command, rest = words[1], words[2:]
    elif words[:2] == ["accelerate", "launch"]:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        command, rest = "train", words[script + 1 :]
    else:
        return
    own, rest = take_options(rest, COMMANDS[command].options)
    parse_thresholds(getattr(own, "fail_under", []))
    if command == "compare":
        assert len(rest) == 2, "OLD NEW"
    if command == "export":
        assert own.gguf or not (own.gguf_type or own.gguf_pre)
    if COMMANDS[command].takes_recipe:
        parse_recipe(rest)


def plain(text: str) -> str:
    """Text without numbers and layout."""
    return " ".join(re.sub(r"\d[\d.,]*", "#", text).split())


def check_output(expected: str, told: str, where: str) -> None:
    """Every line of `expected` is in `told`, in this order."""
    rest = plain(told)
    for line in filter(None, map(plain, expected.splitlines())):
        found = re.search(".*?".join(map(re.escape, line.split("..."))), rest)
        assert found, f"{where}: {line!r} does not come out; what does:\n{told[-3000:]}"
        rest = rest[found.end() :]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    # How exactly a step is timed says nothing about a page.
    monkeypatch.setattr("draftsmith.stages.evaluator.measure_costs", partial(measure_costs, repeats=1))
    monkeypatch.setattr("draftsmith.stages.planning.measure_table", partial(measure_table, seconds=0.0))
    make_workplace(tmp_path)
    write_files(page, tmp_path)
    told = ""
    for block in blocks_of(page):
        where = f"{page.name}, line {block.line}"
        if block.note == "output":
            check_output(block.text, told, where)
        if block.language != "bash":
            continue
        told = ""
        for left, line in enumerate(block.commands, 1 - len(block.commands)):
            if block.needs is not None:
                check_marked(line)
                continue
            code, text = run_line(line, tmp_path)
            told += text
            expected = 0 if left else block.exit_code
            assert code == expected, f"{where}: {line} ended with {code}:\n{text[-3000:]}"


@pytest.mark.parametrize("name", [".github/workflows/draft-head.yml", ".gitlab-ci.yml"])
def test_a_workflow_for_ci_runs_the_commands_of_its_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those run in the tests, for a miniature target."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "ci.md"
    write_files(page, tmp_path)
    ran = [line for block in blocks_of(page) if block.language == "bash" for line in block.commands]
    found = re.findall(r"draftsmith (?:evaluate|compare) .+", (tmp_path / name).read_text(encoding="utf-8"))
    assert [line.split()[1] for line in found] == ["evaluate", "compare"]
    for line in found:
        line = line.removesuffix(" || failed=$?").replace('"$TARGET"', "models/my-model-v2")
        assert line.removesuffix(" --fail-if-worse") in ran
    assert "--fail-if-worse" in [option.name for option in COMMANDS["compare"].options]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_commands_in_a_recipes_comments_are_commands(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "train", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    comments = recipe.read_text(encoding="utf-8").replace(" \\\n#", "")
    for run in re.findall(r"\bruns/[\w.-]+", comments):
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
    found = re.findall(r"^# +((?:draftsmith|accelerate launch) .+)$", comments, re.MULTILINE)
    assert found or recipe.stem.endswith("tiny"), "how a full-size recipe is run"
    for line in found:
        check_marked(line.replace("RECIPE", "recipes/eagle3/tiny.yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_blocks_of_a_page_are_what_they_seem(page: Path, tmp_path: Path) -> None:
    """Blocks are marked in a known way, and recipes and conversations can be read just as they stand."""
    before = None
    for block in blocks_of(page):
        where = f"{page.name}, line {block.line}"
        assert block.language in LANGUAGES, where
        if block.language == "bash":
            assert block.needs in (*REASONS, None), f"{where}: one of {REASONS}"
            assert block.needs or block.note == "" or block.exit_code, where
        elif block.language == "text":
            assert block.note == "output", where
            assert before is not None, where
            assert before.language == "bash", where
            assert before.needs is None, where
        else:
            assert block.file or not block.note, where
            check_file(block, tmp_path)
        before = block


def check_file(block: Block, folder: Path) -> None:
    path = folder / f"block.{block.language}"
    path.write_text(block.text, encoding="utf-8")
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml" and (block.file is None or "target" in yaml.safe_load(block.text)):
        parse_recipe(["--recipe", str(path)])
    elif block.language == "python":
        compile(block.text, str(path), "exec")
    elif block.language == "jsonl" and not (block.file or "").startswith("broken"):
        load_conversations([str(path)])


def keys(cls: type, prefix: str = "") -> Iterator[str]:
    for field in fields(cls):
        yield prefix + field.name
        inner = field.default_factory() if callable(field.default_factory) else None  # type: ignore[misc]
        if is_dataclass(inner):
            yield from keys(type(inner), f"{prefix}{field.name}.")
        elif field.name == "drafts":
            yield from keys(type(inner[0]), f"{prefix}{field.name}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_keys_that_a_page_names_exist(page: Path) -> None:
    known = {*keys(Recipe), *(key for method in methods().values() for key in keys(method.options_class, "head."))}
    sections = {key.split(".")[0] for key in known if "." in key}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.0-9]+)", page.read_text(encoding="utf-8"))
    assert not {name for name in named if not name.endswith(".jsonl")} - known


@cache
def sentences() -> str:
    """Every string of the sources, what is filled in left out."""
    strings = []
    for path in (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "\n" for p in parts]
            strings.append("".join(texts))
    return "\n".join(strings)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_messages_that_a_page_explains_exist(page: Path) -> None:
    """A message is quoted as code with … where something is filled in."""
    for quoted in re.findall(r"`([^`\n]*…[^`\n]*)`", page.read_text(encoding="utf-8")):
        lost = [part for part in quoted.split("…") if part.strip() and part.strip() not in sentences()]
        assert not lost, f"{page.name} quotes {quoted!r}, of which nothing says {lost}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_headings_that_a_page_links_to_exist(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / name if name else page).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
