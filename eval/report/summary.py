"""Build what a report opens with: the verdict and the plan that it rests on, a summary in words, the speed, and the accepted length.

K: num_speculative_tokens. Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.eval.planner.decision import Decision, doubts_of, engine_settings
from draftsmith.eval.planner.plan import PAYS, Cell
from draftsmith.eval.planner.routing import describe_rules
from draftsmith.eval.planner.verdict import QUIET, Action
from draftsmith.eval.report import served as servers
from draftsmith.eval.report.cells import DASH, between, milliseconds, number, percent, significant, some, times, whole
from draftsmith.eval.report.losslessness import count_equal, whose_texts
from draftsmith.eval.report.page_model import OVERALL, Figure, Row, Section, System, Table, View, best_k, tau_of
from draftsmith.eval.report.plots import NUM_COLOURS, Bar, bars_panel
from draftsmith.eval.results.intervals import FEWEST_PROMPTS, WITHIN, prompts_needed
from draftsmith.eval.results.result import Measures
from draftsmith.heads.formats.engines import ENGINES
from draftsmith.target.gguf_file import is_gguf

ALONE = "target alone"


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


def plan_section(view: View) -> Section:
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
    first = f", T={cells[0].temperature:g}" if len(cells) > 1 else ""
    # Servers were timed at one temperature, and stand for all.
    times_of = (
        ("round ms",) if plan.table.servers else tuple(f"{part} ms{first}" for part in ("target", "draft", "rest"))
    )
    columns = ("drafter", "K", f"τ{first}", *times_of, *(f"speedup, T={c.temperature:g}" for c in cells))
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


def describe(system: System, planned: bool = False) -> str:
    """Summarize a system in a few sentences. planned: the verdict says which draft length is best."""
    m, parts = system.drafter.overall, []
    if tau_of(m) is not None:
        verb = "writes" if m.tau is not None else "would write, by simulation,"
        parts.append(f"Each target pass {verb} {number(tau_of(m))} tokens on average{_range_over_slices(system)}")
    if m.speedup is not None:
        slower = "" if m.speedup >= 1 else ", that is slower"
        rates = f" ({significant(m.decode_tok_s)} against {significant(m.baseline_tok_s)} tokens/s)"
        parts.append(f"decoding is {times(m.speedup)} as fast as the target alone on this machine{slower}{rates}")
    else:
        parts.append("the speed was not measured")
    text, best = "; ".join(parts) + ".", best_k(m)
    length = f" By the measured costs, K = {best} is the best draft length over all slices."
    more = "" if best is None or planned else length
    loops, name = max(((m.looping or 0.0, name) for name, m in system.drafter.slices.items()), default=(0.0, ""))
    beware = f" Beware: {percent(loops, 0)} of the {name} answers run in loops, which flatters the numbers there."
    return text[0].upper() + text[1:] + _change(m) + _equality(m) + (beware if loops >= 0.1 else "") + more


def _range_over_slices(system: System) -> str:
    taus = {name: tau for name, m in system.drafter.slices.items() if (tau := tau_of(m)) is not None}
    if len(taus) < 2:
        return ""
    low, high = min(taus, key=lambda name: taus[name]), max(taus, key=lambda name: taus[name])
    if number(taus[low]) == number(taus[high]):
        return " on every slice"
    return f", from {number(taus[low])} on {low} to {number(taus[high])} on {high}"


def _change(m: Measures) -> str:
    """Say how far a tuned target differs from the original."""
    if m.agreement is None:
        return ""
    own = f"the original's own texts: {number(m.perplexity_baseline)}"
    perplexity = f"{number(m.perplexity)} under the original ({own})"
    return (
        f" It changes the target: on the original's texts the tuned target's likeliest token is the same {percent(m.agreement)} "
        f"of the time (KL {number(m.kl, 4)} per token); its own texts have a perplexity of {perplexity}."
    )


def _equality(m: Measures) -> str:
    if m.lossless is None or not m.lossless.checked:
        return ""
    checked, equal = m.lossless.checked, m.lossless.equal
    ending = ", token for token" if equal == checked else "; the others are listed below"
    return f" {count_equal(checked, equal, m.lossless.dtype, whose_texts(m))}{ending}."


def headline(view: View) -> Section:
    """Speed and accepted length, over everything and per slice, the target alone and every drafter side by side."""
    overall = []
    for system in view.systems:
        m = system.drafter.overall
        speed = between(times(m.speedup), view.spread(system.result_index, m, m.speedup_spread), times)
        rates = (significant(m.decode_tok_s), significant(m.baseline_tok_s))
        overall.append(Row((system.label, _tau_cell(m), speed, *rates, whole(m.prompts), whole(m.rounds))))
    names = ("system", "τ", "speedup", "tok/s", "target alone tok/s", "prompts", "rounds")
    tables = [Table("Every system, over all slices", names, tuple(overall))]
    for i in range(len(view.results)):
        rows = [row for name in view.slices for row in _headline_rows(view, i, name)]
        columns = ("slice", "system", "τ", "speedup", "decode tok/s", "TTFT", "over generate", "prompts", "rounds")
        tables.append(Table(f"Decoding per slice{view.where(i)}", columns, tuple(rows), heads=2, folded=True))
    panels = []
    if some([tau_of(m) for name in view.slices for _, m in view.measured(name)]):
        panels.append(_bars("Accepted length τ", view, tau_of, lambda _, m: interval_of(m), number))
    if some([m.speedup for name in view.slices for _, m in view.measured(name)]):

        def spread(s: System, m: Measures) -> tuple[float, float] | None:
            return view.spread(s.result_index, m, m.speedup_spread)

        panels.append(_bars("Speedup", view, lambda m: m.speedup, spread, times))
    caption = "Whiskers: 95% interval over prompts for τ, lowest to highest repeat for the speedup."
    return Section(
        "headline",
        "Speed and accepted length",
        "τ is the accepted length: tokens written per target pass, bonus included, after the first token. Speedup compares "
        "decode tokens per second with the target alone in the same engine on the same prompts. TTFT is the time to the first "
        "token: prefill only, so drafting must not change it. Parentheses hold the 95% interval over prompts for τ, and "
        "the lowest and highest repeat otherwise; there is none of fewer than "
        f"{FEWEST_PROMPTS} prompts, and of speeds none where every system ran once.",
        (Figure(caption, tuple(panels), view.legend, wide=True),) if panels else (),
        tuple(tables),
        # Each warning once.
        notes=tuple(dict.fromkeys(f"Warning: {text}" for result in view.results for text in result.warnings)),
        words=tuple(
            f"{system.label}: {describe(system, view.decision is not None)}{_precision(system)}"
            for system in view.systems
        ),
    )


def interval_of(m: Measures) -> tuple[float, float] | None:
    """Return the interval of the tau that is shown, decoded or simulated."""
    interval = m.tau_interval if m.tau is not None else m.tau_simulated_interval
    return interval if m.prompts >= FEWEST_PROMPTS else None


def _needed(m: Measures) -> int | None:
    """Return the prompts that would bring the interval of tau to +-2%."""
    tau, interval = tau_of(m), interval_of(m)
    return None if tau is None or interval is None else prompts_needed(tau, interval, m.prompts)


def _precision(system: System) -> str:
    """Say how precise tau is, and how many prompts would make it precise."""
    m, tau, interval = system.drafter.overall, tau_of(system.drafter.overall), interval_of(system.drafter.overall)
    if tau is None:
        return ""
    if interval is None:
        few = m.prompts < FEWEST_PROMPTS
        return f" τ has no interval: {m.prompts} prompts are too few." if few else ""
    half = (interval[1] - interval[0]) / 2 / tau
    return f" {m.prompts:,} prompts give τ to ±{percent(half)}; for ±{percent(WITHIN, 0)} it takes about {_needed(m):,} of this kind."


def _tau_cell(m: Measures) -> str:
    mark = " simulated" if m.tau is None and m.tau_simulated is not None else ""
    return between(number(tau_of(m)), interval_of(m), number) + mark


def _headline_rows(view: View, result_index: int, name: str) -> list[Row]:
    pairs = [(system, m) for system, m in view.measured(name) if system.result_index == result_index]
    rows, strong = [], name == OVERALL
    base = next((m for _, m in pairs if some([m.baseline_tok_s, m.ttft_baseline_s])), None)
    if base is not None:
        spread = view.spread(result_index, base, base.baseline_tok_s_spread)
        speed = between(significant(base.baseline_tok_s), spread, significant)
        ends = (milliseconds(base.ttft_baseline_s), times(base.baseline_vs_generate), whole(base.prompts), DASH)
        rows.append(Row((name, ALONE, "1.00", "1.00×", speed, *ends), strong))
    for system, m in pairs:
        speedup = between(times(m.speedup), view.spread(system.result_index, m, m.speedup_spread), times)
        speed = between(significant(m.decode_tok_s), view.spread(result_index, m, m.decode_tok_s_spread), significant)
        ends = (milliseconds(m.ttft_s), times(m.speedup_vs_generate), whole(m.prompts), whole(m.rounds))
        rows.append(Row((name, system.name, _tau_cell(m), speedup, speed, *ends), strong))
    return rows


def _bars(
    title: str,
    view: View,
    value: Callable[[Measures], float | None],
    spread: Callable[[System, Measures], tuple[float, float] | None],
    show: Callable[[float], str],
) -> str:

    def bar(s: System, m: Measures) -> Bar:
        return Bar(((s.label, f"bar s{s.index % NUM_COLOURS}", value(m)),), spread(s, m))

    groups = [(name, [bar(s, m) for s, m in view.measured(name)]) for name in view.slices]
    return bars_panel(title, groups, show=show, reference=(1.0, ALONE))


def accepted_length(view: View) -> Section:
    """The accepted length, decoded and simulated, with the counts behind it."""
    columns = ("slice", "system", "prompts", "tokens", "rounds", "τ decoded", "τ simulated", "difference")
    ends = ("mean over prompts", "accepted / drafted", f"prompts for ±{percent(WITHIN, 0)}")
    known = some([tau_of(m) for name in view.slices for _, m in view.measured(name)])
    table = Table("Counts and accepted length", (*columns, *ends), view.rows(_length_cells), heads=2)
    return Section(
        "accepted-length",
        "Accepted length, decoded and simulated",
        "Decoded: tokens over rounds, counted while decoding. Simulated: exact, from one teacher-forced pass over the "
        "decoded answers. At temperature 0 the two are equal; above it they agree within the sampling error of acceptance, whose "
        "standard error follows the difference. A slice is a sum over its tokens; the mean over prompts weighs prompts equally. The "
        "last column is how many prompts of the kind would give the 95% interval of τ that width.",
        tables=(table,) if known else (),
        missing="The accepted length was not measured.",
        folded=True,
    )


def _length_cells(m: Measures) -> tuple[str, ...]:
    simulated = number(m.tau_simulated, 3)
    difference = DASH
    if m.tau is not None and m.tau_simulated is not None:
        difference = f"{round(m.tau - m.tau_simulated, 3) + 0.0:+.3f}"  # + 0.0 turns -0.0 into 0.0
        difference += "" if not m.tau_difference_se else f" ± {m.tau_difference_se:.3f}"
    counts = (whole(m.prompts), whole(m.tokens), whole(m.rounds))
    ends = (number(m.tau_mean_over_prompts, 3), percent(m.acceptance_rate), whole(_needed(m)))
    return (*counts, number(m.tau, 3), simulated, difference, *ends)
