"""The training curves: what is drawn is what was logged, and the same file gives the same picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from draftsmith.errors import UserError
from scripts.bench.drafters.curves import plot_training, read_metrics, smooth


def invented_metrics(steps: int = 300, every: int = 50, slices: tuple[str, ...] = ("chat", "code")) -> list[dict]:
    """A run that nobody trained: an exponential decay with seeded noise."""
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, steps + 1):
        progress = 1 - np.exp(-4 * step / steps)
        entry = {
            "step": step,
            "tokens": 2048 * step,
            "epoch": step / 100,
            "loss": 6 - 3.5 * progress + 0.15 * rng.standard_normal(),
            "lr": 1e-3,
            "accuracy": [0.7 * progress * 0.93**k for k in range(5)],
            "acceptance": [0.6 * progress * 0.93**k for k in range(5)],
        }
        if step % every == 0:
            entry["heldout_loss"] = 6.1 - 3.3 * progress
            entry["heldout_accuracy"] = [0.66 * progress * 0.92**k for k in range(5)]
            taus = {name: 1 + (1.2 + 0.4 * i) * progress for i, name in enumerate(slices)}
            entry["tau"] = {"overall": float(np.mean(list(taus.values()))), "slices": taus}
        lines.append(entry)
    return lines


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_svg_is_well_formed_and_deterministic(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "metrics.jsonl", invented_metrics())
    plot_training(source, tmp_path / "a.svg")
    plot_training(source, tmp_path / "b.svg")
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    changed = invented_metrics()
    changed[49]["tau"]["overall"] += 0.5
    plot_training(write_lines(source, changed), tmp_path / "b.svg")
    assert first != (tmp_path / "b.svg").read_bytes()


def test_png(tmp_path: Path) -> None:
    plot_training(write_lines(tmp_path / "metrics.jsonl", invented_metrics()), tmp_path / "docs" / "curves.png")
    assert (tmp_path / "docs" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1}],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "tokens": None, "loss": None, "accuracy": None, "tau": None}],
        [{"step": 1, "tau": {"overall": 1.5}}, {"step": 2, "tau": {"overall": None, "slices": {"chat": None}}}],
        [{"step": 1, "accuracy": [0.5]}, {"step": 2, "accuracy": [0.5, None, 0.2]}],
        invented_metrics(20, 5, tuple(f"slice {i}" for i in range(14))),
    ],
)
def test_whatever_is_logged_can_be_drawn(tmp_path: Path, lines: list[dict]) -> None:
    plot_training(write_lines(tmp_path / "metrics.jsonl", lines), tmp_path / "curves.svg")
    ElementTree.fromstring((tmp_path / "curves.svg").read_bytes())


def test_resumed_and_unfinished_files(tmp_path: Path) -> None:
    source = tmp_path / "metrics.jsonl"
    source.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    assert read_metrics(source) == [{"step": 1, "loss": 3}, {"step": 2, "loss": 1}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step": 1}\n{"step": \n', "line 2: not valid JSON"),
        ('{"step": 1}\n[1]\n', "line 2: no whole number 'step'"),
        ('{"loss": 1}\n', "line 1: no whole number 'step'"),
        ("", "no finished line yet"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "metrics.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=said) as raised:
        plot_training(source, tmp_path / "curves.svg")
    assert str(source) in str(raised.value)
    assert not (tmp_path / "curves.svg").exists()


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        plot_training(tmp_path / "none.jsonl", tmp_path / "curves.svg")
    source = write_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    with pytest.raises(UserError, match=r"\.svg or \.png"):
        plot_training(source, tmp_path / "curves.pdf")


@pytest.mark.parametrize("width", [1, 2, 3, 8, 50])
def test_smooth_is_the_mean_of_the_window(width: int) -> None:
    values = np.random.default_rng(1).standard_normal(23)
    half = width // 2 if width > 1 else 0
    slow = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    np.testing.assert_allclose(smooth(values, width), slow, atol=1e-12)
