"""Serve a head with vLLM and with llama.cpp, and compare each with our decoder and simulator."""

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.engines.llama_cpp import DRAFT_MODEL, LlamaServer, ServerSettings, counted_by_llama_cpp
from draftsmith.eval.engines.rows import AgreementRow, within_text
from draftsmith.eval.engines.vllm_client import VllmRun, VllmSettings, run_vllm
from draftsmith.stages.gguf import HEADS, WHOLE, convert
from draftsmith.stages.session import say
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
PRE_TOKENIZER = "gpt-2"
"""llama.cpp's name of byte-level BPE. Prompts are sent as token ids, so that it splits no text here."""
QUANTIZED = ("bf16", "q8_0", "q4_0")
"""Draft weights whose cost in acceptance is measured, beside f32, which must agree."""


def check_in_vllm(side: OurSide, folder: Path, options: argparse.Namespace) -> list[AgreementRow]:
    """Serve a head from each of its layouts, at temperature 0 and 1, and once with sampled drafts."""
    rows = []
    for layout in (name for name in side.candidate.layouts if name not in HEADS):
        draft = side.export(layout, folder)
        found = _serve(side, options.vllm, draft, layout, (0.0, 1.0), folder / f"{layout}-run")
        # vLLM drafts and counts past the end of an answer.
        ours, theirs = ([within_text(a) for a in answers] for answers in (side.greedy, found.answers[0.0]))
        greedy = greedy_row(side, ours, theirs)
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


def check_in_llama_cpp(side: OurSide, folder: Path, options: argparse.Namespace) -> list[AgreementRow]:
    """Serve a head at temperature 0 in float32, and the first one with quantized drafts too; return no row where llama.cpp
    has no layout for it."""
    candidate, tree = side.candidate, options.llama_cpp / "llama.cpp"
    layout = next((name for name in candidate.layouts if name in (*HEADS, WHOLE)), None)
    if layout is None:
        say(f"llama.cpp does not serve {candidate.name}")
        return []
    folder.mkdir(parents=True, exist_ok=True)
    target = folder.parent / "target.gguf"
    if not target.exists():
        convert(tree, side.served.folder, target, "f32", pre_tokenizer=PRE_TOKENIZER)
    exported, draft = side.export(layout, folder), folder / "draft-f32.gguf"
    beside = None if layout == WHOLE else side.served.folder
    convert(tree, exported, draft, "f32", target=beside, pre_tokenizer=PRE_TOKENIZER)
    settings = ServerSettings(target, draft, HEADS.get(layout, DRAFT_MODEL), side.K, context=side.context + 1)
    program = options.llama_cpp / "build" / "bin" / "llama-server"
    limits = {request.sample_id: request.max_new_tokens for request in side.requests}

    rows = []
    for weights in ("f32", *(QUANTIZED if candidate.name == "eagle3" else ())):
        file = draft if weights == "f32" else _quantize(options.llama_cpp, draft, weights)
        with LlamaServer(program, replace(settings, draft=file), folder / f"{weights}.log") as server:
            version, ends = server.version(), server.end_ids
            answers = [server.complete(r.sample_id, r.prompt_ids, r.max_new_tokens) for r in side.requests]
        ours = [counted_by_llama_cpp(a, limits[a.sample_id], ends) for a in side.greedy]
        found = greedy_row(side, ours, answers)
        if weights != "f32":
            # Other weights draft other tokens; the target's answers are the same.
            found["differences"] = tuple(d for d in found["differences"] if "output" in d)
        rows.append(side.row(layout, "llama.cpp", version, found, weights=weights))
    return rows


def _quantize(home: Path, draft: Path, weights: str) -> Path:
    """Return the draft in another type, made by llama.cpp's own program."""
    out = draft.with_name(f"draft-{weights}.gguf")
    program = home / "build" / "bin" / "llama-quantize"
    done = subprocess.run([str(program), str(draft), str(out), weights], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"{program} cannot make {weights} of {draft}: {last}.")
    return out
