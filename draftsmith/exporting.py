"""The last stage of a recipe: the directory that a serving engine loads."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.heads.export import convert_head, default_layout, export_head
from draftsmith.recipe import Recipe
from draftsmith.session import Session, say
from draftsmith.stages import head_digest, load_best


def export_options(recipe: Recipe, method: str) -> dict[str, Any]:
    """Return how a recipe exports a head of `method`: the keyword arguments of `export_head`."""
    spec = recipe.export
    return {
        "layout": spec.layout or default_layout(method),
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "include_embeddings": spec.include_embeddings,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
    }


def export_stage(session: Session, head_folder: Path | None = None) -> Path:
    """Write the trained head as the directory that an engine loads, and check it by loading it again."""
    recipe, spec, target = session.recipe, session.recipe.export, session.target
    head = load_best(session, target, head_folder)
    options = export_options(recipe, head.method)
    destination = recipe.run_dir / "export" / options["layout"]
    inputs = {
        "head": head_digest(session, head_folder),
        "target": target.fingerprint,
        # Not the layout: one run may be exported for several engines.
        "export": {key: value for key, value in asdict(spec).items() if key != "layout"},
        "num_speculative_tokens": options["num_speculative_tokens"],
    }
    convert_head(head, target, **options)  # refuses before an old export is removed
    if session.begin("export", inputs) and destination.exists():
        return destination
    export_head(head, target, destination, **options)
    session.finish("export", {"folders": sorted(str(path) for path in destination.parent.iterdir())})
    say(f"export: {destination}")
    return destination
