"""The curves of one training run, drawn from its metrics.jsonl: loss, accuracy per step, simulated tau.

One JSON object per line: {"step", "tokens", "epoch", "loss", "lr", "accuracy": [per draft step], "acceptance": [...]};
evaluation lines also have "heldout_loss", "heldout_accuracy": [...] and "tau": {"overall": x, "slices": {...}}.
The same file always gives the same bytes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from draftsmith.errors import UserError
from draftsmith.files import atomic_path

# After Okabe and Ito (2008): told apart with any colour vision, dark enough on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8447f", "#9a6a00", "#56b4e9", "#6b4fb8", "#4a5563")
INK, SOFT, RULE = "#1c2430", "#566173", "#dde2e9"
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "draftsmith",
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl by ascending step; a step written again after a resume counts once, the last.

    An unfinished last line (a run that is still writing) is left out. Raises UserError naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give the metrics.jsonl of a training run.") from error
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not valid JSON ({error}); remove the line or train again."
            ) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise UserError(f"{path}, line {number}: no whole number 'step'; give the metrics.jsonl of a training run.")
        by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
    if not by_step:
        raise UserError(f"{path} has no finished line yet; train first, then draw its curves.")
    return [by_step[step] for step in sorted(by_step)]


def plot_training(metrics_jsonl: Path, destination: Path) -> None:
    """Draw loss, accuracy per draft step and simulated tau of one run into `destination` (.svg or .png), atomically.

    Raises UserError for another suffix or an unreadable metrics file.
    """
    kind = destination.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise UserError(
            f"{destination}: curves are drawn as .svg or .png, not '{destination.suffix}'; choose one of the two."
        )
    metrics = read_metrics(metrics_jsonl)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 3.9), layout="constrained")
        loss, accuracy, tau = figure.subplots(1, 3)
        _draw_loss(loss, metrics)
        _draw_accuracy(accuracy, metrics)
        _draw_tau(tau, metrics)
        for axes in (loss, accuracy, tau):
            axes.set_xlabel("training tokens" if _by_tokens(metrics) else "optimizer steps")
            axes.margins(x=0.02)
            if _by_tokens(metrics):
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        with atomic_path(destination) as temporary:
            # A date in the file would make every drawing of the same run differ.
            figure.savefig(
                temporary, format=kind, dpi=150, facecolor="white", metadata={"Date": None} if kind == "svg" else None
            )


def _by_tokens(metrics: Sequence[dict[str, Any]]) -> bool:
    return all(_finite(entry.get("tokens")) for entry in metrics)


def _curve(metrics: Sequence[dict[str, Any]], *keys: str | int) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of the lines that have a number under the nested keys, e.g. ("tau", "slices", "code")."""
    x_key = "tokens" if _by_tokens(metrics) else "step"
    points = []
    for entry in metrics:
        value: Any = entry
        for key in keys:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                value = None
        if _finite(value):
            points.append((entry[x_key], value))
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred running mean; at the ends the window is cut, so nothing is invented there."""
    if width <= 1 or len(values) == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    half = width // 2
    starts = np.clip(np.arange(len(values)) - half, 0, None)
    stops = np.clip(np.arange(len(values)) + half + 1, None, len(values))
    return (sums[stops] - sums[starts]) / (stops - starts)


def _draw_loss(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    axes.set_title("Loss")
    x, y = _curve(metrics, "loss")
    if len(x):
        axes.plot(x, y, color=COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(x, smooth(y, len(y) // 40 + 1), color=COLOURS[0], linewidth=1.8, label="training")
    x, y = _curve(metrics, "heldout_loss")
    if len(x):
        axes.plot(x, y, color=COLOURS[1], marker="o", markersize=4, linewidth=1.8, label="held out")
    _finish(axes, "the loss")


def _draw_accuracy(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    heldout = any(entry.get("heldout_accuracy") for entry in metrics)
    key = "heldout_accuracy" if heldout else "accuracy"
    axes.set_title("Accuracy per draft step, " + ("held out" if heldout else "training"))
    steps = max((len(entry[key]) for entry in metrics if isinstance(entry.get(key), list)), default=0)
    for step in range(steps):
        x, y = _curve(metrics, key, step)
        colour = mpl.colormaps["viridis"](0.88 * step / max(steps - 1, 1))
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if heldout else {}
        axes.plot(
            x, y if heldout else smooth(y, len(y) // 40 + 1), color=colour, linewidth=1.6, label=f"{step + 1}", **style
        )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _finish(axes, "the accuracy", title="step" if steps else None, ncols=2 if steps > 4 else 1)


def _draw_tau(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    axes.set_title("Simulated τ, held out")
    taus = [entry["tau"] for entry in metrics if isinstance(entry.get("tau"), dict)]
    slices = list(dict.fromkeys(name for tau in taus for name in tau.get("slices") or {}))
    for i, name in enumerate(slices):
        x, y = _curve(metrics, "tau", "slices", name)
        colour, dashes = COLOURS[i % len(COLOURS)], ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        axes.plot(x, y, dashes, color=colour, linewidth=1.4, marker="o", markersize=3, label=name)
    x, y = _curve(metrics, "tau", "overall")
    if len(x):
        axes.plot(x, y, color=INK, linewidth=2.6, marker="o", markersize=4.5, label="overall")
    # Room above the curves, which all rise into the corner where the legend would stand.
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))
    _finish(axes, "tau", loc="upper left", ncols=2 if len(slices) > 4 else 1)


def _finish(axes: Axes, what: str, **legend: Any) -> None:
    """Place the legend, or say that nothing was logged."""
    if axes.lines:
        axes.legend(labelcolor=INK, **legend)
    else:
        axes.text(0.5, 0.5, f"{what} was not logged", transform=axes.transAxes, ha="center", color=SOFT)
