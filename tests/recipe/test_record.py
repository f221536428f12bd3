"""What changed between two recipes is told by the keys that a user sets."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.record import flat_inputs, tell_changes
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.run import RunDirectory


def recipe(*words: str) -> Recipe:
    return parse_recipe(["--target.path", "embedded", *words])


def told(was: dict[str, Any], now: dict[str, Any], before: Recipe | None, after: Recipe) -> str:
    flat = [{} if one is None else flat_inputs(asdict(one)) for one in (before, after)]
    return tell_changes(flat_inputs(was), flat_inputs(now), *flat)


@pytest.mark.parametrize(
    ("key", "words", "said"),
    [
        ("conversations", ["--data.limit", "9"], "data.limit was None, is 9"),
        ("conversations", ["--data.sources", "[a.jsonl]"], "data.sources was [], is ['a.jsonl']"),
        ("answers", ["--answers.temperature", "0.5"], "answers.temperature was 1.0, is 0.5"),
        ("features", ["--features.batch_tokens", "99"], "features.batch_tokens was 8192, is 99"),
        ("target", ["--target.path", "other"], "target.path was 'embedded', is 'other'"),
        ("tokenizer", ["--target.path", "other"], "target.path was 'embedded', is 'other'"),
        ("head", ["--train.lr", "0.5"], "train.lr was 0.0001, is 0.5"),
        ("prompts", ["--evaluate.per_slice", "3"], "evaluate.per_slice was None, is 3"),
    ],
)
def test_a_hash_is_told_by_the_keys_behind_it(key: str, words: list[str], said: str) -> None:
    assert told({key: "0a1b"}, {key: "c2d3"}, recipe(), recipe(*words, "--name", "other")) == said


def test_what_no_key_explains_is_told_in_words() -> None:
    """The same file holds other rows; and records of earlier versions hold no recipe."""
    same = told({"conversations": "0a1b"}, {"conversations": "c2d3"}, recipe(), recipe("--train.lr", "0.5"))
    assert same == "the conversations of data.sources changed"
    older = told({"conversations": "0a1b"}, {"conversations": "c2d3"}, None, recipe("--data.limit", "9"))
    assert older == "the conversations of data.sources changed"
    named = told({"beside": {"old": "0a"}}, {"beside": {"old": "1b"}}, recipe(), recipe())
    assert named == "a head of evaluate.beside changed"


def test_two_hashes_of_one_key_are_told_once_and_settings_as_they_are() -> None:
    was, now = (
        {"target": "0", "tokenizer": "1", "method": "a", "lr": 1},
        {"target": "2", "tokenizer": "3", "method": "b", "lr": 2},
    )
    said = told(was, now, recipe(), recipe("--target.path", "other"))
    assert said == "method was 'a', is 'b'; lr was 1, is 2; target.path was 'embedded', is 'other'"


def test_a_run_directory_keeps_the_recipe_for_it(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path, recipe=recipe("--data.limit", "5"))
    first.begin("answers", {"conversations": "0a1b"})
    (tmp_path / "answers.jsonl").write_text("{}\n")
    first.finish("answers", {})
    again = RunDirectory(tmp_path, recipe=recipe("--data.limit", "9"))
    with pytest.raises(UserError, match=r"with other settings \(data\.limit was 5, is 9\): choose another"):
        again.begin("answers", {"conversations": "c2d3"})
