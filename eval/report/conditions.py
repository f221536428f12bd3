"""Build the section of the report on what acceptance depends on: the tokens that stood before a draft, thought and answer.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from collections.abc import Sequence

from draftsmith.eval.report.cells import number, whole
from draftsmith.eval.report.page_model import OVERALL, Figure, Row, Section, System, Table, View
from draftsmith.eval.report.plots import Series, line_panel
from draftsmith.eval.results.conditions import CONTEXTS, PAST, Group

_COLUMNS = ("rounds", "τ decoded", "expected rounds", "τ simulated")


def section(view: View) -> Section:
    """Accepted length by the place in the context."""
    slices = [name for name in view.slices if name != OVERALL]
    by, past = "Accepted length by tokens before the draft", "Up to and past the longest text that a head learned from"
    tables = (
        _table(by, "contexts", view, [OVERALL], ("system", "tokens before")),
        _table(f"{by}, per slice", "contexts", view, slices, ("slice", "system", "tokens before"), folded=True),
        _table(past, "training_split", view, [OVERALL], ("system", "tokens before")),
        _table(
            "In thought and in the answer after it",
            "thinking",
            view,
            view.slices if len(slices) > 1 else [OVERALL],
            ("slice", "system", "part"),
            heads=3,
        ),
    )
    return Section(
        "context",
        "Acceptance by place in the context",
        "Rounds grouped by the tokens that stood before the draft: the prompt's and the answer's so far. A head drafts worse where "
        "texts are longer than those that it learned from. A group of few rounds says little.",
        _figures(view),
        tuple(table for table in tables if table.rows),
        missing="Acceptance by place in the context was not measured.",
    )


def _figures(view: View) -> tuple[Figure, ...]:
    """Draw a line per system over all groups of contexts."""
    curves = [(s, {g.name: _tau(g) for g in s.drafter.overall.contexts or ()}) for s in view.systems]
    names = [name for name in CONTEXTS if any(name in curve for _, curve in curves)]
    taus = [tau for _, curve in curves for tau in curve.values() if tau is not None]
    if len(names) < 2 or not taus:
        return ()
    lines = [Series(s.label, s.index, tuple(curve.get(name) for name in names)) for s, curve in curves if curve]
    labels, ends = [f"{name.split(' ')[0]}+" for name in names], (1.0, max([2.0, *taus]))
    panel = line_panel("Accepted length τ", labels, lines, x_title="tokens before the draft", show=number, y_range=ends)
    return (Figure("Accepted length τ by the tokens that stood before the draft.", (panel,), view.legend, wide=True),)


def _table(
    caption: str,
    field: str,
    view: View,
    slices: Sequence[str],
    names: tuple[str, ...],
    *,
    heads: int = 2,
    folded: bool = False,
) -> Table:
    """Return a row for each group that a field of the measures holds. names: of the columns that say which group it is."""
    rows = [
        Row((*((name,) if names[0] == "slice" else ()), system.label, label, *_cells(group)))
        for name in slices
        for system, m in view.measured(name)
        for group in getattr(m, field) or ()
        if (label := _trained(system, group) if field == "training_split" else group.name)
    ]
    return Table(caption, (*names, *_COLUMNS), tuple(rows), heads, folded)


def _trained(system: System, group: Group) -> str:
    """Return which texts a group is of, by the length that the head was trained to; empty where that is not known."""
    trained = None if system.drafter.draft is None else system.drafter.draft.trained_length
    return "" if trained is None else f"{'past' if group.name == PAST else 'up to'} {trained:,}"


def _cells(group: Group) -> tuple[str, str, str, str]:
    expected = number(group.rounds_simulated, 0)
    return whole(group.rounds), number(group.tau), expected, number(group.tau_simulated)


def _tau(group: Group) -> float | None:
    return group.tau if group.tau is not None else group.tau_simulated
