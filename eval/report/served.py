"""Build the section of the report about running servers: how fast, what they accepted, and what was predicted of them.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from collections import Counter
from dataclasses import replace

from draftsmith.eval.report.cells import DASH, between, milliseconds, number, significant, times
from draftsmith.eval.report.page_model import Row, Section, Table, View
from draftsmith.eval.results.intervals import Percentiles
from draftsmith.eval.results.served import Served, ServedSide

_SPEED = ("τ", "speedup", "predicted", "tok/s together", "of a request, p50 / p95", "TTFT p50 / p95")
_MORE = ("latency p50 / p95", "wait per chunk p50 / p95", "answered", "of")
_ACCEPTED = ("τ", "drafted", "rounds", "by position", "told by")


def section(view: View) -> Section:
    """Running servers at every concurrency, the same prompts in turns."""
    tables, notes, about = list[Table](), list[str](), ""
    for i, result in enumerate(view.results):
        if (served := result.served) is None:
            continue
        often = f", {served.repeats} times each," * (served.repeats > 1)
        about = about or (
            f"{served.prompts} prompts{often} at every concurrency, temperature {served.temperature:g}, at most "
            f"{served.max_tokens} tokens; the servers took turns in short blocks. Speedup: seconds per token after the first, against the "
            "first server on the same prompts, with the 95% interval over prompts. Predicted: from the costs at that concurrency and the τ "
            "that is named. tok/s: of all requests together, and of one after its first token, where p95 is a slow one. TTFT is until the "
            "first text of an answer, over the network; vLLM, SGLang and llama.cpp read prompts anew."
        )
        tables += [replace(table, caption=table.caption + view.where(i)) for table in tables_of(served)]
        notes += notes_of(served)
    return Section("served", "On running servers", about, tables=tuple(tables), notes=tuple(notes))


def headline(served: Served) -> tuple[float, str] | None:
    """Return the speedup of the last server at the lowest concurrency, and what it is in a sentence; None of one server."""
    level = served.levels[0] if served.levels else None
    if level is None or (speedup := level.sides[-1].speedup) is None:
        return None
    more = "Acceptance was injected" if served.injected else "Measured"
    return speedup, (
        f"{served.servers[-1].url} writes its tokens {times(speedup)} as fast as {served.servers[0].url} at concurrency {level.concurrency}. "
        f"{more} on running servers, so there is no plan."
    )


def tables_of(served: Served) -> list[Table]:
    """Return speed, latency and acceptance, a row for each concurrency and server; the servers that accepted more come last."""
    speed, more, accepted = list[Row](), list[Row](), list[Row]()
    for level in served.levels:
        pairs = list(zip(served.servers, level.sides, strict=True))
        for server, side in sorted(pairs, key=lambda pair: pair[1].acceptance.tau if pair[1].acceptance else 0):
            heads = (str(level.concurrency), server.url.removeprefix("http://"))
            speed.append(Row((*heads, *_speed(side)), side.speedup is not None))
            waits = (_both(side.latency_s), _both(side.wait_s), str(side.answered), str(side.asked))
            more.append(Row((*heads, *waits)))
            if a := side.acceptance:
                places = DASH if a.acceptance_at is None else " ".join(f"{share:.2f}" for share in a.acceptance_at)
                counts = (between(number(a.tau), a.tau_interval, number), number(a.drafted), f"{a.rounds:,.0f}")
                accepted.append(Row((*heads, *counts, places, "its answers" if a.by_answers else "/metrics")))
    heads, records = ("concurrency", "server"), "What the servers accepted, by their own records"
    return [
        Table("Speed", (*heads, *_SPEED), tuple(speed), 2),
        Table("Latency", (*heads, *_MORE), tuple(more), 2, folded=True),
        *([Table(records, (*heads, *_ACCEPTED), tuple(accepted), 2)] if accepted else []),
    ]


def _speed(side: ServedSide) -> tuple[str, ...]:
    pace = side.token_s
    rates = DASH if pace is None else f"{significant(1 / pace.p50)} / {significant(1 / pace.p95)}"
    predicted = DASH if side.predicted is None else f"{times(side.predicted)} at τ {number(side.predicted_tau)}"
    tau = number(side.acceptance.tau if side.acceptance else None)
    speedup = between(times(side.speedup), side.speedup_interval, times)
    return (tau, speedup, predicted, significant(side.tok_s), rates, _both(side.ttft_s))


def _both(one: Percentiles | None) -> str:
    return f"{milliseconds(one.p50)} / {milliseconds(one.p95)}" if one else DASH


def notes_of(served: Served) -> list[str]:
    """Return which servers they are, and what went wrong, a sentence each."""
    notes = [f"{one.url} is {one.engine} and serves {one.model}." for one in served.servers]
    if served.injected:
        notes.append(
            "Acceptance was injected: the texts are worth nothing, and the times are those of a head that accepts so much."
        )
    for level in served.levels:
        for server, side in zip(served.servers, level.sides, strict=True):
            where = f"{server.url}, {level.concurrency} at once:"
            if side.unfinished:
                notes.append(
                    f"{where} {side.unfinished} of {side.asked} requests were not answered when the time was up."
                )
            for why, count in Counter(failure.why for failure in side.failures).most_common(3):
                first = next(failure.prompt for failure in side.failures if failure.why == why)
                notes.append(f"{where} {count} of {side.asked} requests failed, {first} first: {why}")
    return notes
