"""Whether results are of one evaluation, so that one verdict can rest on them."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from draftsmith.errors import UserError, one_line
from draftsmith.eval.results.result import Result


def check_one_evaluation(results: Sequence[Result], *, one_run: bool = False) -> None:
    """Raise UserError where results are of several targets or dtypes, of several evaluations, or two of them of one temperature.

    one_run: they lie in the folder of one evaluation, which may have been called something else when the first of them was made.
    """
    kinds = {(r.target.fingerprint, r.settings.dtype) for r in results}
    if len(kinds) > 1:
        raise UserError("The results are of several targets or dtypes: plan for one at a time.")
    temperatures = [r.settings.temperature for r in results]
    if len(set(temperatures)) < len(temperatures):
        raise UserError("Two results are of the same temperature: plan for one evaluation at a time.")
    for what, values in _in_common(results, one_run=one_run):
        if len(unlike := list(dict.fromkeys(values))) > 1:
            raise UserError(
                f"The results are of several evaluations, as {what} {unlike[0]} and {unlike[1]}: plan for one evaluation at a time."
            )


def _in_common(results: Sequence[Result], *, one_run: bool) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield what the results of one evaluation share, in words before a value, and the value of each that holds it."""
    settings = [r.settings for r in results]
    yield "their prompts are", (s.prompts for s in settings if s.prompts is not None)
    yield "their batches are", (str(s.batch) for s in settings)
    for name in settings[0].filters:
        # At temperature 0 the others filter nothing.
        held = [s.filters[name] for s in settings if s.temperature > 0 or name == "repetition penalty"]
        yield f"their {name} is", ("off" if value is None else f"{value:g}" for value in held)
    if not one_run:
        yield "their runs are", (run for r in results if (run := _run_of(r)) is not None)


def _run_of(result: Result) -> str | None:
    """Return the folder of the run that a result's recipe names, None where it holds none."""
    recipe = result.recipe or {}
    name, folder = recipe.get("name"), recipe.get("output_dir")
    if isinstance(folder, str) and folder:
        return one_line(Path(os.path.normpath(folder)))
    return one_line(Path("runs", name)) if isinstance(name, str) else None
