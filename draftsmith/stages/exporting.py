"""The stage that exports a trained head: it writes the directory that a serving engine loads."""

import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.parity.bundle import make_bundle, write_bundle
from draftsmith.eval.planner.routing import read_rules
from draftsmith.eval.planner.verdict import Action
from draftsmith.eval.results.result import read_result
from draftsmith.eval.training.history import trained_length
from draftsmith.fields import fingerprint_fields
from draftsmith.foreign.text import read_object, read_text
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import check_replaceable
from draftsmith.heads.export.export import convert_head, export_head, replaced_files
from draftsmith.heads.export.readme import README, open_with
from draftsmith.heads.export.tuned import FOLDERS, replaceable, write_adapter, write_merged
from draftsmith.heads.formats.engines import ADAPTER_NAME, ENGINES, Adapter
from draftsmith.heads.formats.layout import default_layout, find_layout, layouts_of, version_notice
from draftsmith.heads.formats.recognise import earlier_digest, head_digest, load_head
from draftsmith.heads.formats.schema import rendered_by, target_reference
from draftsmith.heads.record import History, Measured, Trained, check_made_for, read_record
from draftsmith.progress import say
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.evaluation import prompts_of, result_files
from draftsmith.stages.session import Session
from draftsmith.storage import fingerprint, write_text
from draftsmith.target.target import Target


def export_options(recipe: Recipe, method: str) -> dict[str, Any]:
    """Return the keyword arguments of `export_head` with which a recipe exports a head of `method`.

    A layout that the recipe names for its own method does not apply to a head of another method.
    """
    spec, layout = recipe.export, recipe.export.layout
    if layout in layouts_of(recipe.method) and layout not in layouts_of(method):
        layout = None
    return {
        "layout": layout or default_layout(method, recipe.target.path),
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "include_embeddings": spec.include_embeddings,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "tensor_parallel": spec.tensor_parallel,
    }


def export_folder(recipe: Recipe, method: str) -> Path:
    """Return the directory that a head of `method` is exported to."""
    return recipe.run_dir / "export" / str(export_options(recipe, method)["layout"])


def check_adapter(recipe: Recipe, head: DraftHead) -> None:
    """Raise UserError where `export.adapter` is set for a head without an adapter, or keeps one that no engine serves."""
    adapter = recipe.export.adapter
    if adapter is not None and "tuned" not in head.trains.outputs:
        raise UserError(f"export.adapter is {adapter!r}, but {head.method} heads come with no adapter: leave it out.")
    if adapter == "keep" and "tuned" in head.trains.outputs:
        layout = export_options(recipe, head.method)["layout"]
        known = layouts_of(head.method).items()
        serve = [name for name, one in known if any(ENGINES[engine].serves_adapters for engine in one.engines)]
        if layout not in serve:
            raise UserError(
                f"export.adapter is 'keep', but no engine that reads the layout {layout!r} drafts for a target with an "
                f"adapter: set export.layout to {' or '.join(serve)}, or leave export.adapter out."
            )


