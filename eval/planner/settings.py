"""The plan as what engines take: the lines that start each one, with the planned draft length and its table by batch."""

from pathlib import Path

from draftsmith.eval.planner.decision import Decision
from draftsmith.files import write_text
from draftsmith.heads.formats.engines import Serving, Snippet
from draftsmith.heads.formats.layout import default_layout, find_layout, layouts_of
from draftsmith.heads.registry import is_known


def engine_settings(decision: Decision) -> dict[str, list[Snippet]]:
    """Return what starts each engine that reads heads of the planned method, by its name in ENGINES; empty for drafters that no
    engine here takes."""
    draft = decision.plan.results[0].drafters[decision.rules.drafter].draft
    if draft is None or not is_known(draft.method) or not layouts_of(draft.method):
        return {}
    layout = find_layout(default_layout(draft.method), draft.method)
    serving = Serving(
        draft=f"export/{layout.name}",
        target=decision.plan.results[0].target.path,
        tokens=decision.rules.num_speculative_tokens,
        layer_ids=draft.layer_ids,
        heads=draft.num_heads,
        by_batch=decision.rules.by_batch,
    )
    return {engine: served.start(serving) for engine, served in layout.engines.items()}


def write_settings(folder: Path, decision: Decision) -> None:
    """Write a folder for each engine, with the files and the command that start it, each atomically."""
    for engine, snippets in engine_settings(decision).items():
        for snippet in snippets:
            path = folder / engine / (snippet.file or "start.sh")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, snippet.text)
