"""Build the sections of the report that explain the numbers: positions, context, draft length, and where the time goes.

K: num_speculative_tokens. Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draftsmith.eval.report.cells import DASH, between, number, percent, significant, times, whole
from draftsmith.eval.report.page_model import OVERALL, Figure, Row, Section, System, Table, View, best_k
from draftsmith.eval.report.plots import Bar, Series, bars_panel, line_panel, part_swatch
from draftsmith.eval.results.conditions import CONTEXTS, PAST, Group
from draftsmith.eval.results.result import Measures, MsPerRound

PARTS = ("draft", "verify", "commit", "other")
_GROUP_COLUMNS = ("rounds", "τ decoded", "expected rounds", "τ simulated")
Curve = tuple[float | None, ...]


def positions(view: View) -> Section:
    """alpha_at and acceptance_at per slice."""
    conditional = "Conditional acceptance α: a draft position is accepted, given that all before it were"
    plain = "Acceptance by position: a draft position is accepted, over all rounds"
    drawn = [_position_curves(view, "alpha_at", conditional), _position_curves(view, "acceptance_at", plain)]
    simulated = [
        s.label for s in view.systems if s.drafter.overall.alpha_at is None and _curve(s.drafter.overall, "alpha_at")
    ]
    return Section(
        "positions",
        "Acceptance by draft position",
        "How acceptance changes along a draft. With a flat α later positions are as good as the first; with a falling α the "
        "draft gets worse with every token.",
        tuple(figure for figures, _ in drawn for figure in figures),
        tuple(table for _, tables in drawn for table in tables),
        (f"By simulation, as nothing was decoded: {', '.join(simulated)}.",) if simulated else (),
        missing="Acceptance by position was not measured.",
    )


def _position_curves(view: View, key: str, caption: str) -> tuple[list[Figure], list[Table]]:
    curves = {
        name: [(s, m, curve) for s, m in view.measured(name) if (curve := _curve(m, key))] for name in view.slices
    }
    width = max((len(curve) for drawn in curves.values() for *_, curve in drawn), default=0)
    if not width:
        return [], []
    labels = [str(i + 1) for i in range(width)]
    panels, rows = [], []
    for name, drawn in curves.items():
        lines = [Series(s.label, s.index, _pad(curve, width)) for s, _, curve in drawn]
        if lines:
            show, ends = partial(percent, digits=0), (0.0, 1.0)
            panels.append(line_panel(name, labels, lines, x_title="draft position", show=show, y_range=ends))
        for s, m, curve in drawn:
            counts = map(whole, (m.rounds, _reached(m, len(curve))) if key == "alpha_at" else (m.rounds,))
            rows.append(Row((name, s.label, *map(percent, _pad(curve, width)), *counts), name == OVERALL))
    counted = ("rounds", "rounds that reached the last") if key == "alpha_at" else ("rounds",)
    table = Table(caption, ("slice", "system", *labels, *counted), tuple(rows), heads=2, folded=True)
    return [Figure(f"{caption}.", tuple(panels), view.legend, folded=key != "alpha_at")], [table]


def _reached(m: Measures, width: int) -> int | None:
    """Return the rounds that drafted a token at the last of `width` positions, all before it accepted: those that its alpha is of."""
    accepted, alpha = ([*(kept or ()), *[None] * width][width - 1] for kept in (m.acceptance_at, m.alpha_at))
    return round(m.rounds * accepted / alpha) if m.rounds is not None and accepted and alpha else None


def _curve(m: Measures, key: str) -> Curve:
    decoded = getattr(m, key)
    return (decoded if decoded is not None else getattr(m, f"{key}_simulated")) or ()


def _pad(curve: Curve, width: int) -> Curve:
    return (*curve, *[None] * (width - len(curve)))


def context(view: View) -> Section:
    """Accepted length by the place in the context."""
    slices, columns = [name for name in view.slices if name != OVERALL], ("system", "tokens before")
    by, past = "Accepted length by tokens before the draft", "Up to and past the longest text that a head learned from"
    tables = [_group_table(past, "training_split", view, [OVERALL], columns)]
    names = _context_names(view)
    if len(names) > 1:
        rows = [
            (system.label, group.name, group.alpha_at or group.alpha_at_simulated or ())
            for system, m in view.measured(OVERALL)
            for group in m.contexts or ()
        ]
        width = max((len(alphas) for *_, alphas in rows), default=0)
        caption = "Conditional acceptance α of each draft position by tokens before the draft"
        cells = tuple(Row((label, name, *map(percent, _pad(alphas, width)))) for label, name, alphas in rows if alphas)
        tables = [
            _group_table(by, "contexts", view, [OVERALL], columns),
            _group_table(f"{by}, per slice", "contexts", view, slices, ("slice", *columns), folded=True),
            Table(caption, (*columns, *(str(k + 1) for k in range(width))), cells, heads=2, folded=True),
            *tables,
        ]
    scopes, parts = view.slices if len(slices) > 1 else [OVERALL], ("slice", "system", "part")
    tables.append(_group_table("In thought and in the answer after it", "thinking", view, scopes, parts, heads=3))
    return Section(
        "context",
        "Acceptance by place in the context",
        "Rounds grouped by the tokens that stood before the draft: the prompt's and the answer's so far. A head drafts worse where "
        "texts are longer than those that it learned from. A group of few rounds says little.",
        _context_figures(view),
        tuple(table for table in tables if table.rows),
        missing=f"All rounds stand behind {names[0]} tokens, so nothing tells contexts apart."
        if names
        else "Acceptance by place in the context was not measured.",
    )


def _context_names(view: View) -> list[str]:
    """Return the groups of contexts that hold rounds, ascending; one alone tells nothing of the context."""
    filled = {group.name for system in view.systems for group in system.drafter.overall.contexts or ()}
    return [name for name in CONTEXTS if name in filled]


def _context_figures(view: View) -> tuple[Figure, ...]:
    """Draw a line per system over all groups of contexts."""
    names, lines = _context_names(view), []
    if len(names) < 2:
        return ()
    for system in view.systems:
        groups = {group.name: group for group in system.drafter.overall.contexts or ()}
        found = [groups.get(name, Group(name)) for name in names]
        taus = tuple(g.tau_simulated if g.tau is None else g.tau for g in found)
        spreads = tuple(g.interval_simulated if g.tau is None else g.interval for g in found)
        lines.append(Series(system.label, system.index, taus, spreads=spreads))
    pairs = [pair for line in lines for pair in zip(line.values, line.spreads, strict=True)]
    tops = [end for tau, spread in pairs for end in (tau, *(spread or ())) if end is not None]
    labels, ends = [f"{name.split(' ')[0]}+" for name in names], (1.0, max([2.0, *tops]))
    panel = line_panel("Accepted length τ", labels, lines, x_title="tokens before the draft", show=number, y_range=ends)
    intervals = ", with 95% intervals over prompts" if any(spread for _, spread in pairs) else ""
    caption = f"Accepted length τ by the tokens that stood before the draft{intervals}."
    return (Figure(caption, (panel,), view.legend, wide=True),)


def _group_table(
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
        Row((*((name,) if names[0] == "slice" else ()), system.label, label, *_group_cells(group)))
        for name in slices
        for system, m in view.measured(name)
        for group in getattr(m, field) or ()
        if (label := _trained(system, group) if field == "training_split" else group.name)
    ]
    return Table(caption, (*names, *_GROUP_COLUMNS), tuple(rows), heads, folded)


def _trained(system: System, group: Group) -> str:
    """Return which texts a group is of, by the length that the head was trained to; empty where that is not known."""
    trained = None if system.drafter.draft is None else system.drafter.draft.trained_length
    return "" if trained is None else f"{'past' if group.name == PAST else 'up to'} {trained:,}"


def _group_cells(group: Group) -> tuple[str, str, str, str]:
    decoded = between(number(group.tau), group.interval, number)
    simulated = between(number(group.tau_simulated), group.interval_simulated, number)
    return whole(group.rounds), decoded, number(group.rounds_simulated, 0), simulated


def sweep(view: View) -> Section:
    """Accepted length and predicted speedup for every draft length."""
    about = (
        "Accepted length for every draft length K, by simulation, and the speedup predicted from it with the costs of a draft "
        "and of a target pass measured on this machine. A ring marks the best K: beyond it, one more drafted token costs more "
        "time than it saves."
    )
    points = [p for name in view.slices for _, m in view.measured(name) for p in m.k_sweep or ()]
    lengths = sorted({p.num_speculative_tokens for p in points})
    if not lengths:
        return Section("draft-length", "Draft length", about, missing="The draft-length sweep was not measured.")
    taus = [p.tau_simulated for p in points if p.tau_simulated is not None]
    gains = [p.predicted_speedup for p in points if p.predicted_speedup is not None]
    figures: list[Figure] = []
    if taus:
        ends = (1.0, max([2.0, *taus]))
        figures = [_sweep_figure(view, lengths, "tau_simulated", "Accepted length τ by draft length K.", ends)]
    if gains:
        ends = (min([1.0, *gains]), max([1.5, *gains]))
        figures = [
            _sweep_figure(view, lengths, "predicted_speedup", "Predicted speedup by draft length K.", ends),
            *(replace(figure, folded=True) for figure in figures),
        ]
    notes = () if gains else ("The costs of a draft and a target pass were not measured, so no best K is given.",)
    tables = (*_sweep_tables(view, lengths, bool(gains)), *_budget_tables(view), *_cost_tables(view))
    return Section("draft-length", "Draft length", about, tuple(figures), tables, notes)


def _sweep_figure(view: View, lengths: Sequence[int], key: str, caption: str, ends: tuple[float, float]) -> Figure:
    show: Callable[[float], str] = times if key == "predicted_speedup" else number
    panels = []
    for name in view.slices:
        lines = []
        for system, m in view.measured(name):
            values, best = _at_lengths(m, lengths, key), best_k(m)
            ring = lengths.index(best) if key == "predicted_speedup" and best is not None else None
            lines.append(Series(system.label, system.index, values, ring))
        if any(value is not None for line in lines for value in line.values):
            panels.append(line_panel(name, [str(k) for k in lengths], lines, x_title="K", show=show, y_range=ends))
    return Figure(caption, tuple(panels), view.legend)


def _at_lengths(m: Measures, lengths: Sequence[int], key: str) -> Curve:
    by_length = {p.num_speculative_tokens: getattr(p, key) for p in m.k_sweep or ()}
    return tuple(by_length.get(k) for k in lengths)


def _sweep_tables(view: View, lengths: Sequence[int], gains: bool) -> list[Table]:
    columns = ("slice", "system", *(f"K={k}" for k in lengths))
    taus = view.rows(lambda m: [*map(number, _at_lengths(m, lengths, "tau_simulated"))] if m.k_sweep else None)
    tables = [Table("Accepted length τ by K, simulated", columns, taus, heads=2, folded=True)]
    if gains:

        def cells(m: Measures) -> list[str]:
            return [*map(times, _at_lengths(m, lengths, "predicted_speedup")), str(best_k(m) or DASH)]

        speedups = view.rows(lambda m: cells(m) if m.k_sweep else None)
        tables.append(Table("Predicted speedup by K", (*columns, "best K"), speedups, heads=2, folded=True))
    return tables


def _budget_tables(view: View) -> list[Table]:
    """List what trees that grow would get accepted with more nodes, or fewer."""
    sizes = sorted({int(n) for name in view.slices for _, m in view.measured(name) for n in m.budget_sweep or ()})
    if not sizes:
        return []
    rows = view.rows(lambda m: None if m.budget_sweep is None else [number(m.budget_sweep.get(str(n))) for n in sizes])
    columns = ("slice", "system", *(f"{n} tokens" for n in sizes))
    caption = "Accepted length τ by the size of a tree, the root included, simulated"
    return [Table(caption, columns, rows, heads=2, folded=True)]


def _cost_tables(view: View) -> list[Table]:
    """List what one pass costs, which the predicted speedups are computed from."""
    tables = []
    for i, result in enumerate(view.results):
        if result.costs is None:
            continue
        lines = {"target pass over n tokens": result.costs.verify_ms}
        lines |= {f"{name} drafts n tokens": costs for name, costs in result.costs.draft_ms.items()}
        sizes = sorted({size for costs in lines.values() for size in costs}, key=lambda size: (len(size), size))
        rows = tuple(Row((name, *(significant(costs.get(size)) for size in sizes))) for name, costs in lines.items())
        tables.append(Table(f"Costs in ms by n{view.where(i)}", ("n", *sizes), rows, folded=True))
    return tables


def time_split(view: View) -> Section:
    """Milliseconds of a round by part, and the share of the ideal speedup that was reached."""
    about = (
        "Mean milliseconds of one round (one target pass) by part. The ideal speedup is τ / (verify(K)/verify(1) + "
        "draft/verify(1)): the speedup if committing and everything else cost nothing."
    )
    timed = [(name, s, m.ms_per_round) for name in view.slices for s, m in view.measured(name)]
    rows = view.rows(_time_cells)
    if not rows:
        return Section("time", "Where the time goes", about, missing="The time of a round was not measured.")
    high = max((sum(_parts(split)) for *_, split in timed if split), default=0.0)
    panels = []
    for system in view.systems:
        bars = [
            (name, [Bar(tuple((part, f"part{i}", getattr(split, part) or 0.0) for i, part in enumerate(PARTS)))])
            for name, s, split in timed
            if s is system and split
        ]
        if bars:
            panels.append(bars_panel(system.label, bars, show=significant, high=high))
    legend = tuple((part_swatch(i), part) for i, part in enumerate(PARTS))
    ends = ("ms per token", "ideal speedup", "measured", "share reached")
    columns = ("slice", "system", *(f"{part} ms" for part in PARTS), *ends)
    table = Table("Milliseconds per round, and the speedup they allow", columns, rows, heads=2, folded=bool(panels))
    figures = (Figure("Milliseconds per round.", tuple(panels), legend, wide=True),) if panels else ()
    return Section("time", "Where the time goes", about, figures, (table,))


def _parts(split: MsPerRound) -> tuple[float, ...]:
    return tuple(getattr(split, part) or 0.0 for part in PARTS)


def _time_cells(m: Measures) -> list[str] | None:
    if m.ms_per_round is None and m.ideal_speedup is None:
        return None
    split = m.ms_per_round or MsPerRound()
    per_token = sum(_parts(split)) / m.tau if m.ms_per_round and m.tau else None
    reached = m.speedup / m.ideal_speedup if m.speedup is not None and m.ideal_speedup else None
    parts = [significant(getattr(split, part)) for part in PARTS]
    return [*parts, significant(per_token), times(m.ideal_speedup), times(m.speedup), percent(reached, 0)]
