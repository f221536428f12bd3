"""The stage that evaluates a trained head: decode or simulate its prompts, and write result.json and the reports."""

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.templates import load_tokenizer, prepare_prompts
from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import TABLE_MARK, write_cost_table
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.engines.server import Server
from draftsmith.eval.engines.server_costs import TOKENS, measure_served
from draftsmith.eval.measure.lossless import check_lossless
from draftsmith.eval.report.page_model import OVERALL
from draftsmith.eval.report.report import write_report
from draftsmith.eval.results.result import Lossless, TargetInfo, read_result, write_result
from draftsmith.eval.training.history import read_history
from draftsmith.fields import fingerprint_fields
from draftsmith.foreign.journal import Journal
from draftsmith.heads.record import tuned_from
from draftsmith.machine import environment
from draftsmith.progress import Bar, say
from draftsmith.stages.drafters import (
    at_temperature,
    drafter_digests,
    load_heads,
    select_drafters,
    with_trained_lengths,
)
from draftsmith.stages.evaluator import Evaluator
from draftsmith.stages.planning import (
    COSTS,
    contexts_of,
    costs_of_run,
    has_costs,
    longest_text,
    measure_and_keep,
    plan_stage,
)
from draftsmith.stages.session import Session
from draftsmith.storage import check_file, fingerprint
from draftsmith.target.files import fingerprint_directory
from draftsmith.target.identity import TargetIdentity
from draftsmith.target.pretrained import load_config, weights_directory
from draftsmith.target.target import Target, context_of

NOT_MEASURED = ("prompts", "beside", "baselines", "plan_batches", "plan_contexts", "price_per_hour")
"""Keys of the section that a result does not depend on: what prompts and heads hold counts, not where they lie, and a plan is made
again from what was measured."""

_JOURNAL = "parts.journal"
"""Beside a result that is being made: what is measured of it."""


def evaluate_stage(session: Session, *, decode: bool = True) -> list[Path]:
    """Evaluate the head at every temperature of the recipe; return the result files. Reuses finished ones."""
    recipe, spec = session.recipe, session.recipe.evaluate
    run = recipe.run_dir
    stage, folder = ("evaluate", run / "evaluation") if decode else ("simulate", run / "simulation")
    requests, conversations = make_requests(session, session.target)
    original, longest = session.original, longest_text(requests)

    def drafters_of(target: Target) -> list[SystemUnderTest]:
        heads = load_heads(session, target)
        found = select_drafters(session, heads, target, longest, compared=original is not None)
        return with_trained_lengths(session, heads, found)

    # Refuses heads of other sizes, trees and baselines that do not fit before anything is removed.
    drafters = drafters_of(session.target)
    inputs = _inputs(session, stage, drafters, requests, conversations)
    paths = [folder / f"t{temperature:g}" / "result.json" for temperature in spec.temperatures]
    if not session.begin(stage, inputs):
        missing = [t for t, path in zip(spec.temperatures, paths, strict=True) if not _is_there(session, path)]
        dtype = session.target.dtype_name if spec.dtype == "auto" else spec.dtype
        # Timed in float32, the timed texts are the exact check; else it loads a target of its own and drops it first.
        lossless: dict[str, dict[str, Lossless]] = {}
        if decode and spec.lossless and 0 in missing and dtype != "float32":
            journal = _journal(paths[spec.temperatures.index(0)])
            lossless = _lossless(session, requests, drafters_of, original, journal)
        target = session.target_in(dtype)
        if target is not session.target:
            drafters = drafters_of(target)
        alone = target if original is None else session.load_target(target.dtype_name, original.path)
        evaluator = Evaluator(session, alone, requests, conversations, drafters)
        table = None
        if decode and spec.plan_batches:
            table = costs_of_run(session, alone, requests, drafters, folder / COSTS)
        for temperature, path in zip(spec.temperatures, paths, strict=True):
            if temperature in missing:
                journal, sampling = _journal(path), spec.sampling(temperature)
                made = (
                    evaluator.decoded(sampling, lossless, journal, table)
                    if decode
                    else evaluator.simulated(sampling, journal)
                )
                write_result(path, made)
            # Also that of a process which died between the two.
            path.with_name(_JOURNAL).unlink(missing_ok=True)
        session.run.finish(stage, {"results": [str(path) for path in paths]})
    elif decode and spec.plan_batches:
        _complete_costs(session, requests, drafters, drafters_of, paths[0])
    results, costs = [read_result(path) for path in paths], folder / COSTS if (folder / COSTS).is_file() else None
    past = read_history(run) if session.named_head is None else None
    with session.run.writing():
        priced = plan_stage(
            results, costs, folder, recipe.export, spec.price_per_hour, past, run=run, again=session.again
        )
        write_report(results, folder, priced, past)
    for result in results:
        for text in result.past_training:
            say(f"warning: {text}")
    return paths


