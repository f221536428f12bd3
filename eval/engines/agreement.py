"""Whether an engine drafts, accepts and answers as our decoder does, prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.decode.decode import Request
from draftsmith.eval.engines.traces import EngineAnswer
from draftsmith.heads.target.target import Target

Gap = Callable[[str, int, int, int], float]
"""(sample id, place in the answer, our token, theirs) -> logit of our token minus that of theirs."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference of one answer.

    kind: "answer" (one side lacks it), "output" (a token), "drafts" (of a round), "accepted" (in a round) or "totals".
    place: index of the token or round. gap: see `Gap`; None where it does not apply.
    """

    sample_id: str
    kind: str
    place: int
    ours: object
    theirs: object
    gap: float | None = None

    def __str__(self) -> str:
        where = {"answer": "", "totals": "", "output": f" at token {self.place}"}.get(
            self.kind, f" in round {self.place}"
        )
        gap = "" if self.gap is None else f", logits {self.gap:.2g} apart"
        return f"{self.sample_id}: {self.kind}{where}: ours {self.ours}, theirs {self.theirs}{gap}"


def compare_answers(
    ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer], gap: Gap | None = None
) -> list[Mismatch]:
    """Return the first difference of every answer that has one; an empty list is agreement.

    Ours must be counted as the engine counts. Rounds are compared where both sides have them, else the totals.
    """
    mine, other = ({answer.sample_id: answer for answer in side} for side in (ours, theirs))
    assert len(mine) == len(ours)
    assert len(other) == len(theirs)
    found = []
    for name in {**mine, **other}:
        if name not in mine or name not in other:
            found.append(Mismatch(name, "answer", 0, name in mine, name in other))
        elif difference := _first_difference(mine[name], other[name], gap):
            found.append(difference)
    return found


def _first_difference(ours: EngineAnswer, theirs: EngineAnswer, gap: Gap | None) -> Mismatch | None:
    """The draft of a round before the token that differs is the cause, so rounds come first."""
    rounds = (
        None if ours.rounds is None or theirs.rounds is None else list(zip(ours.rounds, theirs.rounds, strict=False))
    )
    tokens = _first_token(ours, theirs, gap)
    known = 1
    for place, (a, b) in enumerate(rounds or []):
        if tokens is not None and known > tokens.place:
            break
        if a.drafted != b.drafted:
            return Mismatch(ours.sample_id, "drafts", place, a.drafted, b.drafted)
        if a.accepted != b.accepted:
            return tokens or Mismatch(ours.sample_id, "accepted", place, a.accepted, b.accepted)
        known += a.accepted + 1
    if tokens is not None:
        return tokens
    totals = [(len(x.rounds or ()) if rounds is not None else None, x.drafted, x.accepted) for x in (ours, theirs)]
    return None if totals[0] == totals[1] else Mismatch(ours.sample_id, "totals", 0, totals[0], totals[1])


def _first_token(ours: EngineAnswer, theirs: EngineAnswer, gap: Gap | None) -> Mismatch | None:
    pairs = list(zip(ours.output_ids, theirs.output_ids, strict=False))
    for place, (a, b) in enumerate(pairs):
        if a != b:
            size = None if gap is None else gap(ours.sample_id, place, a, b)
            return Mismatch(ours.sample_id, "output", place, a, b, size)
    if len(ours.output_ids) == len(theirs.output_ids):
        return None
    mine, other = (x.output_ids[len(pairs) :][:1] or None for x in (ours, theirs))
    return Mismatch(ours.sample_id, "output", len(pairs), mine, other)


def logit_gaps(target: Target, requests: Sequence[Request], answers: Sequence[EngineAnswer]) -> Gap:
    """Return how far apart our target's logits of two tokens are after a prompt and the start of our answer to it."""
    texts = {r.sample_id: (r.prompt_ids, a.output_ids) for r, a in zip(requests, answers, strict=True)}

    def gap(sample_id: str, place: int, ours: int, theirs: int) -> float:
        prompt, answer = texts[sample_id]
        ids = torch.tensor([[*prompt, *answer[:place]]], device=target.device)
        with torch.no_grad():
            logits_V = target.head.logits(target.forward(ids).last[0, -1])
        return float(logits_V[ours] - logits_V[theirs])

    return gap
