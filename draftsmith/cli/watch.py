"""`draftsmith watch`: follows what a server accepts, and says when acceptance fell or rose, for which slice, and which requests did it."""

import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pkgutil import resolve_name
from typing import Any

from draftsmith.cli.boundary import put
from draftsmith.cli.ledger import read_measures
from draftsmith.errors import UserError, first_line
from draftsmith.eval.results.result import Measures, Result
from draftsmith.eval.watch.follow import ALL, Event, FileSource, Position, ServerSource, Source
from draftsmith.eval.watch.keep import Keeper, Redact
from draftsmith.eval.watch.sequential import FALL, HIGH, LARGEST, LOW, WITHIN, Watched, limit, share_of
from draftsmith.fields import LATER
from draftsmith.foreign.records import read_current
from draftsmith.foreign.server import ModelServer, ServerError
from draftsmith.foreign.text import read_json
from draftsmith.progress import Bar, say
from draftsmith.storage import check_file, claim, write_json, write_text

CODES = {LOW: 3, HIGH: 4}
"""Exit codes of an alarm."""
_FIRST, _FIRST_INTERVALS = 1000, 250
"""Observations of the smallest baseline: answers, and intervals of counters, which vary less."""
_MOST_SLICES = 50
_MARK = "draftsmith_watch_"


@dataclass
class State:
    """What a watch knows, in its file. source: what it follows. asked: options that a watch keeps, as clock and baseline are theirs."""

    source: str
    position: Position = field(default_factory=Position)
    slices: dict[str, Watched] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict, metadata=LATER)
    schema_version: int = 1


def watch(own: Namespace, words: list[str]) -> int:
    """Follow a server or a file until an alarm, so many requests, or the end of the file; return the exit code."""
    _check(own, words)
    result = own.report and read_measures(own.report, own.drafter)
    with closing(claim(own.state.parent / f".{own.state.name}.lock", elsewhere="--state")):
        again = "name another file with --state, or remove it to begin anew"
        state = read_current(State, read_json(own.state, again), str(own.state), again) if own.state.exists() else None
        if own.records is not None:
            source: Source = FileSource(own.records, own.tag, own.per_day, whole=own.once)
        else:
            server = ModelServer(own.url, "--url")
            if names := [own.model] if own.model else [result[2].target.path] if result else []:
                server.find_model(names, "say with --model how the server calls it")
            source = ServerSource(server)
        asked = {"per_day": own.per_day, "baseline": own.baseline, "tag": own.tag if own.records is not None else None}
        if state is None:
            state = State(source.name, asked=asked)
        elif state.source != source.name:
            raise UserError(
                f"{own.state} is about {state.source}, not {source.name}: name another file with --state, or remove it to begin anew."
            )
        elif changed := next((key for key, value in state.asked.items() if asked.get(key, value) != value), None):
            raise UserError(
                f"--{changed.replace('_', '-')} is {asked[changed]}, but {own.state} was begun with {state.asked[changed]}: give the same, {again}."
            )
        source.position = state.position
        keeper = _keeper(own)
        with Bar(total=own.requests, desc="watch", unit="request") as bar:
            code = _follow(own, source, state, keeper, result, bar)
    for name, one in state.slices.items():
        put(_summary(name, one))
    return code


def _check(own: Namespace, words: list[str]) -> None:
    if words:
        raise UserError(
            f"watch takes options alone, but not {words[0]}: name the server with --url, or a file with --records."
        )
    if (own.url is None) == (own.records is None):
        raise UserError(
            "watch follows either a server (--url http://HOST:PORT) or a file of answers or a log (--records FILE): give one of them."
        )
    for needed, given, wrong in (
        ("--report", own.report, own.drafter and "--drafter"),
        ("--keep", own.keep, own.redact and "--redact"),
        ("--records", own.records, (own.per_day and "--per-day") or (own.once and "--once") or (own.keep and "--keep")),
        ("--url", own.url, own.model and "--model"),
    ):
        if wrong and given is None:
            raise UserError(f"{wrong} says something of {needed}, which is not there: give both, or leave it out.")
    if own.baseline is not None and own.baseline < 100:
        raise UserError(f"--baseline is {own.baseline}, too few to know acceptance by: give at least 100.")
    check_file("--state", own.state, (".json",), r'"source"')
    if own.prometheus is not None:
        check_file("--prometheus", own.prometheus, (".prom",), _MARK)


