"""Compare what an engine drafted, accepted and answered with our decoder, prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.decode.answers import Request
from draftsmith.eval.engines.traces import EngineAnswer
from draftsmith.heads.target.target import Target

Gap = Callable[[str, int, int, int], float]
"""(sample id, place in the answer, our token, theirs) -> logit of our token minus that of theirs."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference of one answer.

    kind: "output" (a token), "drafts" (of a round), "accepted" (in a round) or "rounds" (how many there are). place: index of
    the token or round. gap: see `Gap`; None where it does not apply.
    """

    sample_id: str
    kind: str
    place: int
    ours: object
    theirs: object
    gap: float | None = None

    def __str__(self) -> str:
        where = {"rounds": "", "output": f" at token {self.place}"}.get(self.kind, f" in round {self.place}")
        gap = "" if self.gap is None else f", logits {self.gap:.2g} apart"
        return f"{self.sample_id}: {self.kind}{where}: ours {self.ours}, theirs {self.theirs}{gap}"


def compare_answers(
    ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer], gap: Gap | None = None
) -> list[Mismatch]:
    """Return the first difference of every answer that has one; an empty list is agreement.

    Both sides answer the same prompts in the same order, and ours must be counted as the engine counts.
    """
    assert [a.sample_id for a in ours] == [b.sample_id for b in theirs]
    differences = (_first_difference(a, b, gap) for a, b in zip(ours, theirs, strict=True))
    return [difference for difference in differences if difference]


def _first_difference(ours: EngineAnswer, theirs: EngineAnswer, gap: Gap | None) -> Mismatch | None:
    """Return what differs first. A draft that differs before the token does is the cause, so rounds come first."""
    tokens = _first_token(ours, theirs, gap)
    known = 1
    for place, (a, b) in enumerate(zip(ours.rounds, theirs.rounds, strict=False)):
        if tokens is not None and known > tokens.place:
            break
        if a.drafted != b.drafted:
            return Mismatch(ours.sample_id, "drafts", place, a.drafted, b.drafted)
        if a.accepted != b.accepted:
            return tokens or Mismatch(ours.sample_id, "accepted", place, a.accepted, b.accepted)
        known += a.accepted + 1
    if tokens is not None or len(ours.rounds) == len(theirs.rounds):
        return tokens
    return Mismatch(ours.sample_id, "rounds", 0, len(ours.rounds), len(theirs.rounds))


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
