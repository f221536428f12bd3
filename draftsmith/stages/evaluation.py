"""The stage that evaluates a trained head: decode or simulate its prompts, and write result.json and the reports."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import TABLE_MARK, write_cost_table
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.engines.server import TOKENS, MeasuredServer, measure_served
from draftsmith.eval.measure.texts import check_lossless
from draftsmith.eval.report.report import write_report
from draftsmith.eval.results.result import Lossless, Result, TargetInfo, read_result, write_result
from draftsmith.eval.training.history import read_history
from draftsmith.fields import fingerprint_fields
from draftsmith.foreign.records import Journal
from draftsmith.heads.record import tuned_from
from draftsmith.machine import command_line, environment
from draftsmith.progress import say
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.drafters import (
    at_temperature,
    drafter_digests,
    load_heads,
    select_drafters,
    with_records,
)
from draftsmith.stages.evaluator import Evaluation, decode_drafters, simulate_drafters
from draftsmith.stages.planning import (
    COSTS,
    contexts_of,
    costs_of_run,
    has_costs,
    measure_and_keep,
    plan_stage,
    read_whole,
    target_info,
)
from draftsmith.stages.prompts import Prompts, make_prompts, read_conversations
from draftsmith.stages.session import Session, team
from draftsmith.storage import check_file, fingerprint
from draftsmith.target.folder import fingerprint_directory
from draftsmith.target.identity import TargetIdentity
from draftsmith.target.pretrained import load_config, weights_directory
from draftsmith.target.target import Target, context_of

NOT_MEASURED = ("prompts", "beside", "baselines", "plan_batches", "plan_contexts", "price_per_hour")
"""Keys of the section that a result does not depend on: what prompts and heads hold counts, not where they lie, and a plan is made
again from what was measured."""

_JOURNAL = "parts.journal"
"""Beside a result that is being made: what is measured of it."""


def evaluate_stage(session: Session, *, decode: bool = True) -> list[Path]:
    """Evaluate the head at every temperature of the recipe; return the result files. Reuses finished ones.

    All processes that share a target call it, compute alike and agree on what depends on clocks or the disk; rank 0 alone writes."""
    recipe, spec = session.recipe, session.recipe.evaluate
    run = recipe.run_dir
    stage, folder = ("evaluate", run / "evaluation") if decode else ("simulate", run / "simulation")
    prompts = prompts_of(session, session.target)
    # Refuses heads of other sizes, trees and baselines that do not fit before anything is removed.
    drafters = drafters_of(session, session.target, prompts)
    inputs = _inputs(session, stage, drafters, prompts)
    paths, ours = result_files(recipe, decode=decode), team()
    if not ours.tell(lambda: session.begin(stage, inputs)):
        _measure(session, prompts, drafters, paths, decode=decode)
        ours.tell(lambda: session.run.finish(stage, {"results": [str(path) for path in paths]}))
    elif decode and spec.plan_batches:
        _complete_costs(session, prompts, drafters, paths[0])

    def report() -> None:
        results, past = [read_result(path) for path in paths], None
        costs = folder / COSTS if spec.plan_batches and (folder / COSTS).is_file() else None
        try:
            past = read_history(run) if session.named_head is None else None
        except UserError as error:  # a damaged log costs no result
            say(f"warning: {error}")
        with session.run.writing():
            priced = plan_stage(
                results, costs, folder, recipe.export, spec.price_per_hour, past, run=run, again=session.again
            )
            write_report(results, folder, priced, past)
        for text in (text for result in results for text in result.past_training):
            say(f"warning: {text}")

    ours.tell(report)
    return paths


def result_files(recipe: Recipe, *, decode: bool = True) -> list[Path]:
    """Return the result files of a recipe's evaluation, whether they are there or not."""
    folder = recipe.run_dir / ("evaluation" if decode else "simulation")
    return [folder / f"t{temperature:g}" / "result.json" for temperature in recipe.evaluate.temperatures]


def prompts_of(session: Session, target: Target) -> Prompts:
    """Return the recipe's evaluation prompts for a target; warns of prompts that are left out."""
    chosen = conversations_of(session)
    return make_prompts(session.recipe, chosen, session.tokenizer, target.context_length, session.warn)


