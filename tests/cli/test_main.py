"""The command line: what a person types wrong, what stands on the terminal, and where `--launch` takes modules from."""

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import psutil
import pytest

from draftsmith.cli import launching
from draftsmith.cli.commands import COMMANDS
from draftsmith.cli.main import main
from draftsmith.errors import StoppedError, UserError
from draftsmith.recipe.options import Option, take_options, whole_number
from draftsmith.recipe.schema import EvaluateSpec
from tests.helpers import save_target
from tests.workplace import fails

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return folder


@pytest.fixture
def words(target: Path, tmp_path: Path) -> list[str]:
    """Options that name a target, two conversations and a run directory."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yes {i}"}]} for i in "ab"
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {
        "target.path": target,
        "target.device": "cpu",
        "data.sources": f"[{tmp_path / 'talk.jsonl'}]",
        "data.heldout": 1,
        "output_dir": tmp_path / "run",
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    assert callable(resolve_name(f"draftsmith.cli.{command.function}"))
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: draftsmith {name} ")
    named = [one.name for one in command.options]
    named += [f"--evaluate.{field.name}" for field in fields(EvaluateSpec)] if command.takes_recipe else []
    assert all(f"\n  {one} " in text for one in named)


def test_help_follows_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--method", "medusa"], ["--recipe", str(ROOT / "recipes/medusa/smollm2-135m.yaml"), "--head", "x"]):
        assert main(["evaluate", *words, "-h"]) == 0
        assert "--head.num_heads" in capsys.readouterr().out


def test_help_is_there_at_once() -> None:
    code = "import sys; from draftsmith.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_what_completes_words_knows_every_command_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print_completion", "jsonschema"]) == 0
    keys = json.loads(capsys.readouterr().out)["properties"]
    assert set(COMMANDS) < set(keys)
    assert {"no_decode", "evaluate"} < set(keys["evaluate"]["properties"])


def test_unknown_command_and_stage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no command 'trian' (did you mean train?): the commands are" in fails(["trian"], capsys)
    assert "options come after it" in fails(["--recipe", "r.yaml", "run"], capsys)
    assert "add --recipe own.yaml" in fails(["run", "own.yaml"], capsys)
    assert "needs a recipe" in fails(["run"], capsys)
    assert "search-tree needs a recipe" in fails(["search-tree", "--nodes", "3"], capsys)
    assert "--redo everything" in fails(["train", *words, "--redo", "everything"], capsys)
    assert "--head needs a value" in fails(["evaluate", *words, "--head"], capsys)
    assert "--no-decode is a switch" in fails(["evaluate", *words, "--no-decode=1"], capsys)
    assert "no key nodecode (did you mean no-decode?): `draftsmith evaluate " in fails(
        ["evaluate", *words, "--nodecode"], capsys
    )


@pytest.mark.parametrize(
    "command", ["regenerate", "extract", "train", "evaluate", "chat", "search-tree", "export", "inspect"]
)
def test_a_wrong_target_is_one_sentence_and_leaves_nothing(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in ("evaluate", "chat", "search-tree", "export"):
        (tmp_path / "head").mkdir()
        (tmp_path / "head" / "model.safetensors").touch()
        (tmp_path / "head" / "config.json").write_text('{"schema_version": 1, "method": "eagle3"}')
        words = [*words, "--head", str(tmp_path / "head"), "--evaluate.prompts", f"[{tmp_path / 'talk.jsonl'}]"]
    if command == "search-tree":
        words = [*words, "--output", str(tmp_path / "tree.json")]
    message = fails([command, *words, "--target.path", str(tmp_path / "nowhere")], capsys)
    assert "nowhere" in message
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("regenerate", '{"model_type": "llama", "draft_vocab_size": 9}'),
        ("train", '{"method": "eagle3", "layer_ids": [1]}'),
        ("inspect", '{"medusa_num_heads": 5}'),
        ("plan", '{"model_type": "llama", "draft_vocab_size": 9}'),
    ],
)
def test_a_draft_head_is_no_target(
    command: str, config: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(config)
    message = fails([command, *words, "--target.path", str(tmp_path / "head")], capsys)
    assert "is a draft head: give the folder of the model that it drafts for" in message


def test_things_that_are_not_there_yet(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--evaluate.prompts", f"[{tmp_path / 'talk.jsonl'}]"]
    assert "no trained head" in fails(["evaluate", *words, *prompts], capsys)
    assert f"--head: there is no folder {tmp_path / 'none'}" in fails(
        ["export", *words, "--head", str(tmp_path / "none")], capsys
    )
    (tmp_path / "empty").mkdir()
    assert "no trained head" in fails(["export", *words, "--head", str(tmp_path / "empty")], capsys)
    assert f"no folder {tmp_path / 'run'}" in fails(["search-tree", *words], capsys)
    tree = ["--output", str(tmp_path / "tree.json")]
    assert "no trained head" in fails(["search-tree", *words, *tree], capsys)
    assert "no result.json" in fails(["report", *words], capsys)
    assert "does not exist" in fails(["report", str(tmp_path / "result.json")], capsys)
    assert "data.sources is empty" in fails(["regenerate", *words, "--data.sources", "[]"], capsys)


@pytest.mark.parametrize(
    ("layers", "heldout", "said"), [("[2,4,6]", 5, "data.heldout is 5"), ("[2,4,8]", 1, "head.layer_ids")]
)
def test_what_cannot_be_trained_is_refused_first(
    layers: str, heldout: int, said: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--answers.regenerate", "false", "--head.layer_ids", layers, "--data.heldout", str(heldout)]
    assert said in fails(["train", *words, *options], capsys)


def test_inspect_shows_what_is_learnt(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *words, "--count", "2"]) == 0
    assert "yes" in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "looking makes nothing"
    for count in ("x", "0"):
        assert f"--count is '{count}'" in fails(["inspect", *words, "--count", count], capsys)


def test_paths_are_checked_before_the_target(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a target that does not exist, the message is about the other path."""
    words = [*words, "--target.path", str(tmp_path / "nowhere")]
    talk = f"[{tmp_path / 'talk.jsonl'}]"
    run = ["run", *words, "--evaluate.prompts", talk, "--data.heldout", "1"]
    assert "typo.jsonl" in fails([*run, "--data.sources", "[typo.jsonl]"], capsys)
    assert "typo.jsonl" in fails([*run, "--evaluate.prompts", "[typo.jsonl]"], capsys)
    assert "typo.json" in fails([*run, "--evaluate.drafts", "[{tree: typo.json}]"], capsys)
    assert "evaluate.beside.other" in fails([*run, "--evaluate.beside.other", "typo"], capsys)
    assert "only 2 conversations" in fails([*run, "--data.heldout", "2"], capsys)
    assert "--head: there is no folder typo" in fails(["evaluate", *words, "--head", "typo"], capsys)
    for command in ("regenerate", "extract", "train"):
        assert "typo.jsonl" in fails([command, *words, "--data.sources", "[typo.jsonl]"], capsys)
    assert not (tmp_path / "run").exists()


