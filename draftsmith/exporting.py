"""The last stage of a recipe: the directory that a serving engine loads."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.fields import without_neutral
from draftsmith.heads.checkpoint import check_replaceable
from draftsmith.heads.differences import compare
from draftsmith.heads.export import LAYOUTS, convert_head, default_layout, export_head, replaced_files
from draftsmith.heads.identity import TargetIdentity
from draftsmith.heads.record import read_record, warnings_for
from draftsmith.recipe import Recipe
from draftsmith.session import Session, say
from draftsmith.stages import find_head, head_digest, load_best


def export_options(recipe: Recipe, method: str) -> dict[str, Any]:
    """Return how a recipe exports a head of `method`: the keyword arguments of `export_head`.

    A layout that the recipe names for its own method says nothing about a head of another one.
    """
    spec, layout = recipe.export, recipe.export.layout
    if layout in LAYOUTS and LAYOUTS[layout].method == recipe.method != method:
        layout = None
    return {
        "layout": layout or default_layout(method),
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "include_embeddings": spec.include_embeddings,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "tensor_parallel": spec.tensor_parallel,
    }


def export_stage(session: Session, head_folder: Path | None = None) -> Path:
    """Write the trained head as the directory that an engine loads, and check it by loading it again."""
    recipe, spec, target = session.recipe, session.recipe.export, session.target
    head = load_best(session, target, head_folder)
    made_for = _made_for(session, head_folder)
    options = export_options(recipe, head.method)
    destination = recipe.run_dir / "export" / options["layout"]
    inputs = {
        "head": head_digest(session, head_folder),
        "target": target.fingerprint,
        # Not the layout: one run may be exported for several engines.
        "export": without_neutral(
            {key: value for key, value in asdict(spec).items() if key != "layout"}, {"tensor_parallel": 1}
        ),
        "num_speculative_tokens": options["num_speculative_tokens"],
    }
    files = convert_head(head, target, **options)  # refuses before an old export is removed
    if "export" not in session.redo and not (session.run.holds("export", inputs) and destination.exists()):
        check_replaceable(destination, replaced_files(destination, files))
    if session.begin("export", inputs) and destination.exists():
        return destination
    export_head(head, target, destination, made_for=made_for, **options)
    session.finish("export", {"folders": sorted(str(path) for path in destination.parent.iterdir() if path.is_dir())})
    say(f"export: {destination}")
    return destination


def _made_for(session: Session, head_folder: Path | None) -> TargetIdentity:
    """Return the target that the head's checkpoint records, so that the export tells the truth about it.

    Warns where tokenizer, chat template or eos ids have changed since; other weights never come this far. What the
    checkpoint does not record is taken from the target at hand.
    """
    folder, now = find_head(session, head_folder), session.target.identity
    recorded = read_record(folder)
    if recorded is None:
        return now
    for text in warnings_for(folder, compare(recorded, now), recorded, session.target.path):
        session.warn(text)
    return recorded.completed(now)
