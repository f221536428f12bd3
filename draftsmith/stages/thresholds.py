"""--fail-under at the command line: names are checked before work starts, numbers after everything is written."""

import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.eval.drafters.contender import Contender
from draftsmith.eval.measure.gate import Threshold, check_names, check_results
from draftsmith.eval.measure.result import read_result
from draftsmith.stages.evaluation import evaluation_conversations
from draftsmith.stages.session import Session

MISSED = 3
"""Exit code where a number is below its threshold."""


def check_thresholds(
    session: Session, thresholds: Sequence[Threshold], lineup: Sequence[Contender], *, decode: bool
) -> None:
    """Refuse, before anything is decoded, thresholds on what the recipe does not measure, or not without decoding."""
    drafters = [c.name for c in lineup if decode or c.simulate is not None]
    for threshold in thresholds:
        if threshold.drafter is not None and threshold.drafter in {c.name for c in lineup} - set(drafters):
            raise UserError(
                f"--fail-under {threshold.text}: {threshold.drafter} cannot be simulated, so --no-decode leaves it out; name "
                "another drafter, or drop --no-decode."
            )
    if thresholds:
        slices = list(dict.fromkeys(c.slice for c in evaluation_conversations(session)))
        temperatures = session.recipe.evaluate.temperatures
        check_names(thresholds, slices=slices, temperatures=temperatures, drafters=drafters, decode=decode)


def gate(paths: Sequence[Path], thresholds: Sequence[Threshold]) -> int:
    """Hold written results against the thresholds: a line on stderr for each one missed, and the exit code."""
    checks = check_results({str(path): read_result(path) for path in paths}, thresholds)
    missed = [check for check in checks if not check.passed]
    for check in missed:
        print(f"draftsmith: {check.message}", file=sys.stderr)
    if checks and not missed:
        print(f"gate: passed (checks: {len(checks)})", file=sys.stderr)
    return MISSED if missed else 0