def export_stage(session: Session) -> Path:
    """Write the trained head as the directory that an engine loads, and check it by loading it again."""
    recipe, spec, folder, now = session.recipe, session.recipe.export, session.head_folder, session.target.identity
    head: Any = load_head(folder, session.target)
    check_adapter(recipe, head)
    # Other weights were refused; what is left to differ, tokenizer, chat template or eos ids, is worth a warning.
    check_made_for(folder, session.target, session.warn)
    recorded = read_record(folder)
    options = export_options(recipe, head.method)
    if spec.engine_version and (
        notice := version_notice(find_layout(options["layout"], head.method), spec.engine_version)
    ):
        session.warn(notice)
    destination = export_folder(recipe, head.method)
    target, kind, tuned_folder = session.target, spec.adapter or "merge", None
    if "tuned" in head.trains.outputs:
        original = session.target_in(spec.dtype)
        head, tuned_folder = head.deployed(original), destination.parent / FOLDERS[kind]
        target = head.verifier(original)
        # What the heads' configuration names as their target.
        target.path = str(tuned_folder.absolute()) if kind == "merge" else target_reference(original)
    inputs = _inputs(session, options["num_speculative_tokens"])
    told = {"planned": _planned(session, head.method), "rendered": rendered_by(asdict(recipe.data))}
    known = _told(session)
    places = [one for one in (destination, tuned_folder) if one is not None]
    kept = session.run.holds("export", inputs) and destination.exists()
    if stale := kept and known.get(destination.name, _NOTHING) != fingerprint(told):
        say("export: made again, as prompts are rendered otherwise or an evaluation has chosen other draft lengths")
    files = convert_head(head, target, **options)  # refuses before an old export is removed
    if "export" not in session.redo and (stale or not kept):
        check_replaceable(destination, replaced_files(destination, files))
        if tuned_folder is not None:
            check_replaceable(tuned_folder, replaceable(tuned_folder))
    verdict = _against(session)
    if session.begin("export", inputs, None if stale else places):
        if (readme := destination / README).is_file():
            said = read_text(readme, "remove it, and run again")
            if said and (renewed := open_with(verdict, said)) != said:  # by an evaluation since
                write_text(readme, renewed)
        return destination
    if tuned_folder is None:
        # What the head's checkpoint does not record of its target is taken from the one at hand.
        options["made_for"] = now if recorded is None else recorded.completed(now)
    else:
        options |= _write_tuned(session, head, target, kind, tuned_folder)
        say(f"export: {tuned_folder}")
    options |= {**told, "verdict": verdict, "again": session.again}
    beside = partial(_write_parity, session, target, str(options["layout"]))
    export_head(head, target, destination, history=_history(session, head.method), beside=beside, **options)
    destination.with_name(f"{destination.name}.gguf").unlink(missing_ok=True)  # of the head that was exported before
    folders = sorted(str(path) for path in destination.parent.iterdir() if path.is_dir())
    session.finish("export", {"folders": folders, "told": known | {destination.name: fingerprint(told)}})
    say(f"export: {destination}")
    return destination


def _inputs(session: Session, tokens: int) -> dict[str, Any]:
    """Return what an export of `tokens` drafted ones depends on, as run.json records it."""
    spec, now = session.recipe.export, session.target.identity
    return {
        "head": head_digest(session.head_folder),
        "target": session.target.fingerprint,
        # What else the files hold of the target: its name, the dtype unless one is named, and with whole models the rest.
        "target.reference": target_reference(session.target),
        "target.dtype": session.target.dtype_name if spec.dtype == "auto" else None,
        "identity": {name: getattr(now, name) for name in ("tokenizer", "chat_template", "eos_ids")},
        # Not the layout: one run may be exported for several engines.
        "export": fingerprint_fields(spec, ["layout", "engine_version"]),
        "num_speculative_tokens": tokens,
    }


_NOTHING = fingerprint({"planned": (), "rendered": rendered_by({})})
"""What exports of earlier versions tell."""


def _told(session: Session) -> dict[str, str]:
    """Return by folder a fingerprint of what the README and the parity bundle of the run's exports say of prompts and draft lengths."""
    record = session.run.record("export")
    return {} if record is None else record.facts.get("told", {})