def conversations_of(session: Session) -> list[Conversation]:
    """Return the conversations of the evaluation prompts."""
    spec, what = session.recipe.evaluate, "name prompt sets (JSONL with id, slice and messages) to measure on"
    files = session.sources("evaluate.prompts", spec.prompts, what)
    return read_conversations(spec, files, session.recipe.data.template)


def drafters_of(session: Session, target: Target, prompts: Prompts) -> list[SystemUnderTest]:
    """Return the recipe's drafters for a target. Raises UserError where one cannot draft for it."""
    recipe, folder, warn, compared = session.recipe, session.head_folder, session.warn, session.original is not None
    heads, longest = load_heads(recipe, folder, target, warn), prompts.longest_text
    drafters = select_drafters(recipe, heads, target, longest, session.tokenizer, warn, compared=compared)
    return with_records(recipe, folder, heads, target, drafters)


def _measure(
    session: Session, prompts: Prompts, drafters: list[SystemUnderTest], paths: Sequence[Path], *, decode: bool
) -> None:
    """Decode or simulate at the temperatures whose results are not there, and write them. drafters: for the session's own target."""
    spec = session.recipe.evaluate
    there = team().tell(lambda: [read_whole(read_result, path, session.warn) is not None for path in paths])
    missing = [t for t, found in zip(spec.temperatures, there, strict=True) if not found]
    dtype = session.target.dtype_name if spec.dtype == "auto" else spec.dtype
    # Timed in float32, the timed texts are the exact check; else it loads a target of its own and drops it first.
    exact: dict[str, dict[str, Lossless]] = {}
    if decode and spec.lossless and 0 in missing and dtype != "float32":
        exact = _greedy_equality(session, prompts, _journal(paths[spec.temperatures.index(0)]))
    target = session.target_in(dtype)
    if target is not session.target:
        drafters = drafters_of(session, target, prompts)
    alone = session.original_of(target)
    evaluation, table = _evaluation(session, alone, prompts, drafters), None
    if decode and spec.plan_batches:
        table = costs_of_run(evaluation, paths[0].parent.parent / COSTS, session.run, session.warn)
    for temperature, path in zip(spec.temperatures, paths, strict=True):
        if temperature in missing:
            journal, sampling = _journal(path), spec.sampling(temperature)
            if decode:
                result = decode_drafters(evaluation, sampling, journal, table, exact)
            else:
                result = simulate_drafters(evaluation, sampling, journal)
            team().tell(partial(write_result, path, result))
        # Also that of a process which died between the two.
        team().tell(partial(path.with_name(_JOURNAL).unlink, missing_ok=True))


def _complete_costs(session: Session, prompts: Prompts, drafters: list[SystemUnderTest], result: Path) -> None:
    """Measure what a finished evaluation lacks of the costs that the recipe plans with now. drafters: for the session's own target;
    result: one that the costs must fit."""
    costs, evaluation = result.parent.parent / COSTS, _evaluation(session, session.target, prompts, drafters)
    if team().tell(lambda: has_costs(evaluation, costs, session.run, session.warn)):
        return
    target = session.target_in(session.recipe.evaluate.dtype)
    alone = session.original_of(target)
    if alone.fingerprint != read_result(result).target.fingerprint:
        session.warn(
            f"{costs} lacks costs to plan with, which cannot be measured now that the original target is gone: put it back where "
            f"{session.target_path} names it, or evaluate without it, with --redo evaluate."
        )
        return
    own = drafters if target is session.target else drafters_of(session, target, prompts)
    with session.run.writing():
        costs_of_run(_evaluation(session, alone, prompts, own), costs, session.run, session.warn)


def _evaluation(session: Session, target: Target, prompts: Prompts, drafters: list[SystemUnderTest]) -> Evaluation:
    info, read = target_info(target, session.name_of(target)), (session.tokenizer, session.warnings)
    return Evaluation(session.recipe, target, info, prompts, drafters, *read)


def _journal(result: Path) -> Journal:
    """Return what is measured of a result so far; what was timed with another machine, other packages or for another version of
    results is timed again."""
    machine, ours = environment(), team()
    of = [
        Result.schema_version,
        asdict(machine["hardware"]),
        machine["versions"],
        *([ours.size] if ours.size > 1 else []),
    ]
    journal = Journal(None if ours.rank else result.with_name(_JOURNAL), fingerprint(of))
    journal.values = ours.tell(lambda: journal.values)
    return journal


