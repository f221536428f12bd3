"""Draw the training curves of docs/shared-target.md from the metrics.jsonl of its runs: `python -m scripts.bench.pages.curves`.

The same file always gives the same bytes; a test holds the pictures against the files.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from draftsmith.files import atomic_path

ROOT = Path(__file__).resolve().parents[3]
RUNS, PICTURES = ROOT / "docs" / "results" / "shared-target" / "train", ROOT / "docs" / "curves"

# After Okabe and Ito (2008): distinct with any colour vision, dark enough on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8447f", "#9a6a00", "#56b4e9", "#6b4fb8", "#4a5563")
INK, SOFT = "#1c2430", "#566173"
STYLE: dict[str, Any] = (
    {"font.family": "sans-serif", "font.size": 10, "legend.frameon": False, "legend.fontsize": 9}
    | {"axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK}
    | {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": SOFT, "axes.labelcolor": SOFT}
    | {"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#dde2e9"}
    | {"xtick.color": SOFT, "ytick.color": SOFT, "svg.hashsalt": "draftsmith"}
)


def draw(metrics: Path, picture: Path) -> None:
    """Draw loss, held-out accuracy per draft step and held-out tau over training tokens, as SVG."""
    lines: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        # An evaluation has a line of its own, and a step that is trained again after a resume counts once.
        lines[entry["step"]] = lines.get(entry["step"], {}) | entry
    steps = [lines[step] for step in sorted(lines)]
    evaluations = [entry for entry in steps if "tau" in entry]
    tokens = [entry["tokens"] for entry in evaluations]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 3.9), layout="constrained")
        loss, accuracy, tau = figure.subplots(1, 3)
        _draw_loss(loss, steps, tokens, [entry["heldout_loss"] for entry in evaluations])
        accuracy.set_title("Accuracy per draft step, held out")
        by_step = list(zip(*(entry["heldout_accuracy"] for entry in evaluations), strict=True))
        for step, values in enumerate(by_step):
            colour = mpl.colormaps["viridis"](0.88 * step / max(len(by_step) - 1, 1))
            accuracy.plot(tokens, values, color=colour, linewidth=1.6, label=f"{step + 1}", marker="o", markersize=3.5)
        accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        accuracy.legend(labelcolor=INK, title="step", ncols=2 if len(by_step) > 4 else 1)
        _draw_tau(tau, tokens, [entry["tau"] for entry in evaluations])
        for axes in (loss, accuracy, tau):
            axes.set_xlabel("training tokens")
            axes.margins(x=0.02)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        with atomic_path(picture) as temporary:
            # A date in the file would make every drawing of the same run differ.
            figure.savefig(temporary, format="svg", dpi=150, facecolor="white", metadata={"Date": None})


def _draw_loss(axes: Axes, steps: list[dict[str, Any]], tokens: list[int], heldout: list[float]) -> None:
    """Draw every training loss pale, their centred running mean over a fortieth of the run, and the held-out loss."""
    axes.set_title("Loss")
    x, y = np.array([(entry["tokens"], entry["loss"]) for entry in steps if "loss" in entry], dtype=float).T
    axes.plot(x, y, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    half, sums, at = (len(y) // 40 + 1) // 2, np.concatenate([[0.0], np.cumsum(y)]), np.arange(len(y))
    starts, stops = (at - half).clip(0), (at + half + 1).clip(max=len(y))
    mean = (sums[stops] - sums[starts]) / (stops - starts)
    axes.plot(x, mean, color=COLOURS[0], linewidth=1.8, label="training")
    axes.plot(tokens, heldout, color=COLOURS[1], marker="o", markersize=4, linewidth=1.8, label="held out")
    axes.legend(labelcolor=INK)


def _draw_tau(axes: Axes, tokens: list[int], taus: list[dict[str, Any]]) -> None:
    axes.set_title("Simulated τ, held out")
    slices = list(dict.fromkeys(name for tau in taus for name in tau["slices"]))
    for i, name in enumerate(slices):
        style: dict[str, Any] = {"color": COLOURS[i], "linewidth": 1.4, "marker": "o", "markersize": 3}
        axes.plot(tokens, [tau["slices"][name] for tau in taus], "-", label=name, **style)
    overall = [tau["overall"] for tau in taus]
    axes.plot(tokens, overall, color=INK, linewidth=2.6, marker="o", markersize=4.5, label="overall")
    # Space above the curves, which all rise into the corner where the legend would stand.
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))
    axes.legend(labelcolor=INK, loc="upper left", ncols=2 if len(slices) > 4 else 1)


if __name__ == "__main__":
    for folder in sorted(RUNS.iterdir()):
        draw(folder / "metrics.jsonl", PICTURES / f"shared-target-{folder.name}.svg")
