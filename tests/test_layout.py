"""The rules of the house that no linter knows: links, names, imports, docstrings, packaging; tests that can fail, warnings that name a remedy."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from draftsmith.heads.registry import methods
from tests.test_floors import ROOT, imported_names, parse
from tests.test_floors import sources as sources_of_the_product

ROOMS = ("data", "heads", "train", "eval")
LINKS = (*ROOMS, "recipes")
LIGHT_ROOMS = ("heads", "eval")  # a GPU machine may have neither of the libraries below
HEAVY = ("datasets", "wandb", "jsonargparse")
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_FILES_OF_A_FOLDER = 18


def sources(*folders: str) -> list[Path]:
    """Return the Python files of top-level folders, links not followed."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """Return a path as it is shown in messages."""
    return path.relative_to(ROOT).as_posix()


ROOM_FILES = sources(*ROOMS)
PACKAGE_FILES = [
    *ROOM_FILES,
    *sources(*(f"draftsmith/{name}" for name in ("cli", "estimate", "recipe", "stages"))),
    *sorted((ROOT / "draftsmith").glob("*.py")),
]
BENCH_FILES = sources("scripts/bench")
ALL_FILES = [*PACKAGE_FILES, *sources("scripts", "tests")]


def module_name(path: Path) -> str:
    """Return the one name that a file is imported under."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "draftsmith" else ("draftsmith", *parts))


def tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return parse(path.relative_to(ROOT))


def is_launchable(path: Path) -> bool:
    """Whether a file does something when it is run: `if __name__ == "__main__":` at the top level."""
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree(path).body)


def tracked_files() -> list[Path]:
    """Return the files that belong to the repository, new ones included."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout: no list of the repository's files")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).exists()]


@pytest.mark.parametrize("room", LINKS)
def test_room_is_a_relative_link_to_its_folder(room: str) -> None:
    link = ROOT / "draftsmith" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert link.is_dir()


def test_no_module_is_named_like_a_library() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    taken = {name.lower().replace("-", "_") for name in (*pinned, *metadata.packages_distributions())}
    taken |= sys.stdlib_module_names
    clashes = [name_of(path) for path in sources(*ROOMS, "scripts") if path.stem in taken]
    assert not clashes


def test_rooms_are_imported_through_the_package_only() -> None:
    wrong = [
        f"{name_of(path)}: {name}"
        for path in ALL_FILES
        for name in imported_names(path.relative_to(ROOT))
        if name.startswith(".") or name.split(".")[0] in LINKS
    ]
    assert not wrong


def test_heads_and_eval_name_no_heavy_library() -> None:
    wrong = [
        f"{name_of(path)}: {name}"
        for path in sources(*LIGHT_ROOMS)
        for name in imported_names(path.relative_to(ROOT))
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_loops_never_ask_which_method_a_head_is_of() -> None:
    """What differs between drafters is theirs, in heads/: one more drafter touches no file of train/, eval/ and data/."""
    asked = [
        f"{name_of(path)}:{node.lineno}: {node.value!r}"
        for path in sources("train", "eval", "data")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in methods()
    ]
    imported = [
        f"{name_of(path)}: {name}"
        for path in sources("train", "eval", "data")
        for name in imported_names(path.relative_to(ROOT))
        if any(re.match(rf"draftsmith\.heads\.{method}(_|\.|$)", name) for method in methods())
    ]
    baseline = "eval/drafters/baseline"  # a whole model that drafts untrained is a baseline of the same name
    assert not [one for one in (*asked, *imported) if not one.startswith(baseline)]


IMPORT_ALL = """
import importlib, json, sys
blocked, names = json.loads(sys.argv[1])
for name in blocked:
    sys.modules[name] = None  # as if it were not installed
for name in names:
    importlib.import_module(name)
