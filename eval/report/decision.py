"""Build what a report opens with: the verdict, and the plan that it rests on.

K: num_speculative_tokens. Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from dataclasses import dataclass

from draftsmith.eval.planner.decision import Decision, doubts_of, engine_settings
from draftsmith.eval.planner.plan import PAYS, Cell
from draftsmith.eval.planner.routing import describe_rules
from draftsmith.eval.planner.verdict import QUIET, Action
from draftsmith.eval.report import served as servers
from draftsmith.eval.report.cells import DASH, between, number, percent, significant, times
from draftsmith.eval.report.page_model import OVERALL, Row, Section, Table, View, tau_of
from draftsmith.heads.formats.engines import ENGINES
from draftsmith.target.gguf_file import is_gguf


@dataclass(frozen=True)
class Banner:
    """The top of the page. kind: good, bad or unsure, which decides a colour; figure: (the number, what it is); settings: (where they
    go, what to paste); warnings: why the numbers should not be quoted, or are not those of the engine."""

    kind: str
    action: str
    headline: str
    figure: tuple[str, str] | None = None
    settings: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


_NOT_LLAMA_CPP = (
    "Not timed in llama.cpp: there a pass multiplies the file's quantized weights, and over several tokens it can take several times one "
    "over a single token, so that the same tau brings less or nothing. Start llama-server with and without the draft, and let "
    "draftsmith costs --server URL --server URL decide."
)

_KINDS = {Action.DEPLOY: "good", Action.CHANGE_K: "good", Action.DO_NOT_DEPLOY: "bad", Action.MORE_DATA: "bad"}


def banner(view: View) -> Banner:
    """Return the verdict as the page opens with it; without a plan, that none was made."""
    doubts = doubts_of(view.results)
    busy = f"Measured on a busy machine, do not quote: {'; '.join(doubts)}. Evaluate again with {QUIET}."
    warnings, decision = [busy] if doubts else [], view.decision
    if decision is None:
        return _unplanned(view, tuple(warnings))
    verdict, plan = decision.verdict, decision.plan
    if is_gguf(plan.results[0].target.path) and not plan.table.servers:
        warnings.append(_NOT_LLAMA_CPP)
    gains, _ = plan.gains(verdict.option)
    temperatures = [r.settings.temperature for r in plan.results]
    k, tau = verdict.option.num_speculative_tokens, number(verdict.option.tau)
    what = f"the speed of the target alone at temperature {temperatures[0]:g}, with K = {k} (τ {tau})"
    # What must not be quoted is no headline.
    figure = None if verdict.action is Action.MEASURE_AGAIN else (times(gains[0]), what)
    kind = _KINDS.get(verdict.action, "unsure")
    # What the warning says already is not repeated.
    said = {f"The clock: {doubt}." for doubt in doubts}
    reasons = tuple(reason for reason in verdict.reasons if reason not in said)
    settings = tuple(
        (f"{ENGINES[engine].title}" + (f": {snippet.file}" if snippet.file else ""), snippet.text)
        for engine, snippets in engine_settings(decision).items()
        for snippet in snippets
    )
    return Banner(kind, str(verdict.action), verdict.headline, figure, settings, reasons, tuple(warnings))


def _unplanned(view: View, warnings: tuple[str, ...]) -> Banner:
    """Open with what was measured of the first drafter."""
    missing, first = "Costs were not measured, so there is no plan", view.results[0].served
    told = None if view.systems or first is None else servers.headline(first)
    if told is not None:
        figure = times(told[0]), "the speed of the first server"
        return Banner("unsure", "running servers", told[1], figure, warnings=warnings)
    for system in view.systems:
        m, tau = system.drafter.overall, tau_of(system.drafter.overall)
        if m.speedup is not None:
            text = f"{missing}; {system.label} decodes {times(m.speedup)} as fast as the target alone, τ {number(tau)}."
            figure = times(m.speedup), "the speed of the target alone"
            return Banner("unsure", "no plan", text, figure, warnings=warnings)
        if tau is not None:
            text = f"{missing}, and no speed: {system.label} would get {number(tau)} tokens from each target pass."
            return Banner("unsure", "no plan", text, (number(tau), "tokens per target pass"), warnings=warnings)
    return Banner("unsure", "no plan", f"{missing}.", warnings=warnings)


def section(view: View) -> Section:
    """The plan: by draft length, batch, context and slice, and the rules for requests."""
    decision = view.decision
    if decision is None:
        return Section(
            "plan", "What to deploy", "", missing="No plan was made: the costs of a machine were not measured."
        )
    plan, table = decision.plan, decision.plan.table
    what = "whole rounds take, as measured from" if table.servers else "target passes and drafts cost on"
    about = (
        f"Tokens per second follow from the exact acceptance of every draft length and from what {what} {table.place}, at batch "
        f"{plan.batch} and {plan.context} tokens of context where nothing else is said. A draft is worth it from {times(PAYS)} on. "
    )
    about += (
        "Only draft lengths that the servers drafted, and those between, have a price."
        if table.servers
        else "What was timed counts before what was predicted; the last table compares both."
    )
    tables = [_by_length(decision), *_best_drafts(decision)]
    again = decision.verdict.action is Action.MEASURE_AGAIN
    rules = (
        ["No rule for requests follows from it until it is measured again."]
        if again
        else describe_rules(decision.rules)
    )
    if decision.checks:
        rows = []
        for c in decision.checks:
            speeds = (times(c.predicted), between(times(c.measured), c.spread, times), percent(c.difference))
            draft = f"{c.drafter}, K = {c.num_speculative_tokens}"
            rows.append(Row((draft, f"T={c.temperature:g}", *speeds, "yes" if c.holds else "no")))
        caption = "Predicted against measured, for the best draft, its neighbours and the decoded draft length"
        columns = ("draft", "temperature", "predicted", "measured", "difference", "within 5% or the spread")
        tables.append(Table(caption, columns, tuple(rows), heads=2, folded=True))
    return Section("plan", "What to deploy", about, tables=tuple(tables), notes=tuple(rules))


def _by_length(decision: Decision) -> Table:
    """Every draft at the headline's place."""
    plan, rows = decision.plan, []
    cells = plan.headline
    for option in sorted(plan.over_temperatures(plan.batch), key=lambda o: (o.drafter, o.num_speculative_tokens)):
        speeds = [times(gain) for gain in plan.speedups(option, plan.batch)]
        cost = option.cost
        whole = cost.verify is None
        parts = [significant(x) for x in ((cost.total,) if whole else (cost.verify, cost.draft, cost.overhead))]
        best = option == decision.verdict.option
        rows.append(
            Row((option.drafter, str(option.num_speculative_tokens), number(option.tau), *parts, *speeds), best)
        )
    first = f"τ, T={cells[0].temperature:g}" if len(cells) > 1 else "τ"
    times_of = ("round ms",) if plan.table.servers else ("target ms", "draft ms", "rest ms")
    columns = ("drafter", "K", first, *times_of, *(f"speedup, T={c.temperature:g}" for c in cells))
    return Table("Speedup by draft length", columns, tuple(rows), heads=2)


