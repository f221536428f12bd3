"""What an evaluation decides: the costs of this machine, the plan that follows from them, and the lines that engines take."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from draftsmith.decoder.cache import entry_bytes, layer_shapes
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import CostTable, read_cost_table, write_cost_table
from draftsmith.eval.clocks.costs import measure_table
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.planner.decision import (
    Decision,
    Export,
    decision_json,
    doubts_of,
    make_decision,
    remove_decision,
    write_settings,
)
from draftsmith.eval.planner.verdict import QUIET
from draftsmith.eval.results.result import Result, TargetInfo
from draftsmith.eval.training.history import History
from draftsmith.heads.formats.engines import Again
from draftsmith.machine import command_line, environment
from draftsmith.progress import say
from draftsmith.recipe.evaluate import EvaluateSpec
from draftsmith.recipe.schema import ExportSpec
from draftsmith.stages.drafters import at_temperature
from draftsmith.stages.evaluator import Evaluation
from draftsmith.stages.prompts import Prompts
from draftsmith.stages.run import RunDirectory
from draftsmith.storage import write_json
from draftsmith.target.target import Target

COSTS = "costs.json"
Read = TypeVar("Read")


def contexts_of(
    spec: EvaluateSpec, prompts: Prompts, context_length: int, behind: int, what: str = "a draft"
) -> list[int]:
    """Return the contexts to time at: those of the recipe, else the shortest prompt, the middle of a typical answer, and the
    longest text. behind: tokens that come after one, and `what` they are."""
    longest = context_length - behind - 1
    if spec.plan_contexts:
        if over := [n for n in spec.plan_contexts if n > longest]:
            raise UserError(
                f"evaluate.plan_contexts holds {over[0]}, but the target's context leaves {longest} after {what}: take fewer."
            )
        return sorted(set(spec.plan_contexts))
    typical = len(prompts.median.prompt_ids) + prompts.median.max_new_tokens // 2
    contexts = (min(len(r.prompt_ids) for r in prompts.requests), typical, prompts.longest_text)
    return sorted({max(2, min(length, longest)) for length in contexts})


def _samplings(spec: EvaluateSpec) -> list[Sampling]:
    """Return the settings that costs are timed at: temperature 0 where the recipe has it, and the first above it."""
    greedy, above = (next((t for t in spec.temperatures if (t > 0) is warm), None) for warm in (False, True))
    return [spec.sampling(t) for t in (greedy, above) if t is not None]


def _grid(evaluation: Evaluation) -> tuple[list[SystemUnderTest], set[tuple[int, int]]]:
    """Return what a table of costs is to hold: drafters, and places (batch, context)."""
    spec, prompts = evaluation.recipe.evaluate, evaluation.prompts
    drafters = at_temperature(evaluation.drafters, _samplings(spec)[0])
    systems = [c for c in drafters if c.fixed_length]
    deepest = max([spec.max_k, *(c.nodes(c.max_k) for c in systems)])
    contexts = contexts_of(spec, prompts, evaluation.target.context_length, deepest)
    return systems, set(product({*spec.plan_batches, spec.batch}, contexts))


def has_costs(evaluation: Evaluation, path: Path, run: RunDirectory, warn: Callable[[str], None]) -> bool:
    """Return whether the table of a finished evaluation, of whatever machine, holds all that the recipe plans for; what it holds
    besides is taken out then."""
    places, table = _grid(evaluation)[1], read_whole(read_cost_table, path, warn)
    if table is None or table.lacks(places) or not _of_temperatures(table, evaluation.recipe.evaluate):
        return False
    _trim(table, places, path, run)
    return True


def costs_of_run(evaluation: Evaluation, path: Path, run: RunDirectory, warn: Callable[[str], None]) -> CostTable:
    """Return the costs that an evaluation plans with, in `path` too: what an earlier one left there is measured again where it is of
    another machine, or of other packages, and what it lacks is added."""
    table, target, (systems, places) = read_whole(read_cost_table, path, warn), evaluation.target, _grid(evaluation)
    if table is None:
        return measure_and_keep(evaluation, path)
    machine, names = environment(), [c.name for c in systems]
    read = target.weight_bytes // target.shares
    asked = (target.fingerprint, target.dtype_name, read, machine["hardware"], machine["versions"], names)
    others = [c.name for c in systems if c.name in table.drafts and c.info.unlike(table.drafts[c.name])]
    of, where = (table.target.fingerprint, table.dtype, table.weights_bytes), (table.hardware, table.versions)
    warm = _of_temperatures(table, evaluation.recipe.evaluate)
    if target.agreed(lambda: bool(others) or not warm or asked != (*of, *where, table.drafters)):
        what = "another machine, of other packages, temperatures or drafters"
        say(f"costs: {path} is of {what}, and is measured again")
        return measure_and_keep(evaluation, path)
    if table.lacks(places):
        return measure_and_keep(evaluation, path, table)
    target.agreed(lambda: _trim(table, places, path, run))
    return table.only(places)


def _of_temperatures(table: CostTable, spec: EvaluateSpec) -> bool:
    """Return whether a table holds costs at temperature 0 and above it, as far as the recipe has both."""
    return {t > 0 for t in spec.temperatures} <= {t > 0 for t in table.temperatures}


def read_whole(read: Callable[[Path], Read], path: Path, warn: Callable[[str], None]) -> Read | None:
    """Return what a file of the evaluation holds, None where it is not there; a damaged one is said and measured again."""
    try:
        return read(path) if path.is_file() else None
    except UserError as error:
        warn(f"{path} is measured again, as it cannot be read: {error}")
        return None


def _trim(table: CostTable, places: set[tuple[int, int]], path: Path, run: RunDirectory) -> None:
    """Take out of the file of a table what is of none of `places`."""
    if (fewer := _not_empty(table.only(places))) != table:
        with run.writing():
            write_cost_table(path, fewer)


def _not_empty(table: CostTable) -> CostTable:
    """Raise UserError where nothing fitted."""
    if not table.points:
        raise UserError("Not even the smallest batch and context fit in memory: lower evaluate.plan_contexts.")
    return table


def measure_and_keep(evaluation: Evaluation, path: Path, kept: CostTable | None = None) -> CostTable:
    """Time target passes and drafts at the batches and contexts to plan for; write them to `path`, and say how near the target alone is to what the
    machine could do.

    kept: what is not timed again. Raises UserError where no batch and context fits in memory."""
    (systems, places), spec = _grid(evaluation), evaluation.recipe.evaluate
    table = measure_table(
        evaluation.target,
        evaluation.info,
        systems,
        evaluation.prompts.median.prompt_ids,
        _samplings(spec),
        places=places,
        command=command_line(),
        kept=kept,
    )
    _not_empty(table)
    evaluation.target.agreed(lambda: write_cost_table(path, table))
    for text in table.contradictions.values():
        say(
            f"warning: costs contradict each other: {text}, also when measured again: let nothing else run, remove {path} and run "
            "this command again"
        )
    if (share := table.share_of_bandwidth) is not None:
        say(
            f"costs: {path}; the target's own pass reaches {100 * share:.0f}% of the speed at which its weights could be read"
        )
    return table


def target_info(target: Target, named: str) -> TargetInfo:
    """Describe the target as results do. named: how the recipe names it."""
    return TargetInfo(
        path=named,
        fingerprint=target.fingerprint,
        parameters=sum(p.numel() for p in target.model.parameters()),
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        weight_bytes=target.weight_bytes,
        cache_bytes=entry_bytes(layer_shapes(target)) * target.shares,
    )


def plan_stage(
    results: Sequence[Result],
    table_path: Path | None,
    folder: Path,
    export: ExportSpec | None = None,
    price_per_hour: float | None = None,
    history: History | None = None,
    *,
    run: Path | None = None,
    again: Again | None = None,
    one_run: bool = True,
) -> Decision | None:
    """Decide from results and costs, and write plan.json, routing.json and settings/ into `folder`; None, and those of an earlier
    plan removed, where there is no table, or no draft of it was simulated. export: how the head is exported, None for as the results'
    recipe has it. history: of the head, which tells a weak head from one that still learns. run: the directory of the run that
    exports the head; again: how its commands are given. one_run: the results lie in one run's folder."""
    table = None if table_path is None else read_cost_table(table_path)
    if table is None or not table.drafters:
        remove_decision(folder)
        return None
    more = None if history is None else history.twice
    rising = None if history is None or more is None else more.tau - history.best.tau
    exported = None if export is None else Export.of(asdict(export))
    heldout = None if history is None else history.best.tau
    facts = {"price_per_hour": price_per_hour, "rising": rising, "heldout": heldout}
    decision = make_decision(results, table, str(table_path), export=exported, one_run=one_run, **facts)
    if decision is None:
        remove_decision(folder)
        return None
    settings, exports = (folder / "settings").absolute(), Path("export") if run is None else run.absolute() / "export"
    decision = replace(decision, exports=str(exports), settings=str(settings), again=again or Again())
    write_json(folder / "plan.json", decision_json(decision))
    write_json(folder / "routing.json", asdict(decision.served))
    write_settings(settings, decision)
    for name, drafter in results[0].drafters.items():
        draft, swept = drafter.draft, len(drafter.overall.k_sweep or ())
        if draft is not None and draft.tree is None and swept < (draft.engine_tokens or 0):
            say(
                f"warning: engines draft {draft.engine_tokens} tokens with {name}, the length of its block, whatever they are told: set "
                f"evaluate.max_k to {draft.engine_tokens}, so that the plan is of that; a plan of fewer starts none."
            )
    if doubts := doubts_of(results):
        say(f"warning: measured on a busy machine, do not quote: {'; '.join(doubts)}; evaluate again with {QUIET}")
    say(f"verdict: {decision.verdict.headline}")
    return decision
