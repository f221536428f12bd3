"""Draw the training curves of docs/shared-target.md from the metrics.jsonl of its runs: `python -m scripts.bench.pages.curves`.

The pictures are the report's, in a file of their own. The same metrics always give the same bytes; a test holds the pictures
against the metrics.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from draftsmith.eval.report import plots
from draftsmith.eval.report.page_model import number, percent, significant
from draftsmith.eval.report.plots import Series, line_panel, swatch
from draftsmith.files import write_text

ROOT = Path(__file__).resolve().parents[3]
RUNS, PICTURES = ROOT / "docs" / "results" / "shared-target" / "train", ROOT / "docs" / "curves"
STYLE = Path(plots.__file__).parent / "templates" / "plots.css"

WIDTH, HEIGHT, LINE = 300, 200, 18
_LEGEND_COLUMNS = 3


def draw(metrics: Path, picture: Path) -> None:
    """Draw loss, held-out accuracy per draft step and held-out tau at every evaluation, over training tokens, as SVG."""
    lines: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        # An evaluation has a line of its own, and a step that is trained again after a resume counts once.
        lines[entry["step"]] = lines.get(entry["step"], {}) | entry
    steps = [lines[step] for step in sorted(lines)]
    at = [i for i, entry in enumerate(steps) if "tau" in entry]
    evaluations = [steps[i] for i in at]
    tokens = [f"{entry['tokens'] / 1e6:.2g}M" for entry in evaluations]
    starts = [0, *(i + 1 for i in at)]
    between = [[e["loss"] for e in steps[a : b + 1] if "loss" in e] for a, b in zip(starts, at, strict=False)]
    loss = {
        "training, since the last evaluation": [mean(part) if part else None for part in between],
        "held out": [entry["heldout_loss"] for entry in evaluations],
    }
    by_step = zip(*(entry["heldout_accuracy"] for entry in evaluations), strict=True)
    accuracy = {f"step {i + 1}": list(values) for i, values in enumerate(by_step)}
    names = ["overall", *dict.fromkeys(name for entry in evaluations for name in entry["tau"]["slices"])]
    tau = {n: [{**e["tau"]["slices"], "overall": e["tau"]["overall"]}.get(n) for e in evaluations] for n in names}
    panels = [
        _panel("Loss", tokens, loss, significant),
        _panel("Accuracy per draft step, held out", tokens, accuracy, lambda v: percent(v, 0)),
        _panel("Simulated τ, held out", tokens, tau, number),
    ]
    style = STYLE.read_text(encoding="utf-8")
    height = HEIGHT + LINE * (1 + max(len(one) for one in (loss, accuracy, tau)) // _LEGEND_COLUMNS + 1)
    placed = "".join(f'<g transform="translate({i * (WIDTH + 20)} 0)">{panel}</g>' for i, panel in enumerate(panels))
    write_text(
        picture,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * WIDTH + 40} {height}" font-family="sans-serif">'
        f"<style>{style}svg {{ background: var(--ground); }}</style>{placed}</svg>\n",
    )


def _panel(title: str, labels: Sequence[str], lines: dict[str, list[float | None]], show: Any) -> str:
    """Draw a panel with its legend below."""
    series = [Series(name, i, tuple(values)) for i, (name, values) in enumerate(lines.items())]
    known = [v for values in lines.values() for v in values if v is not None]
    panel = line_panel(title, labels, series, x_title="training tokens", show=show, y_range=(min(known), max(known)))
    parts = [_sized(panel, 0, 0, WIDTH, HEIGHT)]
    for i, name in enumerate(lines):
        columns = 1 if len(lines) == 2 else _LEGEND_COLUMNS
        x, y = 30 + i % columns * (WIDTH - 30) // columns, HEIGHT + 4 + LINE * (i // columns)
        parts.append(_sized(swatch(i), x, y, 26, 14))
        parts.append(f'<g class="plot"><text class="label" x="{x + 31}" y="{y + 11}">{name}</text></g>')
    return "".join(parts)


def _sized(svg: str, x: int, y: int, width: int, height: int) -> str:
    """Give a picture of the report, whose size its page decides, a place and a size."""
    return svg.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', 1)


if __name__ == "__main__":
    for folder in sorted(RUNS.iterdir()):
        draw(folder / "metrics.jsonl", PICTURES / f"shared-target-{folder.name}.svg")