def _history(session: Session, method: str) -> History:
    """Return what the passport says of a head of this run: its training, and what the run's evaluation of it found for each of its ways
    to draft at each temperature."""
    record, longest, trained = session.run.record("train"), trained_length(session.head_folder), None
    if record is not None and session.named_head is None and longest is not None and "answers" in record.facts:
        warm = record.inputs.get("train.warm_start")
        trained = Trained(record.facts["answers"], longest, record.inputs.get("answers"), warm)
    folder = session.recipe.run_dir / "evaluation"
    found = [_evaluated(session, str(path.relative_to(folder))) for path in result_files(session.recipe)]
    measured = tuple(
        Measured(
            drafter=name,
            date=result.date,
            dtype=result.settings.dtype,
            temperature=result.settings.temperature,
            num_speculative_tokens=one.draft.num_speculative_tokens,
            prompts=result.settings.prompts,
            tau={place: measures.tau for place, measures in {"overall": one.overall, **one.slices}.items()},
            tau_interval=one.overall.tau_interval,
        )
        for result in map(read_result, filter(None, found))
        for name, one in result.drafters.items()
        if one.draft is not None and one.draft.method == method and re.match(rf"{re.escape(method)}($|[ ,])", name)
        if not any(re.match(rf"{re.escape(other)}($|[ ,])", name) for other in session.recipe.evaluate.beside)
    )
    return History(trained, measured)


def _write_parity(session: Session, target: Target, layout: str, folder: Path, head: DraftHead, tokens: int) -> None:
    """Write what an engine must give for a few of the evaluation's prompts into an export; warn where there are none that it can use."""
    lacks = "no evaluation prompt leaves room for an answer and a draft"
    try:
        prompts = prompts_of(session, target)
    except UserError as error:  # an export needs neither prompts nor a tokenizer
        lacks, bundle = str(error).rstrip("."), None
    else:
        # Where a template prints the date, a server makes other tokens of the same messages tomorrow.
        same = () if session.dated else prompts.conversations.items()
        plain = {name: c.prompt() for name, c in same if not c.tools}
        bundle = make_bundle(target, head, prompts.requests, tokens, plain, layout)
    if bundle is None:
        session.warn(f"the export has no parity bundle for draftsmith verify: {lacks}.")
    else:
        served_as = ADAPTER_NAME if session.recipe.export.adapter == "keep" else ""
        write_bundle(folder, replace(bundle, template=session.recipe.data.template, served_as=served_as))


def _planned(session: Session, method: str) -> tuple[tuple[int, int, int], ...]:
    """Return the draft lengths by batch that the run's evaluation found fastest for this head; empty where it was not evaluated, or
    no draft pays."""
    if (path := _evaluated(session, "routing.json")) is None:
        return ()
    rules = read_rules(path)
    return rules.by_batch if rules.drafter.removesuffix(", bfloat16") == method and rules.largest_batch else ()


def _against(session: Session) -> str:
    """Return the verdict of the run's evaluation of this head where it does not pay, else nothing."""
    path = _evaluated(session, "plan.json")
    verdict = None if path is None else read_object(path, "evaluate the run again").get("verdict")
    if not isinstance(verdict, dict) or verdict.get("action") not in (Action.DO_NOT_DEPLOY, Action.MORE_DATA):
        return ""
    return str(verdict.get("headline"))


def _evaluated(session: Session, name: str) -> Path | None:
    """Return a file of the run's evaluation, None where that was not of this head."""
    record, path = session.run.record("evaluate"), session.recipe.run_dir / "evaluation" / name
    digest = head_digest(session.head_folder)
    own = record is not None and record.inputs.get("head") in (digest, earlier_digest(digest))
    return path if own and path.is_file() else None


def _write_tuned(session: Session, head: Any, target: Target, kind: str, folder: Path) -> dict[str, Any]:
    """Write the target that was tuned with a head, as a whole model ("merge") or as an adapter; return what the export of
    the head says of it, as arguments of `export_head`."""
    adapter = None
    if kind == "merge":
        remote = session.recipe.target.trust_remote_code
        identity = write_merged(head.method, session.target, target, folder, remote)
        note = f"These heads draft for the tuned target in `../{folder.name}`: serve that one, not the original."
    else:
        identity = write_adapter(head.method, head.tuned, folder)
        adapter = Adapter(str(folder.absolute()), head.tuned.spec.rank)
        note = f"These heads draft for the target with the adapter in `../{folder.name}`, not for the target alone."
    target.fingerprint = identity.fingerprint or target.fingerprint
    return {"made_for": identity, "target_note": note, "adapter": adapter}
