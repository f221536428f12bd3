"""The decoding bench on a miniature: every system in one run, and numbers that fit together."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import build
from draftsmith.machine import environment
from draftsmith.target.target import load_target
from scripts.bench.decoder import main
from tests.helpers import save_target
from tests.workplace import make_workplace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, a recipe, a small draft model, and an untrained head."""
    folder = make_workplace(tmp_path_factory.mktemp("bench"))
    target = load_target(str(folder / "target"))
    torch.manual_seed(0)
    save_head(build(Eagle3Options(layer_ids=[2, 4, 6]), target, None), folder / "head", target)
    save_target(folder / "small", num_hidden_layers=2)
    return folder


def test_every_system_is_measured_and_greedy_texts_agree(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baselines = [{"kind": "prompt_lookup"}, {"kind": "draft_model", "path": str(workplace / "small")}]
    drafts = [{"tree": "chain"}, {"tree": "dynamic", "depth": 3, "branching": 2, "total_tokens": 8}]
    words = ["--recipe", str(workplace / "recipe.yaml"), "--head", str(workplace / "head"), "--prompts", "2"]
    words += ["--batch", "1", "--batch", "3", "--known-acceptance", "1", "--output", str(workplace / "out")]
    words += [f"--evaluate.baselines={json.dumps(baselines)}", f"--evaluate.drafts={json.dumps(drafts)}"]
    assert main(words) == 0, capsys.readouterr().err
    found = json.loads((workplace / "out" / "bench.json").read_text())
    systems = {batch: [r["system"] for r in found["rows"] if r["batch"] == batch] for batch in (1, 3)}
    ours = ["target alone", "eagle3", "eagle3 dynamic 3x2, 8 tokens", "prompt lookup", "draft model small"]
    ours.append("known acceptance 1")
    assert systems[3] == ours
    assert systems[1][:6] == ours
    known = next(r for r in found["rows"] if r["system"] == "known acceptance 1" and r["batch"] == 1)
    # Three right drafts and a bonus per round, but for the ends.
    assert 3 < known["tau"] <= 4
    assert [s for s in systems[1] if s.startswith("transformers: ")] == [
        "transformers: generate",
        "transformers: generate, prompt lookup",
        "transformers: generate, assisted",
        "transformers: generate, assisted at confidence 0.4",
    ]
    for row in found["rows"]:
        assert row["equal"] == row["texts"] == 4
        assert row["tok_s_spread"][0] <= row["tok_s"] <= row["tok_s_spread"][1]
        if row["system"] == "target alone":
            assert row["speedup"] == row["tau"] == 1
        if row["system"].startswith("transformers: "):
            assert row["tau"] is row["ms_per_round"] is None
        else:
            assert min(row["ms_per_round"].values()) > 0
    text = (workplace / "out" / "bench.md").read_text()
    assert text.count("| eagle3 dynamic 3x2, 8 tokens |") == 4
    for row in found["rows"]:
        assert f"| {row['batch']} | {row['system']} | {row['tok_s']:.0f} | " in text
    assert found["commit"] == environment()["commit"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch is '0'"),
        (["--prompts", "x"], "--prompts"),
        (["--known-acceptance", "1.5"], "--known-acceptance is '1.5'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "r.yaml", *words]) == 2
    assert message in capsys.readouterr().err
