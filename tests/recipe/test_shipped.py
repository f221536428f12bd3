"""Recipes and launch files by name, from any folder."""

from pathlib import Path

import pytest

from draftsmith.cli.launching import check_config
from draftsmith.cli.main import main
from draftsmith.recipe.parse import FOLDER, find_file, parse_recipe, shipped_names


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = ("eagle3/tiny", "eagle3/tiny.yaml", "recipes/eagle3/tiny.yaml", "recipes/eagle3/tiny")


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_recipe_is_found_by_name(elsewhere: Path, name: str) -> None:
    assert parse_recipe(["--recipe", name]).name == "eagle3-tiny"


def test_a_file_here_goes_before_an_installed_one(elsewhere: Path) -> None:
    (elsewhere / "eagle3").mkdir()
    (elsewhere / "eagle3" / "tiny").write_text("name: mine\n")
    assert parse_recipe(["--recipe", "eagle3/tiny"]).name == "mine"


@pytest.mark.parametrize("name", ["", "nowhere", "eagle3", "../recipes/eagle3/tiny", f"{FOLDER}/eagle3/tiny", "a\0b"])
def test_other_names_stay_as_they_are(elsewhere: Path, name: str) -> None:
    assert find_file(name) == name


def test_a_launch_file_is_found_by_name(elsewhere: Path) -> None:
    spec = parse_recipe(["--recipe", "eagle3/tiny"]).train
    launch = check_config(spec, "accelerate/ddp-2cpu")
    assert (launch.config, launch.processes) == (str(FOLDER / "accelerate" / "ddp-2cpu.yaml"), 2)


def test_the_list_has_every_recipe_with_what_it_is(elsewhere: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(shipped_names())
    assert len(lines) == len(list(FOLDER.glob("*/*.yaml")))
    assert all(len(line.split("  ", 1)[1].strip()) > 10 for line in lines)


def test_a_recipe_is_printed_or_copied_and_nothing_is_written_over(
    elsewhere: Path, capsys: pytest.CaptureFixture
) -> None:
    text = (FOLDER / "eagle3" / "tiny.yaml").read_text()
    assert main(["recipes", "eagle3/tiny"]) == 0
    assert capsys.readouterr().out == text
    assert main(["recipes", "eagle3/tiny", "--output", "mine.yaml"]) == 0
    assert (elsewhere / "mine.yaml").read_text() == text
    assert main(["recipes", "medusa/tiny", "--output", "mine.yaml"]) == 2
    assert (elsewhere / "mine.yaml").read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes", "eagle3/tinny"], "There is no recipe eagle3/tinny (did you mean eagle3/tiny?)"),
        (["recipes", "--output", "mine.yaml"], "--output is for one recipe"),
        (["recipes", "a", "b"], "recipes takes one name"),
        (["run", "--recipe", "nowhere.yaml"], "those that `draftsmith recipes` lists"),
        (["run"], "add --recipe eagle3/tiny or another that `draftsmith recipes` lists"),
    ],
)
def test_mistakes_name_the_list(elsewhere: Path, capsys: pytest.CaptureFixture, words: list[str], said: str) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
