"""Print a comparison of two results: for the terminal, and as Markdown; its fields are its JSON. Pure."""

import re
from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftsmith.errors import one_line, printable
from draftsmith.eval.gate.compare import BETTER, CHANGED, WORSE, Comparison, Difference, DrafterComparison
from draftsmith.eval.report import page_model
from draftsmith.eval.report.cells import DASH
from draftsmith.eval.report.report import as_markdown, markdown_cell, terminal_cell
from draftsmith.eval.results.metrics import METRICS, Metric

COLUMNS = ("slice", "metric", "old", "new", "change", "interval", "verdict")

_METRICS = {metric.name: metric for metric in METRICS}
_STYLES = {BETTER: "green", WORSE: "bold red", CHANGED: "yellow"}

COMPARISON_MARK = r'\A(# Comparison\n\n- old: |(\[\n  )?\{\n +"old": )'
"""How a comparison's text is known, Markdown or JSON."""


def comparison_text(comparison: Comparison) -> Group:
    """Return what a terminal shows: everything over all slices; of a slice tau, the speedup and what is beyond noise."""
    parts: list[Text | Table] = [
        Text(f"{which}  {one_line(file)} ({one_line(side)})") for which, file, side in _sides(comparison)
    ]
    parts += [Text(f"- {printable(note)}") for note in comparison.notes]
    for one in comparison.drafters:
        table = Table(
            title=Text(f"\n{one_line(_title(one))}"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name in COLUMNS:
            number = name in COLUMNS[2:6]
            table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
        tau = "tau" if any(d.metric == "tau" for d in one.differences) else "tau_simulated"
        brief = (tau, f"k_sweep[{min(one.k)}]", "speedup")
        for d in one.differences:
            if d.slice == page_model.OVERALL or d.metric in brief or d.verdict in _STYLES:
                table.add_row(*map(terminal_cell, _cells(d)), style=_STYLES.get(d.verdict or ""))
        parts.append(table)
    return Group(*parts, Text(_summary(comparison)))


def comparison_markdown(comparison: Comparison) -> str:
    """Return the whole comparison as Markdown."""
    lines = ["# Comparison", ""]
    lines += [f"- {which}: {markdown_cell(file)} ({markdown_cell(side)})" for which, file, side in _sides(comparison)]
    lines += [f"- {markdown_cell(note)}" for note in comparison.notes]
    for one in comparison.drafters:
        table = page_model.Table("", COLUMNS, tuple(page_model.Row(_cells(d)) for d in one.differences), heads=2)
        lines += ["", f"## {markdown_cell(_title(one))}", "", as_markdown(table, tails=1).rstrip()]
    return "\n".join([*lines, "", _summary(comparison), ""])


def _sides(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    return zip(("old", "new"), (comparison.old, comparison.new), comparison.sides, strict=True)


def _title(one: DrafterComparison) -> str:
    old, new = one.k
    return f"{one.name}, K = {old}" if old == new else f"{one.name}, K = {old} -> {new}"


def _cells(d: Difference) -> tuple[str, ...]:
    """Return the cells of a row; seconds as milliseconds."""
    metric = _METRICS.get(d.metric)
    if metric is None:
        kind, place = re.findall(r"(\w+)\[(\d+)\]", d.metric)[0]
        position = kind == "acceptance_at"
        label = f"position {int(place) + 1}" if position else f"tau at K = {place}"
        metric = Metric(d.metric, label, 3 if position else 2)
    digits, scale = metric.digits, metric.scale

    def signed(value: float) -> str:
        return f"{round(scale * value, digits) + 0.0:+,.{digits}f}"  # + 0.0 turns -0.0 into 0.0

    numbers = (f"{scale * d.old:,.{digits}f}", f"{scale * d.new:,.{digits}f}", signed(d.change))
    interval = DASH if d.interval is None else f"{signed(d.interval[0])} to {signed(d.interval[1])}"
    return d.slice, metric.label, *numbers, interval, d.verdict or ""


def _summary(comparison: Comparison) -> str:
    verdicts = [d.verdict for one in comparison.drafters for d in one.differences if d.verdict is not None]
    worse, better = verdicts.count(WORSE), verdicts.count(BETTER)
    return f"Of {len(verdicts)} numbers with an interval, {worse} are worse beyond noise and {better} better."