def _best_drafts(decision: Decision) -> list[Table]:
    """The best draft by batch and context, and by slice."""
    plan, own = decision.plan, (decision.plan.batch, decision.plan.context)
    heat = {result.settings.temperature: f"T={result.settings.temperature:g}" for result in plan.results}
    places = [cell for cell in plan.cells() if cell.slice == OVERALL]
    slices = [cell for name in plan.slices for result in plan.results if (cell := plan.cell(result, name)) is not None]
    by_place = tuple(
        Row((heat[c.temperature], f"{c.batch}", f"{c.context}", *_best(decision, c)), (c.batch, c.context) == own)
        for c in places
    )
    by_slice = tuple(Row((c.slice, heat[c.temperature], *_best(decision, c)), c.slice == OVERALL) for c in slices)
    price = ("target alone, per million", "with drafts") if decision.price_per_hour is not None else ()
    columns = ("drafter", "K", "speedup", "tok/s", "target alone tok/s", *price)
    return [
        Table("The best draft by batch and context", ("temperature", "batch", "context", *columns), by_place, 2, True),
        Table("The best draft by slice", ("slice", "temperature", *columns), by_slice, 2, True),
    ]


def _best(decision: Decision, cell: Cell) -> tuple[str, ...]:
    """The cells of the best draft at a place; where the target alone is faster, that is said."""
    best = cell.best
    price = [decision.cost_per_million(cell, option) for option in (None, best)]
    if not cell.pays:
        shown = ("none", DASH, f"best: {times(best.speedup)}", DASH)
        price[1] = None
    else:
        shown = (best.drafter, str(best.num_speculative_tokens), times(best.speedup), significant(cell.tok_s(best)))
    prices = tuple(map(significant, price)) if decision.price_per_hour is not None else ()
    return (*shown, significant(cell.alone_tok_s), *prices)