print(json.dumps({n: m.__file__ for n, m in sys.modules.items() if getattr(m, "__file__", None)}))
"""


def import_all(files: list[Path], blocked: tuple[str, ...] = ()) -> dict[str, str]:
    """Import modules of rooms in a new interpreter whose folder is the repository; return module -> file."""
    names = [module_name(path) for path in files if path.stem != "__init__"]
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps([blocked, names])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.full
def test_heads_and_eval_import_where_heavy_libraries_are_absent() -> None:
    loaded = import_all(sources(*LIGHT_ROOMS), blocked=HEAVY)
    assert "draftsmith.heads.base" in loaded
    # Where data are at hand, a GPU machine trains and decodes without these.
    absent = ("datasets", "wandb", "peft", "deepspeed")
    assert "draftsmith.stages.pipeline" in import_all([*ROOM_FILES, *sources("draftsmith/stages")], absent)


@pytest.mark.full
def test_every_file_is_loaded_under_one_name() -> None:
    loaded = import_all([path for path in ROOM_FILES if not is_launchable(path)])
    names: dict[Path, list[str]] = {}
    for module, file in loaded.items():
        names.setdefault(Path(file).resolve(), []).append(module)
    ours = {path: found for path, found in names.items() if path in ROOM_FILES}
    assert ROOT / "heads" / "base.py" in ours
    assert all(found == [module_name(path)] for path, found in ours.items()
               if path.stem != "__init__")  # fmt: skip
    assert not {module for module in loaded if module.split(".")[0] in LINKS}


def test_launchables_are_imported_by_nobody() -> None:
    launchables = {module_name(path) for path in ROOM_FILES if is_launchable(path)}
    importers = [name_of(path) for path in PACKAGE_FILES if launchables & set(imported_names(path.relative_to(ROOT)))]
    assert not importers


def test_nothing_public_lacks_a_docstring() -> None:
    bare = []
    for path in (*PACKAGE_FILES, *BENCH_FILES):
        module = tree(path)
        if path.stat().st_size and not ast.get_docstring(module):
            bare.append(name_of(path))
        for node in module.body:
            defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if defines and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{name_of(path)}: {node.name}")
    assert not bare


def test_files_functions_and_folders_stay_small() -> None:
    files = (*PACKAGE_FILES, *BENCH_FILES)
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    functions = {
        f"{name_of(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in files
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert not {name: lines for name, lines in functions.items() if lines > MOST_LINES_OF_A_FUNCTION}
    folders = Counter(path.parent for path in files)
    assert not {name_of(folder): count for folder, count in folders.items() if count > MOST_FILES_OF_A_FOLDER}


def test_no_bare_except() -> None:
    bare = [
        f"{name_of(path)}:{node.lineno}"
        for path in ALL_FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


def test_no_file_names_a_place_on_the_authors_machine() -> None:
    place = re.compile(r"(?<![\w.~}-])/(?:work|root)/")
    found = []
    for path in tracked_files():
        if path.is_file() and not path.is_symlink():
            lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
            found += [f"{name_of(path)}:{number}" for number, line in enumerate(lines, 1) if place.search(line)]
    assert not found


def build(hook: str, source: Path, output: Path) -> Path:
    """Run a hook of the build backend in `source`; return the file it made in `output`."""
    output.mkdir()
    code = f"from setuptools import build_meta as b; b.{hook}({str(output)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return next(output.iterdir())


@pytest.mark.full
def test_sdist_and_its_wheel_hold_the_rooms(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in tracked_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)

    sdist = build("build_sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    wheel = build("build_wheel", next((tmp_path / "unpacked").iterdir()), tmp_path / "wheel")

    suffixes = (".py", ".yaml", ".json", ".jinja", ".html", ".css", ".safetensors", ".xz")
    expected = {f"draftsmith/{name_of(path)}" for path in tracked_files()
                if path.relative_to(ROOT).parts[0] in LINKS and path.suffix in suffixes}  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert expected
    assert not expected - held
    assert {"draftsmith/py.typed", "draftsmith/__init__.py"} <= held
    assert not {name.split("/")[0] for name in held} - {"draftsmith", wheel.name.split("-py3")[0] + ".dist-info"}


TESTS = Path(__file__).resolve().parent
ASSERTS = re.compile(r"^(assert_\w+|check\w*|raises|warns|fail|run_conformance)$")
"""Functions that raise where something is not so, by their last name: of pytest, torch.testing, numpy.testing and our own."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def called(node: ast.AST) -> set[str]:
    """The last names of all that is called inside a node."""
    functions = [item.func for item in ast.walk(node) if isinstance(item, ast.Call)]
    names = {one.attr for one in functions if isinstance(one, ast.Attribute)}
    return names | {one.id for one in functions if isinstance(one, ast.Name)}


