"""Serve a head with vLLM and with llama.cpp, and compare each with our decoder and simulator."""

import argparse
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

from draftsmith.cli.verify import speculation
from draftsmith.decoder.answers import Generation, Tally, total
from draftsmith.decoder.decode import decode
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError, last_line
from draftsmith.eval.engines.agreement import (
    CLOSE,
    AgreementRow,
    Counts,
    EngineAnswer,
    compare_answers,
    count,
    count_tally,
    logit_gaps,
    ratio_error,
    to_generations,
    trace_ours,
    within_text,
)
from draftsmith.eval.engines.llama_cpp import (
    DRAFT_MODEL,
    LlamaServerProcess,
    ServerSettings,
    as_seen,
    counted_by_llama_cpp,
)
from draftsmith.eval.engines.vllm_client import VllmRun, VllmSettings, run_vllm
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.export.export import export_head
from draftsmith.heads.registry import find_method
from draftsmith.progress import say
from draftsmith.stages.gguf import HEADS, WHOLE, convert
from scripts.bench.engines.served import Candidate, ServedTarget

SAMPLED = Sampling(1.0)
PRE_TOKENIZER = "gpt-2"
"""llama.cpp's name of byte-level BPE. Prompts are sent as token ids, so that it splits no text here."""
QUANTIZED = ("bf16", "q8_0", "q4_0")
"""Draft weights whose cost in acceptance is measured, beside f32, which must agree."""


@dataclass(frozen=True)
class Refusal:
    """A head that an engine of some version did not serve. why: in the engine's own words."""

    head: str
    method: str
    layout: str
    engine: str
    version: str
    why: str
    agrees: ClassVar[bool] = False


Outcome = AgreementRow | Refusal


class OurSide:
    """Our decoder's and simulator's figures for a head, computed once for all layouts and engines.

    num_speculative_tokens: K; a head with a shorter maximum draft length drafts that many. lock: held by what runs the target
    or the head, which serve one caller at a time, while engines are asked from several threads.
    """

    def __init__(self, served: ServedTarget, candidate: Candidate, num_speculative_tokens: int) -> None:
        self.served, self.candidate = served, candidate
        self.K = candidate.head.clamp_draft_length(num_speculative_tokens)
        self.target, self.requests, self.lock = served.target, served.requests, RLock()
        self.greedy = trace_ours(self.target, self.drafter(greedy_drafts=True), self.requests, Sampling(0.0))
        self._decoded: dict[bool, Counts] = {}

    def drafter(self, greedy_drafts: bool) -> Drafter:
        """Return the head's drafter, which drafts greedily as engines do, or from the head's distribution."""
        head = self.candidate.head
        return find_method(head.method).make_drafter(head, self.K, greedy_drafts=greedy_drafts)

    @property
    def context(self) -> int:
        """Tokens of the longest prompt, its answer and a draft behind it."""
        longest = max(len(r.prompt_ids) + r.max_new_tokens for r in self.requests)
        return min(self.target.context_length, longest + self.K + 1)

    def export(self, layout: str, folder: Path) -> Path:
        """Export the head to a layout, in float32; return the folder."""
        head, target, k = self.candidate.head, self.target, self.K
        with self.lock:
            return export_head(head, target, folder / layout, layout=layout, dtype="float32", num_speculative_tokens=k)

    def simulate(self, generations: Sequence[Generation], sampling: Sampling, greedy_drafts: bool) -> list[Tally]:
        """Simulate the drafts on finished answers; return the expected tally of every answer."""
        found = head_simulator(self.candidate.head, greedy_drafts=greedy_drafts)(
            self.target, generations, sampling, self.K
        )
        return [tallies[self.K - 1] for tallies in found.tallies]

    def decoded(self, greedy_drafts: bool) -> Counts:
        """Count our own decoder's rounds at temperature 1."""
        if greedy_drafts not in self._decoded:
            keyed = [replace(request, key=request.key + 2) for request in self.requests]
            answers = trace_ours(self.target, self.drafter(greedy_drafts), keyed, SAMPLED)
            self._decoded[greedy_drafts] = count([within_text(a) for a in answers])
        return self._decoded[greedy_drafts]

    def refusal(self, layout: str, engine: str, home: Path, error: UserError) -> Refusal:
        """Return what became of a head that an engine did not serve. home: of the engine; its files or its name tell the version."""
        names = [*(path.name for path in home.glob("lib/python*/site-packages/vllm*.dist-info")), home.name]
        version = next((found[0] for name in names if (found := re.search(r"\d+(\.\d+)+", name))), "unknown")
        return Refusal(self.candidate.name, self.candidate.head.method, layout, engine, version, str(error))

    def row(self, layout: str, engine: str, version: str, found: dict[str, Any], **other: Any) -> AgreementRow:
        """Return a row of the table. found: from `greedy_row` or `sampled_row`."""
        return AgreementRow(
            head=self.candidate.name,
            method=self.candidate.head.method,
            layout=layout,
            engine=engine,
            version=version,
            num_speculative_tokens=self.K,
            answers=len(self.requests),
            **{"weights": "f32", "drafts": "greedy", **found, **other},
        )


