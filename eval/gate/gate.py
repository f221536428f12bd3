"""Check result.json against thresholds, for CI after a new target or a new head, and write the checks as JUnit XML.

    draftsmith evaluate --recipe R --fail-under tau=2.5,code.tau.low=2.4
    draftsmith report RESULT.json --fail-under "eagle3:code.tau@T0=3"

A threshold is [DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER: without a drafter for every drafter, without @T for every
sampling setting, without a slice for the sum over all. `.low` is the lower end of the metric's interval; of a metric where less is
better it is `.high`, and NUMBER is what must not be exceeded. A threshold that names nothing, that nothing measured, or that nothing
could miss is refused: a gate must never pass because it looked at nothing.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree import ElementTree

from draftsmith.errors import UserError
from draftsmith.eval.results.intervals import FEWEST_PROMPTS
from draftsmith.eval.results.metrics import METRICS, Metric
from draftsmith.eval.results.result import OVERALL, Measures, Result

_METRICS = {
    name: (metric, value)
    for metric in METRICS
    if metric.bounds is not None
    for name, value in (
        (metric.name, metric.value),
        *([(f"{metric.name}.{metric.worse}", metric.worse_end)] if metric.has_ends else ()),
    )
}
"""What can have a threshold: its row, and how it is read from `Measures`."""
_FORM = "[DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER, such as tau=2.5 or eagle3:code.tau.low@T0=3"
# A slice may hold dots, a drafter anything.
_THRESHOLD = re.compile(
    r"(?=.+=)(?:(?P<drafter>.*):)?"
    rf"(?P<path>(?:(?P<slice>[^:]*)\.)?(?P<metric>{'|'.join(map(re.escape, _METRICS))})|[^:]*?)"
    r"(?:@[tT]=?(?P<temperature>\d+(?:\.\d+)?))?\s*=(?P<number>[^=]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Threshold:
    """One threshold. drafter, temperature: None = all of them. metric: a key of the metrics, `.low` included.
    limit: the least that passes, or the most where less is better. text: as it was typed, for messages."""

    metric: str
    limit: float
    slice: str = OVERALL
    drafter: str | None = None
    temperature: float | None = None
    text: str = ""

    @property
    def name(self) -> str:
        """The slice and the metric, as typed: `code.tau.low`."""
        return self.metric if self.slice == OVERALL else f"{self.slice}.{self.metric}"

    @property
    def row(self) -> Metric:
        """What is known of the metric."""
        return _METRICS[self.metric][0]

    @property
    def is_end(self) -> bool:
        """Whether it is the end of an interval, over prompts or, of what is timed, over repeats."""
        return self.metric != self.row.name


@dataclass(frozen=True)
class ThresholdCheck:
    """A threshold compared with one drafter at one sampling setting. source: the name of its result."""

    threshold: Threshold
    drafter: str
    temperature: float
    setting: str
    source: str
    measured: float

    @property
    def passed(self) -> bool:
        """Whether the measured value reaches the threshold."""
        return self.threshold.row.sign * (self.measured - self.threshold.limit) >= 0

    @property
    def message(self) -> str:
        """One sentence: system and setting, metric, measured value, threshold."""
        passed, missed = ("reaches", "is below") if self.threshold.row.sign > 0 else ("keeps to", "is above")
        return (
            f"{self.drafter} at {self.setting}: {self.threshold.name} {self.measured:.4g} "
            f"{passed if self.passed else missed} the threshold {self.threshold.limit:g} ({self.source})."
        )


def parse_thresholds(texts: Sequence[str]) -> list[Threshold]:
    """Parse the values of --fail-under, each a comma-separated list. Raises UserError for what is no threshold."""
    return [_parse(part) for text in texts for part in _split(text)]


def check_names(
    thresholds: Sequence[Threshold],
    *,
    slices: Mapping[str, int],
    temperatures: Collection[float],
    drafters: Collection[str],
    decode: bool = True,
    repeats: int = 2,
) -> None:
    """Refuse, before any work, thresholds that an evaluation of these slices, temperatures and drafters cannot meet.

    slices: their numbers of prompts. decode: False where nothing will be decoded, only simulated. repeats: times that everything is timed.
    """
    for threshold in thresholds:
        if not decode and threshold.row.decoded:
            raise UserError(
                f"--fail-under {threshold.text}: {threshold.metric} needs decoding, which --no-decode leaves out; use "
                "tau_simulated (or tau_simulated.low), or drop --no-decode."
            )
        _expect(threshold, "slice", threshold.slice, [OVERALL, *slices])
        count = sum(slices.values()) if threshold.slice == OVERALL else slices[threshold.slice]
        if threshold.is_end and count < FEWEST_PROMPTS:
            raise UserError(
                f"--fail-under {threshold.text}: {threshold.slice} has {count} prompts, and there is no interval over fewer than "
                f"{FEWEST_PROMPTS}: give more, or leave .{threshold.row.worse} out."
            )
        if threshold.is_end and threshold.row.timed and repeats < 2:
            raise UserError(
                f"--fail-under {threshold.text}: evaluate.repeats is 1, and what is timed once has no interval: set it to 2 or more, or leave "
                f".{threshold.row.worse} out."
            )
        _expect(threshold, "temperature", threshold.temperature, temperatures)
        _expect(threshold, "drafter", threshold.drafter, drafters)


def refuse_served(results: Mapping[str, Result]) -> None:
    """Raise UserError for a result of running servers, whose drafters are those of the evaluation that it was compared with.

    results: by the name that messages give them, such as their file."""
    if served := next((source for source, result in results.items() if result.served is not None), None):
        raise UserError(
            f"{served} is of running servers, and its drafters are those of the evaluation that --report named: give that evaluation's "
            "result.json, as no threshold or comparison looks at servers."
        )


def check_results(results: Mapping[str, Result], thresholds: Sequence[Threshold]) -> list[ThresholdCheck]:
    """Compare every threshold with every drafter and setting that it applies to; at least one check each.

    results: by the name that messages give them, such as their file. Raises UserError for a threshold that names a
    drafter, a slice or a temperature that is not there, and for a number that was not measured.
    """
    checks = []
    if thresholds:
        refuse_served(results)
    for threshold in thresholds:
        _expect(threshold, "temperature", threshold.temperature, [r.settings.temperature for r in results.values()])
        names = [
            (source, name)
            for source, result in results.items()
            for name in result.drafters
            if threshold.temperature in (None, result.settings.temperature)
        ]
        _expect(threshold, "drafter", threshold.drafter, [name for _, name in names])
        systems = [(source, name) for source, name in names if threshold.drafter in (None, name)]
        if not systems:
            raise UserError(f"--fail-under {threshold.text}: the results hold no drafter to check; evaluate one first.")
        for source, drafter in systems:
            result = results[source]
            system = result.drafters[drafter]
            _expect(threshold, "slice", threshold.slice, [OVERALL, *system.slices], f" for {drafter} in {source}")
            measures = system.at(threshold.slice)
            assert measures is not None
            measured = _METRICS[threshold.metric][1](measures)
            few = result.settings.repeats < 2 or measures.prompts < FEWEST_PROMPTS
            if threshold.is_end and threshold.row.timed and few:
                measured = None
            if measured is None or not math.isfinite(measured):
                raise UserError(
                    f"--fail-under {threshold.text}: {threshold.name} was not measured for {drafter} at "
                    f"{_setting(result)} ({source}){_instead(threshold, measures)}."
                )
            heat, setting = result.settings.temperature, _setting(result)
            checks.append(ThresholdCheck(threshold, drafter, heat, setting, source, measured))
    return checks


def _split(text: str) -> list[str]:
    """Split at commas, but for those in a drafter's name, which a colon ends."""
    parts: list[str] = []
    waiting: list[str] = []
    for piece in text.split(","):
        waiting.append(piece)
        if "=" in piece:
            parts += [",".join(waiting)] if ":" in piece and all(waiting) else waiting
            waiting = []
    return [part.strip() for part in parts + waiting]


