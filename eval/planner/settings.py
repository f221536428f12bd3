"""The plan as what engines take: the lines that start each one, with the planned draft length and its table by batch."""

import os
import re
from dataclasses import replace
from pathlib import Path

from draftsmith.eval.planner.decision import Decision
from draftsmith.heads.formats.engines import ENGINES, Serving, Snippet, one_gpu
from draftsmith.heads.formats.layout import default_layout, layouts_of, target_obstacle
from draftsmith.heads.registry import is_known
from draftsmith.storage import write_text
from draftsmith.target.folder import local_folder, read_object

_COMMAND = "start.sh"
NAMES = (_COMMAND, "adaptive.json", "trtllm.yaml", "assisted.py")
"""The files that a plan leaves in an engine's folder."""
_SOURCES = {"llama_cpp": "LLAMA_CPP", "tensorrt_llm": "TENSORRT_LLM"}
"""The variables with the folder of sources whose scripts a command runs."""


def engine_settings(decision: Decision) -> dict[str, list[Snippet]]:
    """Return what starts each engine that reads the run's own head, by its name in ENGINES; empty where the decision is to leave
    speculation off, and for what an export does not hold as planned: other heads, lossy drafts, and a tuned target, which the export's
    README starts. Where a tree is fastest they are started with the fastest chain.

    The layout is that of the recipe, as far as it holds heads of the method; whether an engine can divide this head over the GPUs is
    for the export to say."""
    rules, export, result = decision.served, decision.export, decision.plan.results[0]
    drafters, gpus = result.drafters, export.tensor_parallel
    draft, first = drafters[rules.drafter].draft, next(iter(drafters))
    # A chain of the run's own head is the first drafter, or has the name of its method.
    own = drafters[first].draft
    if not rules.largest_batch or draft is None or rules.drafter not in (first, own and own.method):
        return {}
    known = layouts_of(draft.method) if is_known(draft.method) else {}
    if draft.tree is not None or draft.lossy or draft.tuned or not known:
        return {}
    layout = known.get(export.layout or "") or known[default_layout(draft.method, result.target.path)]
    target, place = result.target.path, local_folder(result.target.path)
    architectures = None if place is None else read_object(place / "config.json").get("architectures")
    serving = Serving(
        draft=os.path.join(decision.exports, layout.name),
        target=str(Path(target).absolute()) if Path(target).exists() else target,
        tokens=rules.num_speculative_tokens,
        dtype=result.settings.dtype if export.dtype == "auto" else export.dtype,
        gpus=gpus,
        layer_ids=draft.layer_ids,
        heads=draft.num_heads,
        by_batch=rules.by_batch,
        again=decision.again,
    )
    return {
        engine: served.start(replace(serving, files=decision.settings and os.path.join(decision.settings, engine)))
        for engine, served in layout.engines.items()
        if target_obstacle(layout, engine, target, architectures) is None
        and (gpus == 1 or ENGINES[engine].split is not one_gpu)
    }


def write_settings(folder: Path, decision: Decision) -> None:
    """Write a folder for each engine, with the files and the command that start it, in place of those of an earlier plan. Files of
    other names stay."""
    for engine in ENGINES:
        for name in NAMES:
            (folder / engine / name).unlink(missing_ok=True)
    for engine, snippets in engine_settings(decision).items():
        for snippet in snippets:
            path = folder / engine / (snippet.file or _COMMAND)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, snippet.text if snippet.file else _from_anywhere(snippet.text, _SOURCES.get(engine, "")))


def _from_anywhere(text: str, variable: str) -> str:
    """Return commands that run in any folder: scripts of an engine's sources are looked for in the folder that a variable names."""
    moved = re.sub(r"^python (?=convert_hf|examples/)", f'python "${variable}"/', text, flags=re.MULTILINE)
    moved = moved.replace("--gguf llama.cpp", f'--gguf "${variable}"')
    return text if moved == text else f': "${{{variable}:?set it to the folder with its sources}}"\n{moved}'
