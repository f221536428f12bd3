"""What is refused before hours of work, and what is only said."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.errors import UserError
from draftsmith.preflight import preflight
from draftsmith.recipe_file import parse_recipe
from draftsmith.session import Session
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import make_workplace


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, with a draft model of a short context."""
    folder = make_workplace(tmp_path_factory.mktemp("preflight"))
    tokenizer = tiny_tokenizer()
    short = tiny_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=64)
    short.save_pretrained(folder / "short")
    tokenizer.save_pretrained(folder / "short")
    return folder


def session_of(workplace: Path, tmp_path: Path, method: str, head: dict[str, Any], *words: str) -> Session:
    """A session of the miniature's recipe with another head."""
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text()) | {"method": method, "head": head}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Session(
        parse_recipe(["--recipe", str(tmp_path / "recipe.yaml"), f"--output_dir={tmp_path / 'run'}", *words])
    )


def test_samples_that_are_longer_than_the_head_reads(workplace: Path, tmp_path: Path) -> None:
    head = {"init_from": str(workplace / "short")}
    with pytest.raises(
        UserError, match=r"lets samples of 128 tokens through, but the head reads at most 64: set data\."
    ):
        preflight(session_of(workplace, tmp_path, "draft_model", head), "train")
    preflight(session_of(workplace, tmp_path, "draft_model", head, "--data.max_length=64"), "train")
    assert not (tmp_path / "run").exists()


def test_a_head_that_no_engine_serves_is_trained_but_not_run(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Untied blocks that are still equal count, too: training makes them differ."""
    head = {"num_heads": 2, "num_layers": 4}
    for command, words in (("run", ()), ("train", ("--export.layout=hydra",))):
        with pytest.raises(UserError, match=r"cannot hold this head: it has head\.num_layers above 2 without"):
            preflight(session_of(workplace, tmp_path, "hydra", head, *words), command)
    preflight(session_of(workplace, tmp_path, "hydra", head), "train")
    assert "warning: such heads can be trained and measured, but not exported: The layout" in capsys.readouterr().err
    preflight(session_of(workplace, tmp_path, "hydra", head | {"tie_blocks": True}), "train")
    assert "warning" not in capsys.readouterr().err