def _parse(text: str) -> Threshold:
    match = _THRESHOLD.fullmatch(text)
    if match is None:
        raise UserError(f"--fail-under {text!r} is no threshold: write {_FORM}.")
    drafter, path, slice_name, metric, temperature, number = match.groups()
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise UserError(f"--fail-under {text}: {number.strip()!r} is not a number; write {_FORM}.")
    if metric is None:
        raise UserError(
            f"--fail-under {text}: {path!r} ends in no metric that has a threshold; they are {', '.join(_METRICS)}."
        )
    row = _METRICS[metric][0]
    # A limit at the bad end is missed by nothing, one beyond the good end is reached by nothing.
    bad, good = sorted(row.bounds or (-math.inf, math.inf), reverse=row.sign < 0)
    missed = row.sign * (limit - bad) <= 0
    if missed or row.sign * (limit - good) > 0:
        raise UserError(
            f"--fail-under {text}: nothing could {'miss' if missed else 'reach'} it, as {metric} is never "
            f"{'below' if missed == (row.sign > 0) else 'above'} {bad if missed else good:g}; choose another number."
        )
    heat = None if temperature is None else float(temperature)
    return Threshold(metric, limit, slice_name or OVERALL, drafter or None, heat, text)


def _expect(
    threshold: Threshold, what: str, wanted: str | float | None, known: Collection[str | float], where: str = ""
) -> None:
    """Raise UserError where what a threshold is narrowed down to, if it is, is not among the known ones."""
    if wanted is None:
        return
    name, *names = (x if isinstance(x, str) else f"{x:g}" for x in (wanted, *dict.fromkeys(known)))
    if name not in names:
        raise UserError(
            f"--fail-under {threshold.text}: there is no {what} {name}{where}; there {'is' if len(names) == 1 else 'are'} "
            f"{', '.join(names) or 'none'}."
        )