def _complete_costs(
    session: Session,
    requests: Sequence[Request],
    drafters: list[SystemUnderTest],
    drafters_of: Callable[[Target], list[SystemUnderTest]],
    result: Path,
) -> None:
    """Measure what a finished evaluation lacks of the costs that the recipe plans with now. drafters: for the session's own target;
    result: one that the costs must fit."""
    costs, original = result.parent.parent / COSTS, session.original
    if has_costs(session, session.target, requests, drafters, costs):
        return
    target = session.target_in(session.recipe.evaluate.dtype)
    alone = target if original is None else session.load_target(target.dtype_name, original.path)
    if alone.fingerprint != read_result(result).target.fingerprint:
        session.warn(
            f"{costs} lacks costs to plan with, which cannot be measured now that the original target is gone: put it back where "
            f"{session.target_path} names it, or evaluate without it, with --redo evaluate."
        )
        return
    with session.run.writing():
        costs_of_run(session, alone, requests, drafters if target is session.target else drafters_of(target), costs)


def _journal(result: Path) -> Journal:
    """Return what is measured of a result so far; what was timed with another machine or other packages is timed again."""
    found = environment()
    return Journal(result.with_name(_JOURNAL), fingerprint([asdict(found["hardware"]), found["versions"]]))


def _inputs(
    session: Session,
    stage: str,
    drafters: list[SystemUnderTest],
    requests: Sequence[Request],
    conversations: Mapping[str, Conversation],
) -> dict[str, Any]:
    """Return what a result depends on."""
    recipe, spec, original = session.recipe, session.recipe.evaluate, session.original
    inputs = {
        **drafter_digests(session, drafters),
        "target": session.target.fingerprint,
        "target.dtype": session.target.dtype_name,
        "eos": list(session.target.eos_ids),
        **_prompt_inputs(requests, conversations),
        "evaluate": fingerprint_fields(spec, NOT_MEASURED),
        "seed": recipe.seed,
    }
    if stage == "evaluate":  # which is timed
        timed = {"device": session.device.split(":")[0]}
        inputs |= timed | {"target.attn_implementation": recipe.target.attn_implementation}
    return _as_compared(session, stage, inputs) if original is None else inputs | {"original": original.fingerprint}


def costs_table(session: Session, path: Path) -> Path:
    """Write the costs of the recipe's drafters on this machine, for `draftsmith report --costs`. Raises UserError for a file that
    cannot be written."""
    check_file("--output", path, (".json",), TABLE_MARK)
    target = session.target_in(session.recipe.evaluate.dtype)
    requests, _ = make_requests(session, target)
    original, heads = session.original, load_heads(session, target)
    drafters = select_drafters(session, heads, target, longest_text(requests), compared=original is not None)
    alone = target if original is None else session.load_target(target.dtype_name, original.path)
    measure_and_keep(session, alone, requests, drafters, path)
    return path


def served_costs_table(session: Session, path: Path, urls: Sequence[str], names: Sequence[str]) -> Path:
    """Write the costs of the servers at `urls`, which draft with the recipe's head, for `draftsmith report --costs`; no model is
    loaded. names: that they serve the target by, where these are not its own. Raises UserError for a file that cannot be written."""
    check_file("--output", path, (".json",), TABLE_MARK)
    recipe, spec = session.recipe, session.recipe.evaluate
    alone = session.original or TargetIdentity(recipe.target.path)
    servers = [Server(url, names or [session.target_path]) for url in urls]
    config = load_config(session.target_path, recipe.target.trust_remote_code).get_text_config(decoder=True)
    length = context_of(config) or sys.maxsize
    tokenizer = load_tokenizer(session.target_path, recipe.target.trust_remote_code, recipe.data.chat_template)
    requests, _ = prepare_requests(session, tokenizer, length)
    digest = alone.fingerprint or fingerprint_directory(weights_directory(session.target_path))
    table = measure_served(
        servers,
        TargetInfo(alone.path or recipe.target.path, digest),
        recipe.method,
        [token for request in requests for token in request.prompt_ids],
        spec.temperatures[0],
        batches=sorted({*spec.plan_batches, spec.batch}),
        contexts=contexts_of(session, requests, length, TOKENS, "an answer"),
        command=shlex.join(["draftsmith", *sys.argv[1:]]),
    )
    write_cost_table(path, table)
    for server in table.servers:
        k = server.num_speculative_tokens
        say(f"costs: {server.url}, {server.engine}, {f'drafts {k} tokens a round' if k else 'is the target alone'}")
    return path