@cache
def asserts_itself(function: Function) -> bool:
    """Whether a function has an assertion or calls one of ASSERTS."""
    has_assert = any(isinstance(item, ast.Assert) for item in ast.walk(function))
    return has_assert or any(ASSERTS.match(name) for name in called(function))


def without_assertion(tree: ast.Module, helpers: dict[str, list[Function]]) -> list[str]:
    """The tests of a module that assert nothing; helpers: the functions of all tests by name."""

    def asserts(function: Function, seen: frozenset[str]) -> bool:
        if asserts_itself(function):
            return True
        names = called(function)
        further = [(name, one) for name in names - seen for one in helpers.get(name, ())]
        return any(asserts(one, seen | {name}) for name, one in further)

    tests = [item for item in ast.walk(tree) if isinstance(item, Function) and item.name.startswith("test_")]
    return [test.name for test in tests if not asserts(test, frozenset({test.name}))]


def test_every_test_asserts_something() -> None:
    trees = {path: parse(path.relative_to(ROOT)) for path in sorted(TESTS.rglob("*.py"))}
    helpers: dict[str, list[Function]] = {}
    for tree in trees.values():
        for item in ast.walk(tree):
            if isinstance(item, Function):
                helpers.setdefault(item.name, []).append(item)
    tests = {path: tree for path, tree in trees.items() if path.name.startswith("test_")}
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path, tree in tests.items()
        for name in without_assertion(tree, helpers)
    ]
    assert len(tests) > 100
    assert not found


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        ("assert a", True),
        ("a()", False),
        ("with pytest.raises(ValueError):\n  a()", True),
        ("helper()", True),
        ("loop()", False),
    ],
)
def test_the_rule_sees_what_asserts(body: str, fine: bool) -> None:
    text = "def helper():\n  assert 1\ndef loop():\n  loop()\ndef test_it():\n " + body.replace("\n", "\n ")
    tree = ast.parse(text)
    helpers = {item.name: [item] for item in tree.body if isinstance(item, ast.FunctionDef)}
    assert without_assertion(tree, helpers) == ([] if fine else ["test_it"])


REMEDY = re.compile(
    r"\b(answers|data|evaluate|export|features|head|target|tracking|train)\.[a-z_]+|--[a-z]|draftsmith [a-z]"
)
ELSEWHERE = re.compile(r"(warning: )?\{[^{}]*\}\.?")
"""A warning whose words are made where a test of their own holds them."""
OTHERS = {
    "is measured again, as it cannot be read": "mended already",
    "gets no more figures": "nothing of the training is lost",
    "the next export or evaluation tries again": "mended later, and the error of the dashboard says the rest",
    "are not the target's own": "what is served is to be changed, not the recipe",
    "emulates bf16": "the keys are filled in",
    "do not quote": "the option is filled in",
    "which is slow": "the key is filled in",
    "was made for": "the remedy is filled in",
    "is not compared with the original": "the key is filled in",
    "but not exported": "the error that is filled in says what to change",
    "costs contradict each other": "another program is to be stopped, and the file removed that is filled in",
    "the target is slower than alone": "the head is to be trained for longer",
}
"""Words of the warnings that name none, and why."""


def test_warnings_say_what_would_mend_them() -> None:
    lacking, used = [], set()
    for path in sources_of_the_product():
        for node in ast.walk(parse(path)):
            name = node.func if isinstance(node, ast.Call) and node.args else None
            called = getattr(name, "attr", getattr(name, "id", None))
            if not isinstance(node, ast.Call) or called not in ("say", "warn"):
                continue
            said = node.args[0]
            text = "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
                for part in (said.values if isinstance(said, ast.JoinedStr) else [said])
            )
            if (
                (called == "say" and not text.startswith("warning: "))
                or REMEDY.search(text)
                or ELSEWHERE.fullmatch(text)
            ):
                continue
            used |= (known := {words for words in OTHERS if words in text})
            lacking += [] if known else [f"{path}:{node.lineno} {text}"]
    assert not lacking
    assert used == set(OTHERS), "an exception that is none any more goes"