def _setting(result: Result) -> str:
    settings = result.settings
    parts = [f"T={settings.temperature:g}"]
    parts += [f"top_k={settings.top_k}"] if settings.top_k is not None else []
    parts += [f"top_p={settings.top_p:g}"] if settings.top_p is not None else []
    parts += [f"batch {settings.batch}"] if settings.batch > 1 else []
    return ", ".join(parts)


def _instead(threshold: Threshold, measures: Measures) -> str:
    if threshold.metric in ("tau", "tau.low") and measures.tau is None and measures.tau_simulated is not None:
        return ": it was only simulated, so use tau_simulated"
    whole = threshold.row.value(measures)
    if threshold.is_end and whole is not None:
        more = ("two repeats and ", "", ", more often") if threshold.row.timed else ("", " with a round", "")
        return (
            f": over {measures.prompts} prompts there is no interval (it takes {more[0]}{FEWEST_PROMPTS}{more[1]}), so leave .{threshold.row.worse} out, or "
            f"evaluate more prompts{more[2]}"
        )
    if threshold.metric.startswith("tau_simulated") and measures.tau is not None:
        return ": it was only decoded, so use tau, or name the drafters that have it"
    return ": leave the threshold out, or name the drafters and settings that have it"


# Outside the characters of XML 1.0 (its production 2), which cannot be escaped either.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

JUNIT_MARK = '<testsuites name="draftsmith"'
"""How a text of ours is known."""


def to_junit(checks: Sequence[ThresholdCheck]) -> str:
    """Return the checks as JUnit XML: a suite per result, in it a case per threshold and drafter, named as a threshold is
    written. No times, so that the same checks give the same text."""
    root = ElementTree.Element("testsuites", _counts("draftsmith", checks))
    for source, group in groupby(sorted(checks, key=lambda check: check.source), key=lambda check: check.source):
        cases = list(group)
        suite = ElementTree.SubElement(root, "testsuite", _counts(source, cases))
        for check in cases:
            name = _clean(f"{check.threshold.name}@T{check.temperature:g}")
            case = ElementTree.SubElement(suite, "testcase", classname=_clean(check.drafter), name=name)
            if not check.passed:
                message = _clean(check.message)
                ElementTree.SubElement(case, "failure", {"type": "threshold", "message": message}).text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counts(name: str, checks: Sequence[ThresholdCheck]) -> dict[str, str]:
    failures = sum(not check.passed for check in checks)
    counts = {"tests": len(checks), "failures": failures, "errors": 0, "skipped": 0}
    return {"name": _clean(name), **{key: str(value) for key, value in counts.items()}}


def _clean(text: str) -> str:
    """Leave out the characters that no XML file can hold."""
    return _NOT_XML.sub("", text)