def _keeper(own: Namespace) -> Keeper | None:
    """Return what keeps requests, None where nothing was asked to."""
    if own.keep is None:
        return None
    hook: Redact | None = None
    if own.redact is not None:
        sys.path.insert(0, "")  # the user's own module, in the folder that this is called in
        try:
            hook = resolve_name(own.redact)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"--redact is {own.redact}, which is not there ({first_line(error)}): name a function as MODULE:FUNCTION, of a module that "
                "is installed or stands in this folder."
            ) from error
        if not callable(hook):
            raise UserError(
                f"--redact is {own.redact}, which cannot be called: name a function that takes and returns a text."
            )
    return Keeper(own.keep, own.keep_limit, own.keep_days, hook, lambda: time.time() / 86400)


def _follow(
    own: Namespace,
    source: Source,
    state: State,
    keeper: Keeper | None,
    result: "tuple[str, Measures, Result] | None",
    bar: Bar,
) -> int:
    """Read again and again. The state is written when all that was read is taken, so that nothing is taken twice or lost."""
    bar.skip(int(_requests(state)))
    begun = False
    while True:
        try:
            events = source.read()
        except ServerError as error:
            if not begun or not error.again:
                raise
            say(f"warning: {first_line(error)}; --url is asked again every {own.every:g} seconds.")
            events = []
        begun = True
        by_slice: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            by_slice[event.slice].append(event)
        for name, some in by_slice.items():
            _take(own, state, name, some, result)
        state.position = source.position
        bar.update(int(_requests(state)) - bar.n)
        if keeper is not None:
            keeper.add(by_slice, {name: one.baseline.tau for name, one in state.slices.items() if one.baseline})
        write_json(own.state, asdict(state))
        if own.prometheus is not None:
            write_text(own.prometheus, prometheus(state.slices))
        code = min((CODES[one.alarm] for one in state.slices.values() if one.alarm is not None), default=0)
        enough = own.requests is not None and _requests(state) >= own.requests
        nothing_waits = isinstance(source, ServerSource) or (source.ended and not events)
        if (code and not own.go_on) or (own.once and nothing_waits) or enough:
            return code
        if nothing_waits:
            time.sleep(own.every)


def _requests(state: State) -> float:
    """Return the requests so far; where they are not known, the intervals."""
    return sum(one.told for one in state.slices.values())


def _take(
    own: Namespace, state: State, name: str, events: list[Event], result: "tuple[str, Measures, Result] | None"
) -> None:
    """Give a slice its observations, and say what they changed."""
    if name not in state.slices:
        if len(state.slices) == _MOST_SLICES:
            raise UserError(
                f"{state.source} has more than {_MOST_SLICES} slices by {own.tag!r}: name a key with few values by --tag."
            )
        size = own.baseline or (_FIRST_INTERVALS if events[0].seen.interval else _FIRST)
        largest = size if own.baseline else size * LARGEST
        state.slices[name] = Watched(share_of(len(state.slices)), size, largest)
    one = state.slices[name]
    was = one.alarm
    try:
        learned = one.take([event.seen for event in events])
    except ValueError as error:
        raise UserError(
            f"{state.source}: {error} while the baseline of {name} came, so a rate of false alarms has no meaning: give --per-day in place "
            "of these times."
        ) from error
    if learned:
        assert one.baseline is not None
        base = one.baseline
        if base.low.within <= 0:
            sees = f"a fall of {FALL:.0%} may never be seen: the first requests differ too much, so give more of them with --baseline"
        else:
            within = one.in_requests(base.low.within)
            units = "intervals" if one.requests is None else "requests"
            sees = f"a fall of {FALL:.0%} is seen within about {within:,.0f} {units}"
            if within > WITHIN and base.low.within > 100:
                sees += f", later than {WITHIN:,}: --baseline with more requests, or tags of slices, make that faster"
        say(
            f"{name}: the first {base.observations:,} {'intervals' if one.requests != one.observations else 'requests'} have tau {one.baseline_tau:.3f}, known "
            f"to {base.tau - base.low.tau:.3f}; {sees}.",
            kept=True,
        )
        if warning := _beside(name, one, result):
            say(f"warning: {warning}")
    if one.alarm is not None and was is None and own.go_on:
        say(_alarm(name, one), kept=True)


