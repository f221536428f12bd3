"""What the system refuses a command ends in one sentence, whichever command it is."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.cli.boundary import at_boundary
from draftsmith.cli.main import main
from tests.bad_inputs.cases import check_sentence

DRAFTSMITH = f"{sys.executable} -m draftsmith.cli.main"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EACCES, "Permission denied", "/srv/x"), "/srv/x cannot be used (permission denied)"),
        (OSError(errno.EACCES, "Permission denied", b"/srv/\xff"), "cannot be used"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), "its name is too long"),
        (OSError(errno.ENOSPC, "No space left on device"), "The output cannot be written (No space left"),
        (OSError(errno.EMFILE, "Too many open files"), "`ulimit -n` says how many"),
        (OSError("what a library says"), "what a library says"),
        (MemoryError(), "There is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "not enough memory",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
        (RuntimeError("Could not determine home directory."), "set HOME"),
        (ValueError("embedded null byte"), "NUL character"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @at_boundary
    def command() -> int:
        raise error

    assert command() == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert words in said
    check_sentence(said)


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    @at_boundary
    def command() -> int:
        raise RuntimeError("tensors of different shapes")

    with pytest.raises(RuntimeError, match="different shapes"):
        command()


@pytest.mark.parametrize("words", [["run", "--launch", ""], ["export", "--head="], ["search-tree", "--output", ""]])
def test_an_empty_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--recipe", "R"]) == 2
    assert "is empty: give it a value" in capsys.readouterr().err


def test_a_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code = main(["doctor"])
    monkeypatch.chdir(tmp_path)
    assert code == 2
    assert "was started in cannot be used" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--version", "--help", "doctor", "train --help", "report --help"])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("> /dev/full", 2, "The output cannot be written (No space left on device)"),
        ("2> /dev/full > /dev/full", 2, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(command: str, how: str, code: int, words: str) -> None:
    done = subprocess.run(["bash", "-c", f"{DRAFTSMITH} {command} {how}"], capture_output=True, text=True)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_a_terminal_of_ascii_alone_shows_everything() -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    for command in ("doctor", "train --help"):
        done = subprocess.run([*DRAFTSMITH.split(), *command.split()], capture_output=True, env=environment)
        assert done.stdout.isascii()
        assert b"Error" not in done.stderr


def test_a_table_that_nobody_reads_ends_like_any_output() -> None:
    """Rich, which prints tables and conversations, would end with 1."""
    program = (
        "import sys; from rich.console import Console; from draftsmith.cli.boundary import at_boundary\n"
        "sys.exit(at_boundary(lambda: Console().print('x\\n' * 10**5) or 0)())"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | true', sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (141, "")