def test_a_stopped_training_is_no_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(own: Namespace, words: list[str]) -> int:
        raise StoppedError("a checkpoint is saved")

    monkeypatch.setattr("draftsmith.cli.actions.train", stopped)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "draftsmith: a checkpoint is saved\n"


def test_options_are_taken_wherever_they_stand() -> None:
    options = [
        Option("--head FOLDER", "", Path),
        Option("--redo STAGE ...", ""),
        Option("--no-decode", ""),
        Option("--count N", "", whole_number("a whole number of at least 1")),
    ]
    words = shlex.split("--head x --head.sizes [1,2] --redo=a --train.lr -1 --head=y --no-decode --redo=b")
    own, rest = take_options(words, options)
    assert (own.head, own.redo, own.no_decode, own.count) == (Path("y"), ["a", "b"], True, None)
    assert rest == ["--head.sizes", "[1,2]", "--train.lr", "-1"]
    with pytest.raises(UserError, match="--head needs a value"):
        take_options(["--head"], options)
    with pytest.raises(UserError, match="--count is '0': give a whole number of at least 1"):
        take_options(["--count", "0"], options)


ACCELERATE = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


@pytest.mark.parametrize(
    ("file", "processes"),
    [
        pytest.param("cpu.yaml", 1, marks=pytest.mark.full),
        pytest.param("ddp-2cpu.yaml", 2, marks=pytest.mark.slow),
    ],
)
def test_modules_of_the_working_folder_are_not_run(
    file: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the launcher nor by its workers, nor those that lie beside the script."""
    here, script = tmp_path / "here", tmp_path / "there" / "work.py"
    for folder in (here, script.parent):
        folder.mkdir()
        for name in ("psutil", "accelerate", "yaml", "draftsmith"):
            (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'hostile')!r}, 'a').write(__file__)")
    script.write_text(
        "import os, psutil, draftsmith, accelerate\n"
        f"open({str(tmp_path / 'worker')!r} + os.environ.get('RANK', '0'), 'w').write(psutil.__file__)"
    )
    monkeypatch.chdir(here)
    words = [str(tmp_path), "--quiet", "--config_file", str(ACCELERATE / file), str(script)]
    assert launching.run_launcher(words, processes) == 0
    assert not (tmp_path / "hostile").exists()
    for rank in range(processes):
        assert (tmp_path / f"worker{rank}").read_text() == psutil.__file__