def greedy_row(side: OurSide, ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer]) -> dict[str, Any]:
    """Compare answers at temperature 0, token for token and round for round. ours: with rounds as the engine counts them."""
    with side.lock:
        found = compare_answers(ours, theirs, logit_gaps(side.target, side.requests, ours))
        simulated = side.simulate(to_generations(side.requests, side.greedy), Sampling(0.0), greedy_drafts=True)
    close = [m for m in found if m.kind == "output" and m.gap is not None and abs(m.gap) < CLOSE]
    mine, others = [within_text(a) for a in ours], [within_text(a) for a in theirs]
    return {
        "temperature": 0.0,
        "equal_answers": sum(a.output_ids == b.output_ids for a, b in zip(ours, theirs, strict=True)),
        # With the same draft, and as many of it accepted.
        "equal_rounds": sum(
            x == y for a, b in zip(mine, others, strict=True) for x, y in zip(a.rounds, b.rounds, strict=False)
        ),
        "ours": count(mine),
        "theirs": count(others),
        "decoded": count([within_text(a) for a in side.greedy]),
        "simulated": total(simulated, side.K).tau,
        "differences": tuple(str(m) for m in found if m not in close),
        "close_calls": tuple(str(m) for m in close),
    }


def sampled_row(side: OurSide, answers: Sequence[EngineAnswer], *, greedy_drafts: bool = True) -> dict[str, Any]:
    """Compare sampled answers: with the simulator on the same text, where greedy drafts leave nothing to chance, and with
    the simulator on other answers of the target, within sampling error."""
    theirs = [within_text(a) for a in answers]
    with side.lock:
        same_text = side.simulate(to_generations(side.requests, theirs), SAMPLED, greedy_drafts)
        keyed = [replace(request, key=request.key + 1) for request in side.requests]
        found = {g.request.sample_id: g for g in decode(side.target, TargetAlone(), keyed, SAMPLED, 16)}
        elsewhere = side.simulate([found[request.sample_id] for request in side.requests], SAMPLED, greedy_drafts)
        decoded = side.decoded(greedy_drafts)
    error = ratio_error([(t.tokens, t.rounds) for t in elsewhere])
    simulated, engine = total(elsewhere, side.K).tau, count(theirs).tau
    z = None
    if simulated is not None and engine is not None:
        own = ratio_error([(len(a.output_ids) - 1, len(a.rounds)) for a in theirs])
        z = (engine - simulated) / (error**2 + own**2) ** 0.5
    differences = []
    for answer, tally in zip(theirs, same_text, strict=True) if greedy_drafts else ():
        counted, expected = count([answer]), count_tally(tally)
        if (counted.rounds, counted.accepted) != (expected.rounds, expected.accepted):
            differences.append(f"{answer.sample_id}: {counted}, simulated on this text {expected}")
    return {
        "temperature": 1.0,
        "drafts": "greedy" if greedy_drafts else "sampled",
        "equal_answers": None,
        "equal_rounds": None,
        "ours": count_tally(total(same_text, side.K)),
        "theirs": count(theirs),
        "decoded": decoded,
        "simulated": simulated,
        "simulated_se": error,
        "z": z,
        "differences": tuple(differences),
    }


