"""`draftsmith acceptance`: what a log, answers or a running server tell of acceptance, in everybody's words, beside the report's."""

from argparse import Namespace
from pathlib import Path
from textwrap import fill

from draftsmith.cli.boundary import put
from draftsmith.errors import UserError, did_you_mean
from draftsmith.eval.gate.compare import difference_interval
from draftsmith.eval.ledger.counts import LEDGER
from draftsmith.eval.ledger.sources import Told, read_source
from draftsmith.eval.results.intervals import Interval
from draftsmith.eval.results.result import Measures, Result, read_result


def acceptance(own: Namespace, words: list[str]) -> int:
    """Print every definition of acceptance of one source, and whether tau is the report's."""
    if len(words) != 1 or words[0].startswith("-"):
        wrong = f"there is no option {words[0]}" if words and words[0].startswith("-") else f"{len(words)} are named"
        raise UserError(
            f"acceptance takes one file or address, but {wrong}: name a log of the engine, its answers as JSON, or http://HOST:PORT."
        )
    if own.drafter is not None and own.report is None:
        raise UserError(f"--drafter {own.drafter} names a drafter of a report: give that with --report FILE.")
    measures = own.report and read_measures(own.report, own.drafter)[:2]
    told = read_source(words[0])
    put(_facts(words[0], told))
    for one in LEDGER:
        value = one.of(told.counts)
        many = value if isinstance(value, tuple) else (value,)
        numbers = "not told" if value is None else " ".join(f"{number:.3f}" for number in many)
        put(f"  {one.what:<48}{numbers}{_ends(one.interval(told.answers))}")
        put(fill(one.names, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    for line in (told.note, measures and _beside(told, *measures)):
        if line:
            put(line)
    return 0


def read_measures(path: Path, drafter: str | None) -> tuple[str, Measures, Result]:
    """Return the drafter, its numbers over all slices, and the whole result."""
    result = read_result(path)
    found = result.drafters
    if not found:
        raise UserError(
            f"{path} is of running servers alone and has no drafter: give the result.json of an evaluation."
        )
    name = drafter or next(iter(found))
    if name not in found:
        raise UserError(f"{path} has no drafter {name!r}{did_you_mean(name, found)}: it has {', '.join(found)}.")
    return name, found[name].overall, result


def _facts(where: str, told: Told) -> str:
    counts = told.counts
    answers = f"{len(told.answers)} answers" if told.answers else "sums"
    if counts.rounded:
        return f"{where}: {told.engine}, from rounded figures"
    drafted = "" if counts.drafted is None else f", {counts.drafted:,.0f} tokens drafted"
    return f"{where}: {answers} of {told.engine}, {counts.rounds:,.0f} rounds{drafted}, {counts.accepted:,.0f} accepted"


def _ends(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"


def _beside(told: Told, name: str, measures: Measures) -> str:
    """Say whether the source's tau is the report's, as far as intervals tell."""
    decoded = measures.tau is not None
    tau = measures.tau if decoded else measures.tau_simulated
    expected = measures.tau_interval if decoded else measures.tau_simulated_interval
    if tau is None or told.counts.tau is None:
        return f"The report has no tau of {name}, or the source no round: there is nothing to compare."
    found = LEDGER[0].interval(told.answers)
    line = f"report: tau of {name} {tau:.3f}{_ends(expected)}, here {told.counts.tau:.3f}"
    line += f"{_ends(found)}. "
    apart = difference_interval(tau, told.counts.tau, expected, found or (told.counts.tau, told.counts.tau))
    if expected is None or apart is None:
        return f"{line}Of fewer than ten prompts the report gives no interval, so whether they differ is not known."
    if apart[0] <= 0 <= apart[1]:
        return f"{line}They do not differ beyond chance."
    less = told.counts.tau < tau
    return line + (
        "The engine accepts less than was measured: compare target, template, sampling and num_speculative_tokens, and the "
        "traffic with the report's prompts."
        if less
        else "The engine accepts more than was measured: its texts may be loops, or other traffic than the report's prompts. An engine "
        "counts accepted tokens that an answer's end cuts off; the report's tau does not."
    )