def _inputs(session: Session, stage: str, drafters: list[SystemUnderTest], prompts: Prompts) -> dict[str, Any]:
    """Return what a result depends on."""
    recipe, target, original = session.recipe, session.target, session.original
    inputs = {
        **drafter_digests(recipe, session.head_folder, drafters),
        "target": target.fingerprint,
        "target.dtype": target.dtype_name,
        "eos": list(target.eos_ids),
        **prompts.inputs,
        **session.dated,
        "evaluate": fingerprint_fields(recipe.evaluate, NOT_MEASURED),
        "seed": recipe.seed,
    }
    if stage == "evaluate":  # which is timed
        timed = {"device": session.device.split(":")[0]}
        inputs |= timed | {"target.attn_implementation": recipe.target.attn_implementation}
        split = {"tensor_parallel": recipe.target.tensor_parallel, "gpus": recipe.target.gpus}
        inputs |= {f"target.{key}": count for key, count in split.items() if count > 1}
    if original is not None:
        return inputs | {"original": original.fingerprint}
    # Results stay valid where the original that a finished stage was compared with is gone since.
    made_from = tuned_from(Path(session.target_path))
    if made_from is None or not recipe.evaluate.original or stage in session.redo:
        return inputs
    earlier = inputs | {"original": made_from.fingerprint}
    return earlier if session.run.holds(stage, earlier) else inputs


def costs_table(session: Session, path: Path) -> Path:
    """Write the costs of the recipe's drafters on this machine, for `draftsmith report --costs`. Raises UserError for a file that
    cannot be written."""
    check_file("--output", path, (".json",), TABLE_MARK)
    target = session.target_in(session.recipe.evaluate.dtype)
    prompts = prompts_of(session, target)
    drafters = drafters_of(session, target, prompts)
    measure_and_keep(_evaluation(session, session.original_of(target), prompts, drafters), path)
    return path


def served_costs_table(session: Session, path: Path, urls: Sequence[str], names: Sequence[str]) -> Path:
    """Write the costs of the servers at `urls`, which draft with the recipe's head, for `draftsmith report --costs`; no model is
    loaded. names: that they serve the target by, where these are not its own. Raises UserError for a file that cannot be written."""
    check_file("--output", path, (".json",), TABLE_MARK)
    recipe, spec = session.recipe, session.recipe.evaluate
    alone = session.original or TargetIdentity(recipe.target.path)
    servers = [MeasuredServer(url, names or [session.target_path]) for url in urls]
    length = _served_context(session)
    prompts = served_prompts(session)
    digest = alone.fingerprint or fingerprint_directory(weights_directory(session.target_path))
    table = measure_served(
        servers,
        TargetInfo(alone.path or recipe.target.path, digest),
        recipe.method,
        [token for request in prompts.requests for token in request.prompt_ids],
        spec.temperatures[0],
        batches=sorted({*spec.plan_batches, spec.batch}),
        contexts=contexts_of(spec, prompts, length, TOKENS, "an answer"),
        command=command_line(),
    )
    write_cost_table(path, table)
    for server in table.servers:
        k = server.num_speculative_tokens
        say(f"costs: {server.url}, {server.engine}, {f'drafts {k} tokens a round' if k else 'is the target alone'}")
    return path


def served_prompts(session: Session) -> Prompts:
    """Return the recipe's evaluation prompts for its target on a server; no model is loaded."""
    recipe = session.recipe
    chosen, longest = conversations_of(session), _served_context(session)
    return make_prompts(recipe, chosen, session.unchecked_tokenizer, longest, session.warn)


def _served_context(session: Session) -> int:
    config = load_config(session.target_path, session.recipe.target.trust_remote_code).get_text_config(decoder=True)
    return context_of(config) or sys.maxsize


def _greedy_equality(session: Session, prompts: Prompts, journal: Journal) -> dict[str, dict[str, Lossless]]:
    """Compare greedy texts with and without each draft in float32, where they must be equal. journal: what an interrupted check has
    answered."""
    target, greedy = session.load_target("float32"), session.recipe.evaluate.sampling(0)
    drafters = at_temperature(drafters_of(session, target, prompts), greedy)
    # Drafts for a tuned target are compared with its own texts; the original verifies those of the baselines.
    alone = session.original_of(target) if any(c.verifier is None for c in drafters) else target
    return check_lossless(alone, drafters, prompts.requests, greedy, journal)
