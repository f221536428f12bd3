"""Compare what an engine drafted, accepted and answered, round by round, with our decoder: prompt by prompt, and counted in rows.

Everything is counted within the answers: what an engine drafts or accepts past the end of a text is left out, on both
sides alike (engines differ there, and no user sees it).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.decoder.answers import Generation, Request, Round, Tally
from draftsmith.decoder.draft import Drafter
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.conformance.recorded_drafts import record
from draftsmith.target.target import Target

Gap = Callable[[str, int, int, int], float]
"""(sample id, place in the answer, our token, theirs) -> logit of our token minus that of theirs."""
CLOSE = 1e-4
"""Logits this close may change places between two implementations in float32."""


@dataclass(frozen=True)
class EngineRound:
    """One verification: the tokens of the draft (a chain), and how many of them the engine counts as accepted."""

    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class EngineAnswer:
    """An answer: ids up to and including EOS, and its rounds as the engine counts them."""

    sample_id: str
    output_ids: tuple[int, ...]
    rounds: tuple[EngineRound, ...]

    @property
    def drafted(self) -> int:
        """Draft tokens of all rounds."""
        return sum(len(r.drafted) for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all rounds."""
        return sum(r.accepted for r in self.rounds)


def trace_ours(target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling) -> list[EngineAnswer]:
    """Answer every request alone with our decoder; return the answers with the rounds as it counts them (see
    `draftsmith.decoder.answers.Round`): a draft never exceeds what the answer may still gain, and an accepted EOS counts.
    """
    answers = []
    for request in requests:
        decoded, (drafts,) = record(target, drafter, [request], sampling)
        (answer,) = decoded.generations
        rounds = (EngineRound(d.tokens, r.accepted) for d, r in zip(drafts, answer.rounds, strict=True))
        answers.append(EngineAnswer(request.sample_id, tuple(answer.output_ids), tuple(rounds)))
    return answers


@dataclass(frozen=True)
class Counts:
    """tokens: after each answer's first. rounds: passes of the target over them."""

    tokens: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def tau(self) -> float | None:
        """Tokens per round."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass(frozen=True)
class AgreementRow:
    """A head in an engine, compared with our decoder and simulator.

    weights: of the draft in the engine. drafts: "greedy" or "sampled". equal_answers: those with the same ids as ours, None
    where texts are sampled. equal_rounds: of `ours.rounds`, those with the same draft tokens and as many accepted; None
    where texts are sampled. ours: decoded by us on the same prompts (temperature 0), or what our simulator says of the
    engine's own text (above it). decoded: by us; above temperature 0 other texts. simulated: tau by our simulator on our
    target's own answers, its standard error in simulated_se. z: engine minus simulated, in standard errors of the difference.
    differences: what does not agree; close_calls: first divergences between logits less than CLOSE apart.
    """

    head: str
    method: str
    layout: str
    engine: str
    version: str
    weights: str
    temperature: float
    num_speculative_tokens: int
    drafts: str
    answers: int
    equal_answers: int | None
    equal_rounds: int | None
    ours: Counts
    theirs: Counts
    decoded: Counts
    simulated: float | None
    simulated_se: float | None = None
    z: float | None = None
    differences: tuple[str, ...] = ()
    close_calls: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing but close calls differs, and sampled acceptance is within three standard errors."""
        return not self.differences and (self.z is None or abs(self.z) <= 3)


def within_text(answer: EngineAnswer) -> EngineAnswer:
    """Return the answer with its rounds cut where its text ends, and a round without drafts for every token that came
    without one. A last token that was drafted counts as accepted, also where the engine takes an end for the target's own.
    """
    known, rounds = 1, []
    for round_ in answer.rounds:
        left = len(answer.output_ids) - known
        if left <= 0:
            break
        accepted = min(round_.accepted, left)
        if accepted + 1 == left and round_.drafted[accepted:left] == answer.output_ids[-1:]:
            accepted += 1
        rounds.append(EngineRound(round_.drafted[:left], accepted))
        known += round_.accepted + 1
    rounds += [EngineRound((), 0)] * max(0, len(answer.output_ids) - known)
    return EngineAnswer(answer.sample_id, answer.output_ids, tuple(rounds))


def count(answers: Sequence[EngineAnswer]) -> Counts:
    """Count answers that `within_text` returned."""
    parts = [(len(a.output_ids) - 1, len(a.rounds), a.drafted, a.accepted) for a in answers]
    return Counts(*(sum(numbers) for numbers in zip(*parts, strict=True))) if parts else Counts(0, 0, 0, 0)


def count_tally(tally: Tally) -> Counts:
    """Return a simulated tally as counts, whole where the text decides what is accepted."""
    return Counts(round(tally.tokens), round(tally.rounds), round(tally.drafted), round(float(tally.accepted_K.sum())))


def to_generations(requests: Sequence[Request], answers: Sequence[EngineAnswer]) -> list[Generation]:
    """Return an engine's answers as our decoder's, for the simulator."""
    generations = []
    for request, answer in zip(requests, answers, strict=True):
        assert request.sample_id == answer.sample_id
        known, rounds = 1, []
        for r in answer.rounds:
            rounds.append(Round(known - 1, len(r.drafted), r.accepted))
            known += r.accepted + 1
        ended = "length" if len(answer.output_ids) == request.max_new_tokens else "eos"
        generations.append(Generation(request, list(answer.output_ids), ended, rounds))
    return generations


def ratio_error(tallies: Sequence[tuple[float, float]]) -> float:
    """Return the standard error of sum(tokens) / sum(rounds) over answers that are independent (delta method)."""
    n, rounds = len(tallies), sum(r for _, r in tallies)
    if n < 2 or not rounds:
        return math.nan
    tau = sum(t for t, _ in tallies) / rounds
    return math.sqrt(sum((t - tau * r) ** 2 for t, r in tallies) * n / (n - 1)) / rounds


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
