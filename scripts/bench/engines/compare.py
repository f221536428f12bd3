"""Run our decoder and simulator for the engine check, and compare them with an engine at temperature 0 and 1."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

from draftsmith.eval.decode.answers import Generation, Tally, total
from draftsmith.eval.decode.decode import decode
from draftsmith.eval.decode.draft import Drafter, TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.engines.agreement import compare_answers, logit_gaps
from draftsmith.eval.engines.rows import (
    CLOSE,
    AgreementRow,
    Counts,
    count,
    count_tally,
    equal_rounds,
    per_answer,
    ratio_error,
    to_generations,
    within_text,
)
from draftsmith.eval.engines.traces import EngineAnswer, trace_ours
from draftsmith.eval.simulate.texts import simulate_generations
from draftsmith.heads.export.export import export_head
from draftsmith.heads.registry import find_method
from scripts.bench.engines.served import Candidate, ServedTarget

SAMPLED = Sampling(1.0)


class OurSide:
    """Our decoder's and simulator's figures for a head, computed once for all layouts and engines.

    num_speculative_tokens: K; a head with a shorter maximum draft length drafts that many. lock: held by what runs the target
    or the head, which serve one caller at a time, while engines are asked from several threads.
    """

    def __init__(self, served: ServedTarget, candidate: Candidate, num_speculative_tokens: int) -> None:
        self.served, self.candidate = served, candidate
        self.K = min(num_speculative_tokens, candidate.head.max_speculative_tokens or num_speculative_tokens)
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
        found = simulate_generations(
            self.target, self.candidate.head, generations, sampling, self.K, greedy_drafts=greedy_drafts
        )
        return [tallies[self.K - 1] for tallies in found.tallies]

    @cached_property
    def sampled_by_target(self) -> list[Generation]:
        """Our target's own answers at temperature 1, in the order of the requests."""
        keyed = [replace(request, key=request.key + 1) for request in self.requests]
        found = {g.request.sample_id: g for g in decode(self.target, TargetAlone(), keyed, SAMPLED, 16)}
        return [found[request.sample_id] for request in self.requests]

    def decoded(self, greedy_drafts: bool) -> Counts:
        """Count our own decoder's rounds at temperature 1."""
        if greedy_drafts not in self._decoded:
            keyed = [replace(request, key=request.key + 2) for request in self.requests]
            answers = trace_ours(self.target, self.drafter(greedy_drafts), keyed, SAMPLED)
            self._decoded[greedy_drafts] = count([within_text(a) for a in answers])
        return self._decoded[greedy_drafts]

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
        "equal_rounds": equal_rounds(mine, others),
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
        elsewhere = side.simulate(side.sampled_by_target, SAMPLED, greedy_drafts)
        decoded = side.decoded(greedy_drafts)
    error = ratio_error([(t.tokens, t.rounds) for t in elsewhere])
    simulated, engine = total(elsewhere, side.K).tau, count(theirs).tau
    z = None
    if simulated is not None and engine is not None:
        z = (engine - simulated) / (error**2 + ratio_error(per_answer(theirs)) ** 2) ** 0.5
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
