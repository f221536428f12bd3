"""What lets CI fail: --fail-under and --junit of run, evaluate and report, and compare's results and --fail-if-worse."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.cli.boundary import tell
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.gate.gate import JUNIT_MARK, Threshold, check_names, check_results, parse_thresholds, to_junit
from draftsmith.eval.results.result import Result, read_result
from draftsmith.stages.evaluation import conversations_of
from draftsmith.stages.session import Session
from draftsmith.storage import check_file, write_text

MISSED = 3
"""Exit code where a number is below its threshold, or worse than it was."""


@dataclass(frozen=True)
class Gate:
    """Thresholds that results must reach. junit: the file that the checks are written to as well, None for no file."""

    thresholds: Sequence[Threshold]
    junit: Path | None

    @property
    def words(self) -> list[str]:
        """The thresholds as options again, for a process that checks their names."""
        return [word for threshold in self.thresholds for word in ("--fail-under", threshold.text)]

    def judge(self, paths: Sequence[Path]) -> int:
        """Compare written results with the thresholds: print a line for each one missed, return the exit code."""
        checks = check_results({str(path): read_result(path) for path in paths}, self.thresholds)
        if self.junit is not None:
            write_text(self.junit, to_junit(checks))
        missed = [check for check in checks if not check.passed]
        for check in missed:
            tell(check.message)
        if checks and not missed:
            print(f"gate: passed (checks: {len(checks)})", file=sys.stderr)
        return MISSED if missed else 0

    def check_names(self, session: Session, drafters: Sequence[SystemUnderTest], *, decode: bool) -> None:
        """Refuse thresholds on what the recipe does not measure, or does not measure without decoding."""
        measured = [c.name for c in drafters if decode or c.simulate is not None]
        for threshold in self.thresholds:
            if threshold.drafter is not None and threshold.drafter in {c.name for c in drafters} - set(measured):
                raise UserError(
                    f"--fail-under {threshold.text}: {threshold.drafter} cannot be simulated, so --no-decode leaves it out; name "
                    "another drafter, or drop --no-decode."
                )
        if self.thresholds:
            slices = Counter(c.slice for c in conversations_of(session))
            spec = session.recipe.evaluate
            check_names(
                self.thresholds,
                slices=slices,
                temperatures=spec.temperatures,
                drafters=measured,
                decode=decode,
                repeats=spec.repeats,
            )


def read_gate(own: Namespace) -> Gate:
    """Return the gate that the options of a command ask for. Raises UserError for thresholds that are none, and for a file that
    cannot be written or that nothing would be written to."""
    thresholds = parse_thresholds(own.fail_under)
    if own.junit is not None:
        if not thresholds:
            raise UserError(f"--junit {own.junit} holds the checks of --fail-under: give a threshold, or leave it out.")
        check_file("--junit", own.junit, (".xml",), JUNIT_MARK)
    return Gate(thresholds, own.junit)


def result_pairs(old: Path, new: Path) -> tuple[list[tuple[tuple[Path, Result], tuple[Path, Result]]], list[str]]:
    """Return the results of two places that belong together, by temperature where one has several, and which are left out, in words.

    A place is a result.json, its folder, an evaluation with a folder for each temperature, or a run's directory. Raises UserError where
    one holds no result, or both none of the same temperature.
    """
    sides = [[(path, read_result(path)) for path in _result_files(place)] for place in (old, new)]
    if len(sides[0]) == len(sides[1]) == 1:
        return [(sides[0][0], sides[1][0])], []
    heats = [{result.settings.temperature: (path, result) for path, result in side} for side in sides]
    for place, side, heat in zip((old, new), sides, heats, strict=True):
        if len(heat) < len(side):
            raise UserError(f"{place} holds several results of one temperature: name the result.json of one.")
    listed = [", ".join(f"{t:g}" for t in sorted(heat)) for heat in heats]
    if not (both := sorted(heats[0].keys() & heats[1].keys())):
        raise UserError(
            f"{old} and {new} hold results of no temperature in common ({listed[0]} and {listed[1]}): evaluate both with the same "
            "evaluate.temperatures."
        )
    alone = [(place, sorted(heat.keys() - set(both))) for place, heat in zip((old, new), heats, strict=True)]
    notes = [f"not compared, in {at} alone: temperature {', '.join(f'{t:g}' for t in ts)}" for at, ts in alone if ts]
    return [(heats[0][t], heats[1][t]) for t in both], notes


def _result_files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    for pattern in ("result.json", "*/result.json"):
        if paths := sorted(place.glob(pattern)):
            return paths
    decoded, simulated = (sorted(place.glob(f"{name}/*/result.json")) for name in ("evaluation", "simulation"))
    if decoded and simulated:
        dates = [max(read_result(path).date for path in paths) for paths in (decoded, simulated)]
        if dates[0] < dates[1]:
            raise UserError(
                f"{place} holds a simulation of {dates[1]} and an evaluation of {dates[0]}: name the folder of the one to compare, "
                f"{place / 'simulation'} or {place / 'evaluation'}."
            )
    if paths := decoded or simulated:
        return paths
    raise UserError(
        f"There is no result.json in {place}: name a result.json, an evaluation's folder, or the directory of a run that was evaluated."
    )
