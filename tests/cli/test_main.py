"""The command line: what a person types wrong, and what stands on the terminal."""

import json
from pathlib import Path

import pytest

from draftsmith.cli import main as cli
from draftsmith.cli.main import COMMANDS, main, take
from draftsmith.errors import StoppedError, UserError
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def words(target: Path, tmp_path: Path) -> list[str]:
    """Options that name a target, two conversations and a run directory."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yes {i}"}]} for i in "ab"
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [
        "--target.path",
        str(target),
        "--target.device",
        "cpu",
        "--data.sources",
        f"[{tmp_path / 'talk.jsonl'}]",
        "--data.heldout",
        "1",
        "--output_dir",
        str(tmp_path / "run"),
    ]


def fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one sentence; return it."""
    assert main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert len(lines) == 1
    return lines[0]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    for command in ("doctor", "report"):
        assert main([command, "--help"]) == 0
        assert capsys.readouterr().out == text
    assert main([]) == 2
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_unknown_command_and_stage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no command 'trian' (did you mean train?): the commands are" in fails(["trian"], capsys)
    assert "options come after it" in fails(["--recipe", "r.yaml", "run"], capsys)
    assert "add --recipe own.yaml" in fails(["run", "own.yaml"], capsys)
    assert "needs a recipe" in fails(["run"], capsys)
    assert "search-tree needs a recipe" in fails(["search-tree", "--nodes", "3"], capsys)
    assert "--redo everything" in fails(["train", *words, "--redo", "everything"], capsys)
    assert "--head needs a value" in fails(["evaluate", *words, "--head"], capsys)


@pytest.mark.parametrize("command", ["regenerate", "extract", "train", "evaluate", "search-tree", "export", "inspect"])
def test_a_wrong_target_is_one_sentence_and_leaves_nothing(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in ("evaluate", "search-tree", "export"):
        (tmp_path / "head").mkdir()
        (tmp_path / "head" / "model.safetensors").touch()
        (tmp_path / "head" / "config.json").write_text('{"schema_version": 1, "method": "eagle3"}')
        words = [*words, "--head", str(tmp_path / "head"), "--evaluate.prompts", f"[{tmp_path / 'talk.jsonl'}]"]
    if command == "search-tree":
        words = [*words, "--output", str(tmp_path / "tree.json")]
    message = fails([command, *words, "--target.path", str(tmp_path / "nowhere")], capsys)
    assert "nowhere" in message
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_malformed_line_is_named(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(path.read_text() + "{not json\n")
    message = fails(["regenerate", *words], capsys)
    assert "talk.jsonl" in message
    assert "3" in message
    assert not (tmp_path / "run" / "answers.jsonl").exists()


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


def test_held_out_more_than_there_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--answers.regenerate", "false", "--head.layer_ids", "[2,4,6]", "--data.heldout", "5"]
    assert "data.heldout is 5" in fails(["train", *words, *options], capsys)


def test_layers_out_of_range(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--answers.regenerate", "false", "--head.layer_ids", "[2,4,8]", "--data.heldout", "1"]
    assert "8" in fails(["train", *words, *options], capsys)


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
    def stopped(words: list[str]) -> int:
        raise StoppedError("a checkpoint is saved")

    monkeypatch.setitem(cli._HANDLERS, "train", stopped)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "draftsmith: a checkpoint is saved\n"


def test_take_removes_options_wherever_they_stand() -> None:
    words = ["a", "--head", "x", "b", "--head=y", "--no-decode"]
    assert take(words, "--head") == ["x", "y"]
    assert take(words, "--no-decode", flag=True) == ["--no-decode"]
    assert words == ["a", "b"]
    with pytest.raises(UserError, match="--head needs a value"):
        take(["--head"], "--head")
