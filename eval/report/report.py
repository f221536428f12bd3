"""Render report.html and report.md from one or several result.json; the same results give the same bytes.

    draftsmith report runs/x/eval/temperature-0/result.json runs/x/eval/temperature-1/result.json

The HTML is self-contained: style, pictures and a small script are inside, it loads nothing from anywhere. Without the script all of
it is there, too: the script sorts tables, plays worked examples and copies settings.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table as TerminalTable
from rich.text import Text

from draftsmith.errors import one_line, printable
from draftsmith.eval.planner.decision import Decision
from draftsmith.eval.report import analysis, appendix, losslessness, served, summary
from draftsmith.eval.report.cells import number, significant, times
from draftsmith.eval.report.page_model import OVERALL, Sample, Table, tau_of, view_of
from draftsmith.eval.results.result import Measures, Piece, Result
from draftsmith.eval.training.history import History
from draftsmith.storage import write_text

_SECTIONS = (
    summary.headline,
    summary.plan_section,
    served.section,
    analysis.positions,
    analysis.context,
    analysis.sweep,
    analysis.time_split,
    appendix.examples,
    losslessness.section,
    appendix.training,
    summary.accepted_length,
    appendix.latency,
    appendix.memory,
    appendix.looping,
    appendix.method,
)
"""In the order in which a reader decides; those that are folded come last."""

_TEMPLATES = Path(__file__).parent / "templates"


def render_html(results: Sequence[Result], decision: Decision | None = None, history: History | None = None) -> str:
    """Return the report as one self-contained HTML page."""
    return _render("report.html.jinja", results, decision, history)


def render_markdown(results: Sequence[Result], decision: Decision | None = None, history: History | None = None) -> str:
    """Return the report as Markdown: the same text and tables, without the pictures."""
    return _render("report.md.jinja", results, decision, history)


def write_report(
    results: Sequence[Result], folder: str | Path, decision: Decision | None = None, history: History | None = None
) -> None:
    """Write report.html and report.md into `folder`, each atomically.

    decision: what the results and costs come to; history: how the head came to be; None where that is not known.
    """
    write_text(Path(folder) / "report.html", render_html(results, decision, history))
    write_text(Path(folder) / "report.md", render_markdown(results, decision, history))


REPORT_MARKS = {"report.html": "<title>draftsmith report: ", "report.md": r"\A# draftsmith report: "}
"""How the texts of a report are known."""
HEADLINE_COLUMNS = ("drafter", "slice", "tau", "tau simulated", "speedup", "tok/s", "target alone tok/s")


def headline_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the closing table, HEADLINE_COLUMNS per row; each system ends with its `overall` row."""
    view = view_of(results)
    rows: list[tuple[str, ...]] = []
    for system in view.systems:
        for name in (*view.slices[1:], OVERALL):
            m = system.drafter.at(name)
            if m is not None:
                rows.append((system.label, name, *_figures(m)))
    return rows


def _figures(m: Measures) -> tuple[str, ...]:
    speed = (times(m.speedup), significant(m.decode_tok_s), significant(m.baseline_tok_s))
    return (number(m.tau), number(m.tau_simulated), *speed)


def headline_table(results: Sequence[Result]) -> TerminalTable:
    """Return the closing table of a run for the terminal: a row for each system over all slices, and the slices where its tau
    is lowest and highest; the rest is in the report."""
    table = TerminalTable(title="Speculative decoding against the target alone", title_justify="left")
    table.add_column("drafter")
    for name in HEADLINE_COLUMNS[2:-1]:
        table.add_column(name, justify="right", no_wrap=True)  # names take more lines before figures are cut
    table.add_column("tau from slice to slice", min_width=12)  # two lines at 80 columns
    for system in view_of(results).systems:
        taus = sorted((tau, name) for name, m in system.drafter.slices.items() if (tau := tau_of(m)) is not None)
        spread = " to ".join(f"{tau:.2f} {name}" for tau, name in (taus[0], taus[-1])) if len(taus) > 1 else ""
        table.add_row(*map(terminal_cell, (system.label, *_figures(system.drafter.overall)[:-1], spread)))
    return table


