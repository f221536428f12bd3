"""What would make a run shorter: each line holds against a plan that is made with its key."""

import json
import re
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.estimate.estimate import total_seconds
from draftsmith.estimate.estimator import Estimator
from draftsmith.estimate.figures import find_device
from draftsmith.estimate.shorter import LEAST_SHARE, MOST_LINES, shorter
from draftsmith.recipe.parse import parse_recipe
from tests.models import tiny_model


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    tiny_model("qwen3").config.save_pretrained(tmp_path / "target")
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "hi"}]} for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = ["--evaluate.prompts", f"[{tmp_path / 'prompts.jsonl'}]"]
    return ["--target.path", str(tmp_path / "target"), "--data.limit", "1000", "--data.heldout", "50", *prompts]


@pytest.mark.parametrize("more", [[], ["--features.source", "online", "--data.limit", "40000"]])
def test_every_line_holds(words: list[str], more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = parse_recipe([*words, *more])
    estimator = Estimator.of(recipe, find_device("a100"), {})
    made = estimator.estimate(recipe)
    whole, lines = total_seconds(made), shorter(made, estimator.estimate)
    assert 1 < len(lines) <= MOST_LINES
    shares = []
    for line in lines:
        share, key, old, new = re.fullmatch(r"shorter by .+ \((\d+)%\): ([\w.]+) (.+) -> (.+)", line).groups()
        section, name = key.split(".")
        assert json.dumps(getattr(getattr(recipe, section), name)) == old
        other = parse_recipe([*words, *more, f"--{key}", json.loads(new) if new.startswith('"') else new])
        saved = 1 - total_seconds(estimator.estimate(other)) / whole
        assert round(100 * saved) == int(share)
        shares.append(saved)
    assert shares == sorted(shares, reverse=True)
    assert min(shares) >= LEAST_SHARE
    assert main(["plan", *words, *more, "--device", "a100"]) == 0
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines


def test_what_the_user_said_of_texts_stays(words: list[str]) -> None:
    recipe = parse_recipe(words)
    estimator = Estimator.of(recipe, find_device("a100"), {"prompt": 70, "answer": 100})
    assert (estimator.estimate(recipe).given.prompt, estimator.estimate(recipe).given.answer) == (70, 100)
    fewer = parse_recipe([*words, "--answers.max_new_tokens", "40"])
    assert estimator.estimate(fewer).given.answer == 40, "no answer is longer than it may be"
