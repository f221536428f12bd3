"""What was drafted and accepted, round by round: written by every engine's runner and by our own decoder alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftsmith.eval.decode.decode import Request, decode_batch
from draftsmith.eval.decode.draft import DecodeState, Draft, Drafter, Prompts
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.heads.target.target import Target


@dataclass(frozen=True)
class EngineRound:
    """One verification: the tokens of the draft (a chain), and how many of them the engine counts as accepted."""

    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class EngineAnswer:
    """An answer: ids up to and including EOS, and the draft tokens as the engine counts them. rounds: None where it gives
    totals only."""

    sample_id: str
    output_ids: tuple[int, ...]
    rounds: tuple[EngineRound, ...] | None
    drafted: int
    accepted: int

    @classmethod
    def of_rounds(cls, sample_id: str, output_ids: Sequence[int], rounds: Sequence[EngineRound]) -> "EngineAnswer":
        """Build an answer whose totals are those of its rounds."""
        drafted, accepted = sum(len(r.drafted) for r in rounds), sum(r.accepted for r in rounds)
        return cls(sample_id, tuple(output_ids), tuple(rounds), drafted, accepted)


class Recorder:
    """A drafter that also keeps the tokens of its drafts; for one row, whose drafts are chains."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.layer_ids = drafter.name, drafter.layer_ids
        self.max_nodes, self.num_speculative_tokens = drafter.max_nodes, drafter.num_speculative_tokens
        self.drafts: list[tuple[int, ...]] = []

    def start(self, rows: int, capacity: int) -> None:
        """Begin an answer and forget the drafts of the one before."""
        assert rows == 1
        self.drafts = []
        self.drafter.start(rows, capacity)

    def admit(self, prompts: Prompts) -> None:
        """Read the prompt."""
        self.drafter.admit(prompts)

    def propose(self, state: DecodeState) -> Draft:
        """Draft, and keep the tokens that are no padding."""
        draft = self.drafter.propose(state)
        assert draft.is_chain
        self.drafts.append(tuple(draft.tokens_BN[0, 1 : int(draft.count_B[0])].tolist()))
        return draft

    def select(self, rows: Tensor) -> None:
        """Keep the only row."""
        self.drafter.select(rows)


def trace_ours(target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling) -> list[EngineAnswer]:
    """Answer every request alone with our decoder; the rounds as it counts them (see `draftsmith.eval.decode.answers.Round`): a
    draft is as long as the answer may still become, and an accepted EOS counts."""
    recorder, answers = Recorder(drafter), []
    for request in requests:
        (answer,) = decode_batch(target, recorder, [request], sampling).generations
        rounds = [EngineRound(d, r.accepted) for d, r in zip(recorder.drafts, answer.rounds, strict=True)]
        answers.append(EngineAnswer.of_rounds(request.sample_id, answer.output_ids, rounds))
    return answers
