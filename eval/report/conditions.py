"""Build the section of the report on what acceptance depends on: the tokens that stood before a draft, thought and answer.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from draftsmith.eval.report.page_model import OVERALL, Figure, Row, Section, System, Table, View, number, whole
from draftsmith.eval.report.plots import Series, line_panel
from draftsmith.eval.results.conditions import CONTEXTS, PAST, Group
from draftsmith.eval.results.result import Measures

_COLUMNS = ("rounds", "τ decoded", "expected rounds", "τ simulated")


def section(view: View) -> Section:
    """Accepted length by the place in the context."""
    slices = [name for name in view.slices if name != OVERALL]
    tables = [
        _table("Accepted length by tokens before the draft", view, [OVERALL]),
        _table("Accepted length by tokens before the draft, per slice", view, slices),
    ]
    if past := [row for system in view.systems for row in _trained_rows(system)]:
        columns = ("system", "tokens before", *_COLUMNS)
        tables.append(Table("Up to and past the longest text that a head learned from", columns, tuple(past), heads=2))
    slices_too = view.slices if len(view.slices) > 2 else [OVERALL]
    if thought := [row for name in slices_too for row in _thinking_rows(name, view)]:
        tables.append(
            Table(
                "In thought and in the answer after it", ("slice", "system", "part", *_COLUMNS), tuple(thought), heads=3
            )
        )
    kept = tuple(table for table in tables if table.rows)
    return Section(
        "context",
        "Acceptance by place in the context",
        "Rounds grouped by the tokens that stood before the draft: the prompt's and the answer's so far. A head drafts worse where "
        "texts are longer than those that it learned from. A group of few rounds says little.",
        _figures(view),
        kept,
        missing="Acceptance by place in the context was not measured.",
    )


def _figures(view: View) -> tuple[Figure, ...]:
    """A line per system over all groups of contexts."""
    curves = [(s, {g.name: _tau(g) for g in s.drafter.overall.contexts or ()}) for s in view.systems]
    names = [name for name in CONTEXTS if any(name in curve for _, curve in curves)]
    taus = [tau for _, curve in curves for tau in curve.values() if tau is not None]
    if len(names) < 2 or not taus:
        return ()
    lines = [Series(s.label, s.index, tuple(curve.get(name) for name in names)) for s, curve in curves if curve]
    panel = line_panel(
        "Accepted length τ",
        [f"{name.split(' ')[0]}+" for name in names],
        lines,
        x_title="tokens before the draft",
        show=number,
        y_range=(1.0, max([2.0, *taus])),
    )
    return (Figure("Accepted length τ by the tokens that stood before the draft.", (panel,), view.legend, wide=True),)


def _table(caption: str, view: View, slices: list[str]) -> Table:
    rows = [
        Row((*((name,) if name != OVERALL else ()), system.label, group.name, *_cells(group)))
        for name in slices
        for system, m in view.measured(name)
        for group in m.contexts or ()
    ]
    per_slice = slices != [OVERALL]
    columns = (*(("slice",) if per_slice else ()), "system", "tokens before", *_COLUMNS)
    return Table(caption, columns, tuple(rows), heads=2, folded=per_slice)


def _trained_rows(system: System) -> list[Row]:
    m: Measures = system.drafter.overall
    trained = None if system.drafter.draft is None else system.drafter.draft.trained_length
    if trained is None:
        return []
    groups = m.training_split or ()
    return [Row((system.label, f"{'past' if g.name == PAST else 'up to'} {trained:,}", *_cells(g))) for g in groups]


def _thinking_rows(name: str, view: View) -> list[Row]:
    return [
        Row((name, system.label, group.name, *_cells(group)))
        for system, m in view.measured(name)
        for group in m.thinking or ()
    ]


def _cells(group: Group) -> tuple[str, str, str, str]:
    expected = number(group.rounds_simulated, 0)
    return whole(group.rounds), number(group.tau), expected, number(group.tau_simulated)


def _tau(group: Group) -> float | None:
    return group.tau if group.tau is not None else group.tau_simulated
