"""What launchers tell a process, and what is refused of it."""

import pytest

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.train.stopping import LAUNCHED
from draftsmith.train.world import World, check_started, world

TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (*TWO, LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "is_"),
    [
        ({}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, World()),
        ({"RANK": ""}, World()),
        (TWO, World(1, 2, 1)),
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], is_: World, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    assert world() == is_


WRONG = [
    ({"RANK": "x"}, "RANK is 'x' in the environment, and not a whole number"),
    ({"RANK": "-1"}, "RANK is '-1'"),
    ({"RANK": "9" * 5000}, "not a whole number"),
    ({"RANK": "1"}, "RANK is 1 in the environment, but WORLD_SIZE is not set"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "but WORLD_SIZE is 1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' .* from 1"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ({"WORLD_SIZE": "2"}, "RANK is not set: start with torchrun"),
    ({**TWO, "RANK": "2"}, "RANK is 2 .* WORLD_SIZE is 2: ranks go from 0"),
    ({**TWO, "LOCAL_RANK": "7"}, "LOCAL_RANK is 7"),
    ({**TWO, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
]


@pytest.mark.parametrize(("variables", "why"), WRONG)
def test_places_that_cannot_be_are_refused(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(UserError, match=why):
        world()


def test_a_command_says_it_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(monkeypatch, {"RANK": "x"})
    assert main(["regenerate", "--recipe", "recipes/eagle3/tiny.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("draftsmith: RANK is 'x'")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "regenerate", "extract", "evaluate", "export"])
def test_only_training_takes_several_processes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, TWO)
    assert main([command, "--recipe", "recipes/eagle3/tiny.yaml", "--redo", "train"]) == 2
    assert "works in one process" in capsys.readouterr().err


FEWER = [
    ({LAUNCHED: "2"}, "asks for 2 processes, but 1 would train"),
    (
        {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
        "was asked for several processes but started one",
    ),
    ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is 8, but WORLD_SIZE is not set"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "would train alone"),
]


@pytest.mark.parametrize(("variables", "why"), FEWER)
def test_fewer_processes_than_were_asked_for_are_refused(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(UserError, match=why):
        check_started()


@pytest.mark.parametrize(
    "variables", [{}, {LAUNCHED: "1"}, {"ACCELERATE_MIXED_PRECISION": "no"}, {**TWO, "SLURM_STEP_NUM_TASKS": "2"}]
)
def test_what_was_asked_for_is_taken(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    check_started()