def check_in_vllm(side: OurSide, folder: Path, options: argparse.Namespace) -> list[Outcome]:
    """Serve a head from each of its layouts, at temperature 0 and 1, and once with sampled drafts."""
    rows: list[Outcome] = []
    for layout in (name for name in side.candidate.layouts if name not in HEADS):
        draft = side.export(layout, folder)
        try:
            found = _serve(side, options.vllm, draft, layout, (0.0, 1.0), folder / f"{layout}-run")
        except UserError as error:
            rows.append(side.refusal(layout, "vllm", options.vllm, error))
            continue
        # vLLM drafts and counts past the end of an answer.
        ours, theirs = ([within_text(a) for a in answers] for answers in (side.greedy, found.answers[0.0]))
        greedy = greedy_row(side, ours, theirs)
        rows.append(side.row(layout, "vllm", found.version, greedy))
        rows.append(side.row(layout, "vllm", found.version, sampled_row(side, found.answers[1.0])))
    if side.candidate.name == "eagle3" and all(isinstance(row, AgreementRow) for row in rows):
        # Told to, vLLM draws its drafts from the head's distribution, as our decoder does at temperature 1.
        drawn = {"draft_sample_method": "probabilistic"}
        found = _serve(side, options.vllm, folder / "eagle3", "eagle3", (1.0,), folder / "drawn-run", **drawn)
        sampled = sampled_row(side, found.answers[1.0], greedy_drafts=False)
        rows.append(side.row("eagle3", "vllm", found.version, sampled))
    return rows


def _serve(
    side: OurSide, home: Path, draft: Path, layout: str, temperatures: tuple[float, ...], folder: Path, **how: Any
) -> VllmRun:
    model, speculative = speculation(layout, draft, side.served.folder, side.K)
    speculative = speculative and speculative | how
    eos_ids = side.target.eos_ids
    # Where a draft behind the longest text of a batch would not fit, vLLM drafts for none of its rows.
    context = min(side.target.context_length, side.context + side.K)
    settings = VllmSettings(home, model, speculative, context, eos_ids, temperatures)
    return run_vllm(settings, side.requests, folder)


def check_in_llama_cpp(side: OurSide, folder: Path, options: argparse.Namespace) -> list[Outcome]:
    """Serve a head at temperature 0 in float32, the first one quantized too; no row where llama.cpp has no layout for it."""
    layout = next((name for name in side.candidate.layouts if name in (*HEADS, WHOLE)), None)
    if layout is None:
        say(f"llama.cpp does not serve {side.candidate.name}")
        return []
    try:
        candidate, tree = side.candidate, options.llama_cpp / "llama.cpp"
        folder.mkdir(parents=True, exist_ok=True)
        target = side.served.gguf or folder.parent / "target.gguf"
        if not target.exists():
            convert(tree, side.served.folder, target, "f32", pre_tokenizer=PRE_TOKENIZER)
        exported, draft = side.export(layout, folder), folder / "draft-f32.gguf"
        beside = None if layout == WHOLE else side.served.folder
        convert(tree, exported, draft, "f32", target=beside, pre_tokenizer=PRE_TOKENIZER)
        settings = ServerSettings(target, draft, HEADS.get(layout, DRAFT_MODEL), side.K, context=side.context + 1)
        program = options.llama_cpp / "build" / "bin" / "llama-server"
        limits = {request.sample_id: request.max_new_tokens for request in side.requests}

        rows: list[Outcome] = []
        for weights in ("f32", *(QUANTIZED if candidate.name == "eagle3" else ())):
            file = draft if weights == "f32" else _quantize(options.llama_cpp, draft, weights)
            with LlamaServerProcess(program, replace(settings, draft=file), folder / f"{weights}.log") as server:
                version, ends = server.version(), server.end_ids
                answers = [server.complete(r.sample_id, r.prompt_ids, r.max_new_tokens) for r in side.requests]
            ours = [as_seen(counted_by_llama_cpp(a, limits[a.sample_id], ends), answers) for a in side.greedy]
            found = greedy_row(side, ours, answers)
            if weights != "f32":
                # Other weights draft other tokens; the target's answers are the same.
                found["differences"] = tuple(d for d in found["differences"] if "output" in d)
            rows.append(side.row(layout, "llama.cpp", version, found, weights=weights))
        return rows
    except UserError as error:
        return [side.refusal(layout, "llama.cpp", options.llama_cpp, error)]


def _quantize(home: Path, draft: Path, weights: str) -> Path:
    """Return the draft in another type, made by llama.cpp's own program."""
    out = draft.with_name(f"draft-{weights}.gguf")
    program = home / "build" / "bin" / "llama-quantize"
    done = subprocess.run([str(program), str(draft), str(out), weights], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{program} cannot make {weights} of {draft}: {last_line(done.stderr)}.")
    return out
