"""Serve a head with vLLM and compare it with our decoder and simulator."""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.eval.engines.rows import AgreementRow, within_text
from draftsmith.eval.engines.vllm_client import VllmRun, VllmSettings, run_vllm
from draftsmith.stages.gguf import HEADS
from scripts.bench.engines.compare import OurSide, greedy_row, sampled_row

METHODS = {
    "dflash": "dflash",
    "eagle3": "eagle3",
    "eagle1": "eagle",
    "medusa_vllm": "medusa",
    "draft_model": "draft_model",
    "peagle": "eagle3",
}
"""vLLM's name of the drafting method, by layout; a speculators folder names it itself."""
MORE: dict[str, dict[str, Any]] = {"peagle": {"parallel_drafting": True}}
"""What else a layout needs."""


def check_in_vllm(side: OurSide, folder: Path, options: argparse.Namespace) -> list[AgreementRow]:
    """Serve a head from each of its layouts, at temperature 0 and 1, and once with sampled drafts."""
    rows = []
    for layout in (name for name in side.candidate.layouts if name not in HEADS):
        draft = side.export(layout, folder)
        found = _serve(side, options.vllm, draft, layout, (0.0, 1.0), folder / f"{layout}-run")
        # vLLM drafts and counts past the end of an answer.
        greedy = greedy_row(side, [within_text(a) for a in found.answers[0.0]], within_text)
        rows.append(side.row(layout, "vllm", found.version, greedy))
        rows.append(side.row(layout, "vllm", found.version, sampled_row(side, found.answers[1.0])))
    if side.candidate.name == "eagle3":
        # Told to, vLLM draws its drafts from the head's distribution, as our decoder does at temperature 1.
        drawn = {"draft_sample_method": "probabilistic"}
        found = _serve(side, options.vllm, folder / "eagle3", "eagle3", (1.0,), folder / "drawn-run", **drawn)
        sampled = sampled_row(side, found.answers[1.0], greedy_drafts=False)
        rows.append(side.row("eagle3", "vllm", found.version, sampled))
    return rows


def _serve(
    side: OurSide, home: Path, draft: Path, layout: str, temperatures: tuple[float, ...], folder: Path, **how: Any
) -> VllmRun:
    model, speculative = draft, None
    if layout in METHODS:
        own = {"method": METHODS[layout], "model": str(draft.resolve()), "num_speculative_tokens": side.K}
        model, speculative = side.served.folder, own | MORE.get(layout, {}) | how
    eos_ids = side.target.eos_ids
    settings = VllmSettings(home, model.resolve(), speculative, side.context, eos_ids, temperatures)
    return run_vllm(settings, side.requests, folder)
