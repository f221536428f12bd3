"""A head in llama.cpp beside our decoder and simulator."""

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.eval.engines.llama_cpp import DRAFT_MODEL, LlamaServer, ServerSettings, counted_by_llama_cpp
from draftsmith.eval.engines.rows import AgreementRow
from draftsmith.eval.engines.traces import EngineAnswer
from draftsmith.stages.gguf import HEADS, WHOLE, convert
from draftsmith.stages.session import say
from scripts.bench.engines.compare import OurSide, greedy_row

PRE_TOKENIZER = "gpt-2"
"""llama.cpp's name of byte-level BPE. Prompts are sent as token ids, so that it splits no text here."""
QUANTIZED = ("bf16", "q8_0", "q4_0")
"""Draft weights whose cost in acceptance is measured, beside f32, which must agree."""


def check_in_llama_cpp(side: OurSide, folder: Path, options: argparse.Namespace) -> list[AgreementRow]:
    """Serve a candidate at temperature 0, in float32 and, the first head, with quantized drafts; none where llama.cpp has
    no layout for it."""
    candidate, tree = side.candidate, options.llama_cpp / "llama.cpp"
    whole = candidate.head is None or WHOLE in candidate.layouts
    layout = WHOLE if whole else next((name for name in candidate.layouts if name in HEADS), None)
    if layout is None:
        say(f"llama.cpp does not serve {candidate.name}")
        return []
    folder.mkdir(parents=True, exist_ok=True)
    target = folder.parent / "target.gguf"
    if not target.exists():
        convert(tree, side.subject.folder, target, "f32", pre_tokenizer=PRE_TOKENIZER)
    exported, draft = side.export(layout, folder), folder / "draft-f32.gguf"
    if whole:
        convert(tree, exported, draft, "f32", pre_tokenizer=PRE_TOKENIZER)
    else:
        convert(tree, exported, draft, "f32", target=side.subject.folder, pre_tokenizer=PRE_TOKENIZER)
    kind = HEADS.get(layout, DRAFT_MODEL)
    settings = ServerSettings(target, draft, kind, side.K, context=side.context + 1, rounds=True)
    program = options.llama_cpp / "build" / "bin" / "llama-server"
    limits = {request.sample_id: request.max_new_tokens for request in side.requests}

    rows = []
    for weights in ("f32", *(QUANTIZED if candidate.name == "eagle3" else ())):
        file = draft if weights == "f32" else _quantize(options.llama_cpp, draft, weights)
        with LlamaServer(program, replace(settings, draft=file), folder / f"{weights}.log") as server:
            version, ends = server.version(), server.end_ids
            answers = [server.complete(r.sample_id, r.prompt_ids, r.max_new_tokens) for r in side.requests]
        found = greedy_row(side, answers, partial(_as_counted, limits, ends))
        if weights != "f32":
            # Other weights draft other tokens; the target's answers are the same.
            found["differences"] = tuple(d for d in found["differences"] if "output" in d)
        rows.append(side.row(layout, "llama.cpp", version, found, weights=weights))
    return rows


def _as_counted(limits: Mapping[str, int], end_ids: Sequence[int], answer: EngineAnswer) -> EngineAnswer:
    return counted_by_llama_cpp(answer, limits[answer.sample_id], end_ids)


def _quantize(home: Path, draft: Path, weights: str) -> Path:
    """Return the draft in another type, made by llama.cpp's own program."""
    out = draft.with_name(f"draft-{weights}.gguf")
    program = home / "build" / "bin" / "llama-quantize"
    done = subprocess.run([str(program), str(draft), str(out), weights], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"{program} cannot make {weights} of {draft}: {last}.")
    return out
