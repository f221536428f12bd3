"""Traces of drafted and accepted tokens, round by round, of serving engines and of our own decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft, Drafter
from draftsmith.decoder.sampling import Sampling
from draftsmith.target.target import Target


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


class ChainTracer:
    """A drafter of chains that keeps the tokens of its drafts, one row at a time."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.drafts: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start(self, rows: int, capacity: int) -> None:
        """Begin an answer and forget the drafts of the one before."""
        assert rows == 1
        self.drafts = []
        self._drafter.start(rows, capacity)

    def propose(self, state: DecodeState) -> Draft:
        """Draft, and keep the tokens that are no padding."""
        draft = self._drafter.propose(state)
        assert draft.is_chain
        self.drafts.append(tuple(draft.tokens_BN[0, 1 : int(draft.nodes_B[0])].tolist()))
        return draft


def trace_ours(target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling) -> list[EngineAnswer]:
    """Answer every request alone with our decoder; return the answers with the rounds as it counts them (see
    `draftsmith.decoder.answers.Round`): a draft never exceeds what the answer may still gain, and an accepted EOS counts.
    """
    tracer, answers = ChainTracer(drafter), []
    for request in requests:
        (answer,) = decode_batch(target, cast(Drafter, tracer), [request], sampling).generations
        rounds = (EngineRound(d, r.accepted) for d, r in zip(tracer.drafts, answer.rounds, strict=True))
        answers.append(EngineAnswer(request.sample_id, tuple(answer.output_ids), tuple(rounds)))
    return answers