def _beside(name: str, one: Watched, result: "tuple[str, Measures, Result] | None") -> str:
    """Say where the report's interval leaves out the baseline's tau. That interval misses its own mean one time in twenty."""
    if result is None or one.baseline is None:
        return ""
    drafter, overall, whole = result
    draft = whole.drafters[drafter].draft
    most = (whole.settings.num_speculative_tokens if draft is None else draft.num_speculative_tokens) + 1
    if one.baseline_tau > 0.95 * most:
        return (
            f"{name}: nearly every drafted token of the first requests was accepted (tau {one.baseline_tau:.3f} of at most {most}): look "
            "whether their answers are loops, which later ones would be held against."
        )
    measures = overall if name == ALL else whole.drafters[drafter].slices.get(name)
    if measures is None:
        return f"the report has no slice {name} of {drafter} to hold the first requests against."
    interval = measures.tau_interval or measures.tau_simulated_interval
    if interval is None or interval[0] <= one.baseline_tau <= interval[1]:
        return ""
    return (
        f"{name}: tau of the first requests is {one.baseline_tau:.3f}, outside the report's {interval[0]:.3f} to {interval[1]:.3f} of {drafter}: "
        "other traffic, sampling or settings than were measured, or the report's one miss in twenty."
    )


def _alarm(name: str, one: Watched) -> str:
    """Say what happened and what to do."""
    assert one.baseline is not None
    assert one.alarm is not None
    side = one.sides[one.alarm]
    tau = side.tokens / side.rounds
    of = f"{name}: acceptance {'fell' if one.alarm == LOW else 'rose'}, tau {tau:.3f} after {one.baseline_tau:.3f}"
    unit = "interval" if one.requests != one.observations else "request"
    when = f"since {unit} {side.since + 1:,}, seen at {one.alarmed:,}"
    todo = (
        "too low, so train the head on prompts like the newest ones"
        if one.alarm == LOW
        else "too high for one text of many: look for loops, garbled or repeated answers, or traffic that became easier"
    )
    named = [seen.name for seen in side.worst if seen.name]
    return f"ALARM {of}, {when}; {todo}{'; most by ' + ', '.join(named) if named else ''}."


def _summary(name: str, one: Watched) -> str:
    tau = f"tau {one.tokens / one.rounds:.3f}" if one.rounds else "no round"
    if one.baseline is None:
        state = f"the baseline has {len(one.learning):,} of {one.size:,}"
    elif one.alarm is None:
        state = f"no alarm against {one.baseline_tau:.3f}"
    else:
        return _alarm(name, one)
    known = f"{one.observations:,} intervals" if one.requests is None else f"{one.requests:,.0f} requests"
    return f"{name}: {known}, {tau}, {state}"


def prometheus(slices: dict[str, Watched]) -> str:
    """Return the state of slices in Prometheus' text format, for node_exporter's textfile collector."""
    written = ""
    for key, kind, text, values in _METRICS:
        written += f"# HELP draftsmith_watch_{key} {text}\n# TYPE draftsmith_watch_{key} {kind}\n"
        for name, one in slices.items():
            label = name.replace("\\", r"\\").replace('"', r"\"")
            for more, value in values(one).items():
                written += f'draftsmith_watch_{key}{{slice="{label}"{more}}} {value:.10g}\n'
    return written


_METRICS: tuple[tuple[str, str, str, Callable[[Watched], dict[str, float]]], ...] = (
    ("requests_total", "counter", "Requests, or intervals where a log tells no requests.", lambda one: {"": one.told}),
    ("rounds_total", "counter", "Target passes over a draft.", lambda one: {"": one.rounds}),
    ("tokens_total", "counter", "Tokens of these rounds, bonus tokens included.", lambda one: {"": one.tokens}),
    (
        "baseline_tau",
        "gauge",
        "Tokens of a round in the first requests.",
        lambda one: {"": one.baseline_tau} if one.baseline else {},
    ),
    (
        "evidence",
        "gauge",
        "Evidence of a change as a share of that of an alarm, by direction.",
        lambda one: {
            f',direction="{side}"': sum(of.evidence) / len(of.evidence) / limit(one.share)
            for side, of in one.sides.items()
        },
    ),
    (
        "alarm",
        "gauge",
        "1 where acceptance has changed, by direction.",
        lambda one: {f',direction="{side}"': float(one.alarm == side) for side in one.sides},
    ),
)