def _prompt_inputs(requests: Sequence[Request], conversations: Mapping[str, Conversation]) -> dict[str, str]:
    """Identify the prompts, and their references where any has one."""
    prompts = fingerprint([(r.sample_id, r.slice, r.prompt_ids, r.max_new_tokens) for r in requests])
    found = {name: c.reference for name, c in conversations.items() if c.reference is not None}
    return {"prompts": prompts} | ({"references": fingerprint(found)} if found else {})


def _is_there(session: Session, path: Path) -> bool:
    """Return whether a result of this stage is there and whole; a damaged one is said and measured again."""
    try:
        return path.is_file() and bool(read_result(path))
    except UserError as error:
        session.warn(f"{path} is measured again, as it cannot be read: {error}")
        return False


def _as_compared(session: Session, stage: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return `inputs` with the original that a finished stage was compared with, where that original is gone since.

    Its results stay valid then.
    """
    made_from = tuned_from(Path(session.target_path))
    if made_from is None or not session.recipe.evaluate.original or stage in session.redo:
        return inputs
    earlier = inputs | {"original": made_from.fingerprint}
    return earlier if session.run.holds(stage, earlier) else inputs


def make_requests(session: Session, target: Target) -> tuple[list[Request], dict[str, Conversation]]:
    """Return the evaluation prompts as requests, and their conversations by id; warns of prompts that are left out."""
    return prepare_requests(session, session.tokenizer, target.context_length)


def prepare_requests(
    session: Session, tokenizer: Any, context_length: int
) -> tuple[list[Request], dict[str, Conversation]]:
    """Do the same for a target of which only the tokenizer is loaded."""
    spec = session.recipe.evaluate
    chosen = evaluation_conversations(session)
    deepest = max([spec.max_k, *(tree.depth for draft in spec.drafts if (tree := draft.load()) is not None)])
    prompts = prepare_prompts(
        tokenizer,
        chosen,
        max_new_tokens=lambda name: spec.max_new_tokens_by_slice.get(name, spec.max_new_tokens),
        max_length=context_length - deepest,
        template=session.recipe.data.template,
        limit=f"the target's context leaves after a draft of {deepest}: give shorter prompts, or lower evaluate.max_k",
        warn=session.warn,
    )
    if len(prompts) < len(chosen):
        left = len(chosen) - len(prompts)
        session.warn(
            f"{left} of {len(chosen)} prompts are too long for the target and are left out: give shorter ones "
            "in evaluate.prompts, or lower evaluate.max_k."
        )
    seed = session.recipe.seed
    requests = [Request.seeded(p.conversation.id, p.conversation.slice, p.ids, p.max_new_tokens, seed) for p in prompts]
    return requests, {c.id: c for c in chosen}


def evaluation_conversations(session: Session) -> list[Conversation]:
    """Return the evaluation prompts, `per_slice` of each slice."""
    spec = session.recipe.evaluate
    what = "name prompt sets (JSONL with id, slice and messages) to measure on"
    sources = session.sources("evaluate.prompts", spec.prompts, what)
    chosen: list[Conversation] = []
    seen: dict[str, int] = defaultdict(int)
    for conversation in load_conversations(sources):
        if conversation.slice == OVERALL:
            raise UserError(
                f"evaluate.prompts: the prompt {conversation.id} is in a slice named {OVERALL}, which is what all slices "
                "together are called: give the slice another name."
            )
        seen[conversation.slice] += 1
        if spec.per_slice is None or seen[conversation.slice] <= spec.per_slice:
            chosen.append(conversation)
    for key in ("max_new_tokens_by_slice", "example_slices"):
        if unknown := sorted(set(getattr(spec, key)) - set(seen)):
            raise UserError(
                f"evaluate.{key} names the slice {unknown[0]}, but the prompts have {', '.join(sorted(seen))}: correct the name."
            )
    return chosen


def _lossless(
    session: Session,
    requests: Sequence[Request],
    drafters_of: Callable[[Target], list[SystemUnderTest]],
    original: TargetIdentity | None,
    journal: Journal,
) -> dict[str, dict[str, Lossless]]:
    """Compare greedy texts with and without each draft in float32, where they must be equal. journal: what an interrupted check has
    answered."""
    target = session.load_target("float32")
    greedy = session.recipe.evaluate.sampling(0)
    drafters = at_temperature(drafters_of(target), greedy)
    # Drafts for a tuned target are compared with its own texts; the original verifies those of the baselines.
    compared = original if any(c.verifier is None for c in drafters) else None
    alone = target if compared is None else session.load_target("float32", compared.path)
    count = len(requests) * (len(drafters) + len({c.verified_by(alone) for c in drafters}))
    with Bar(total=count, desc="greedy equality in float32", unit="answer") as bar:
        done = {"on_batch": bar.update, "on_kept": bar.skip}
        return check_lossless(alone, drafters, requests, greedy, journal=journal, **done)
