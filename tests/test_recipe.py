"""Recipes: every file parses, overrides reach their key, mistakes are named."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.heads.registry import METHODS
from draftsmith.recipe_file import parse_recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
RECIPE_FILES = sorted(p for p in RECIPES.glob("*/*.yaml") if p.parent.name != "accelerate")
TINY = str(RECIPES / "eagle3" / "tiny.yaml")


def write(folder: Path, text: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return ["--recipe", str(path)]


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_recipe_parses(path: Path) -> None:
    recipe = parse_recipe(["--recipe", str(path)])
    assert recipe.method == path.parent.name
    assert recipe.name.startswith(recipe.method)
    assert isinstance(recipe.head, METHODS[recipe.method].options)
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]


def test_yaml_values_and_overrides_reach_their_keys(tmp_path: Path) -> None:
    words = write(tmp_path, "name: x\ntrain:\n  lr: 3e-4\n  betas: [0.9, 0.99]\nhead:\n  layer_ids: [1, 2]\n")
    recipe = parse_recipe(
        [*words, "--train.epochs", "9", "--head.ttt_steps=2", "--data.template.enable_thinking", "false"]
    )
    assert recipe.train.lr == 3e-4
    assert recipe.train.betas == [0.9, 0.99]
    assert recipe.train.epochs == 9
    assert recipe.head.layer_ids == [1, 2]
    assert recipe.head.ttt_steps == 2
    assert recipe.data.template == {"enable_thinking": False}
    assert recipe.run_dir == Path("runs/x")
    assert parse_recipe([*words, "--output_dir", "elsewhere"]).run_dir == Path("elsewhere")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train:\n  learning_rate: 1\n", "learning_rate"),
        ("hed:\n  ttt_steps: 3\n", "hed"),
        ("head:\n  steps: 3\n", "steps"),
        ("train:\n  epochs: many\n", "epochs"),
        ("train:\n  precision: fp4\n", "precision"),
        ("train:\n  loss:\n    kind: mse\n", "kind"),
        ("method: medusaa\n", "medusaa"),
        ("train:\n  warmup: 2.0\n", "train.warmup"),
        ("evaluate:\n  num_speculative_tokens: 20\n", "evaluate.num_speculative_tokens"),
        ("- a\n- b\n", "not a mapping"),
        ("a: [1\n", "cannot be read as YAML"),
        ("name: x\n\ttarget:\n", "line 2 .* not with tabs"),
        ("train:\n  lr: 1\nname: x\ntrain:\n  rows: 2\n", "'train' twice, in lines 1 and 4"),
        ("target: embedded\n", "target is 'embedded', but it is a section"),
        ("target:\n  pth: x\n", r"no key target\.pth, did you mean target\.path"),
    ],
)
def test_mistakes_in_the_file_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        parse_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
        (["--recipe", TINY, "--train.epoch", "3"], "train.epoch"),
        (["--recipe", TINY, "--train.epochs", "three"], "train.epochs"),
        (["--recipe", TINY, "--train.epochs"], "train.epochs"),
        (["--recipe", str(RECIPES)], "is a folder"),
        (["--recipe", TINY, "--data.limt", "3"], r"no key data\.limt, did you mean data\.limit\?"),
        (["--recipe", TINY, "--heldout", "3"], r"did you mean data\.heldout\?"),
        (["--recipe", TINY, "--nodecode"], "no key nodecode;"),
        (["--recipe", TINY, "--data.limit", "1.5"], "data.limit is '1.5', which is not a whole number or null"),
        (["--recipe", TINY, "--data.sources", "a.jsonl"], "data.sources is 'a.jsonl', which is not a list"),
        (["--recipe", TINY, "--train.optimizer", "sgd"], r"not one of \['adamw', 'muon'\]"),
    ],
)
def test_mistakes_on_the_command_line_name_the_key(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_recipe(words)


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_recipe(["--help"], "draftsmith train", "train the head")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--train.muon_lr" in text
    assert "Peak learning rate of Muon" in text
    assert "--head.ttt_steps" in text
    assert "Step k weighs decay**k" in text