def _render(template: str, results: Sequence[Result], decision: Decision | None, history: History | None) -> str:
    view = view_of(results, decision, history)
    targets = dict.fromkeys(Path(result.target.path).name or result.target.path for result in results)
    # Of servers alone there is nothing else to say.
    sections = [make(view) for make in (_SECTIONS if view.systems else (served.section, appendix.method))]
    loader, as_html = FileSystemLoader(_TEMPLATES), template.endswith(".html.jinja")
    environment = Environment(
        loader=loader,
        autoescape=as_html,
        # Whatever a template prints may hold names and texts of others: what is safe as it is says so.
        finalize=_visible if as_html else markdown_cell,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    script, *_ = loader.get_source(environment, "report.js")
    first = view.results[0]
    machine = f"{first.hardware.gpu or first.hardware.cpu}, {first.hardware.cores} cores"
    decoded = f"K = {first.settings.num_speculative_tokens} · {first.settings.dtype} · {machine}"
    subtitle = (", ".join(view.labels), decoded if view.systems else f"asked from {machine}", first.date[:10])
    context: dict[str, Any] = {
        "title": ", ".join(targets),
        "subtitle": " · ".join(subtitle),
        "banner": summary.banner(view),
        "evidence": losslessness.evidence(view),
        "sections": [section for section in sections if not section.empty],
        "missing": [(section.title, section.missing) for section in sections if section.empty and section.missing],
        "script": script,
        # Nothing but this very script may run, and nothing may be loaded, whatever else gets into the page.
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    environment.filters |= {
        "as_markdown": as_markdown,
        "fenced": fenced,
        "cut": cut,
        "plain": plain,
        "describe_round": describe_round,
    }
    return environment.get_template(template).render(**context)


def terminal_cell(text: str) -> Text:
    """Return foreign text for a table cell of the terminal, of which nothing is read as colours or commands."""
    return Text(one_line(text))


def markdown_cell(text: Any) -> Markup:
    """Escape foreign text for a line or a table cell of Markdown, which may be shown as HTML; what is Markdown already stays."""
    if isinstance(text, Markup):
        return text
    text = re.sub(r"([\\`*\[\]|])", r"\\\1", printable(str(text)))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(re.sub(r"\s+", " ", text))


def as_markdown(table: Table, tails: int = 0) -> Markup:
    """Return the columns and rows of a table in Markdown. tails: columns of words at its end."""
    end = len(table.columns) - tails
    rule = ("---:" if not table.words and table.heads <= i < end else "---" for i in range(len(table.columns)))
    lines = (table.columns, rule, *(row.cells for row in table.rows))
    return Markup("".join(f"| {' | '.join(map(markdown_cell, line))} |\n" for line in lines))


def plain(text: str) -> Markup:
    """Escape text for a line of HTML inside Markdown, where Markdown's own escapes would be shown as they are."""
    escaped = re.sub(r"[\\`*\[\]|]", lambda mark: f"&#{ord(mark[0])};", html.escape(printable(text)))
    return Markup(re.sub(r"\s+", " ", escaped))


def _visible(value: Any) -> Any:
    """Return a value of the page with what would not be seen of a text written out; jinja escapes it for HTML."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def describe_round(round_: Sequence[Piece]) -> str:
    """Return what one target pass wrote, in words: the drafted tokens that were accepted, then the target's own."""
    accepted = [piece.text for piece in round_ if piece.position is not None]
    own = [piece.text for piece in round_ if piece.position is None]
    drafted = f"{len(accepted)} accepted: {', '.join(map(repr, accepted))}" if accepted else "none accepted"
    return f"{drafted}; the target's own: {', '.join(map(repr, own))}" if own else drafted


def fenced(text: str) -> Markup:
    """Return text in a Markdown code block whose fence does not occur in it."""
    text = printable(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{text}\n{fence}")


def cut(sample: Sample) -> str:
    """Return an answer as plain text with a bar between what one target pass and the next wrote."""
    return "│".join("".join(piece.text for piece in round_) for round_ in sample.rounds)
