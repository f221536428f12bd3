"""What engines and papers call acceptance, from one set of counts.

They count the same rounds and differ in three things: whether the bonus token belongs to a round's length, what the tokens are divided
by, and whether a position's share is of all rounds or of those that reached it. The names were read in the code of vLLM
(v1/spec_decode/metrics.py), SGLang (its scheduler and tokenizer manager), TensorRT-LLM (iteration statistics; those of an answer in the
client that reads them, aiperf), llama.cpp (server-context.cpp) and Spec-Bench (evaluation/speed.py); n-alpha is EAGLE's (Li et al., 2024).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from draftsmith.eval.results.intervals import Interval, bootstrap_tau


@dataclass(frozen=True)
class Counts:
    """What was drafted and accepted, of one answer or of many.

    rounds: target passes over a draft. accepted: drafted tokens that stayed, bonus tokens excluded, also those that an answer's end cut
    off. drafted: None where it is not told. by_length: rounds that accepted exactly 0, 1, 2, ... tokens, None where it is not told.
    tokens: of the answers, each one's first included, None where it is not told. rounded: computed from figures that were printed rounded.
    """

    rounds: float
    accepted: float
    drafted: float | None = None
    by_length: tuple[float, ...] | None = None
    tokens: int | None = None
    rounded: bool = False

    @classmethod
    def of_rounds(cls, accepted: Sequence[int], tokens: int | None = None) -> "Counts":
        """Return the counts of rounds that accepted so many tokens each."""
        lengths = tuple(float(sum(n == length for n in accepted)) for length in range(max(accepted, default=0) + 1))
        return cls(len(accepted), sum(accepted), None, lengths, tokens)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            None if self.drafted is None or other.drafted is None else self.drafted + other.drafted,
            _summed(self.by_length, other.by_length),
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
            self.rounded or other.rounded,
        )

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted after `before`, of counters that go up alone."""
        drafted = None if self.drafted is None or before.drafted is None else self.drafted - before.drafted
        fewer = before.by_length and tuple(-n for n in before.by_length)
        return Counts(
            self.rounds - before.rounds, self.accepted - before.accepted, drafted, _summed(self.by_length, fewer)
        )

    @property
    def tau(self) -> float | None:
        """Tokens of a round, its bonus token included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def accepted_per_round(self) -> float | None:
        """Accepted tokens of a round."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens of the answers over their rounds: each answer's first token, which reading the prompt gave, counts among them, and what
        was cut off does not."""
        return self.tokens / self.rounds if self.tokens is not None and self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_at(self) -> tuple[float, ...] | None:
        """The share of all rounds that accepted the i-th drafted token."""
        return self.by_length and tuple(n / self.rounds for n in self._reached[1:])

    @property
    def alpha_at(self) -> tuple[float, ...] | None:
        """Of the rounds that accepted all before it, the share that accepted the i-th drafted token."""
        reached = self._reached
        return self.by_length and tuple(after / before for before, after in pairwise(reached) if before)

    @property
    def _reached(self) -> list[float]:
        """The rounds that accepted at least 0, 1, 2, ... tokens."""
        return list(accumulate(reversed(self.by_length or ())))[::-1]


def _summed(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if one is None or other is None:
        return None
    most = max(len(one), len(other))
    return tuple(a + b for a, b in zip(*((*part, *(0.0,) * (most - len(part))) for part in (one, other)), strict=True))


@dataclass(frozen=True)
class Definition:
    """A ratio of counts. what: in words. names: who calls it how. of: the ratio. parts: its numerator and denominator in the counts of one
    answer, for an interval over answers; None where it has none."""

    what: str
    names: str
    of: Callable[[Counts], float | tuple[float, ...] | None]
    parts: Callable[[Counts], tuple[float, float] | None] = lambda counts: None

    def interval(self, answers: Sequence[Counts]) -> Interval | None:
        """Return the 95% interval of a ratio, by resampling answers; None of too few, or where they do not tell it."""
        pairs = [self.parts(one) for one in answers]
        told = [pair for pair in pairs if pair is not None]
        return bootstrap_tau(told) if len(told) == len(pairs) else None


LEDGER = (
    Definition(
        "tokens of a round, bonus token included",
        "draftsmith: tau; vLLM: mean acceptance length; SGLang: accept len (log, /metrics); TensorRT-LLM: acceptanceLength; llama.cpp: mean "
        "len; Spec-Bench: #Mean accepted tokens; EAGLE: average acceptance length",
        lambda counts: counts.tau,
        lambda counts: (counts.accepted + counts.rounds, counts.rounds),
    ),
    Definition(
        "accepted tokens of a round, without it",
        "draftsmith: num_accepted; vLLM: accepted over drafts; TensorRT-LLM: accepted over requests with drafts",
        lambda counts: counts.accepted_per_round,
        lambda counts: (counts.accepted, counts.rounds),
    ),
    Definition(
        "tokens of an answer over its rounds",
        "SGLang: spec_accept_length of an answer (counts the token that the prompt's pass gave)",
        lambda counts: counts.tokens_per_pass,
        lambda counts: None if counts.tokens is None else (counts.tokens, counts.rounds),
    ),
    Definition(
        "accepted of drafted tokens",
        "draftsmith: acceptance_rate; vLLM: draft acceptance rate; SGLang: accept rate; TensorRT-LLM: acceptance_rate; llama.cpp: draft "
        "acceptance",
        lambda counts: counts.acceptance_rate,
        lambda counts: None if counts.drafted is None else (counts.accepted, counts.drafted),
    ),
    Definition(
        "share of rounds that accepted token 1, 2, ...",
        "draftsmith: acceptance_at; vLLM: per-position acceptance rate; llama.cpp: acc per pos",
        lambda counts: counts.acceptance_at,
    ),
    Definition(
        "the same, of the rounds that came to it",
        "draftsmith: alpha_at; EAGLE: n-alpha",
        lambda counts: counts.alpha_at,
    ),
)
"""Every definition, in the order in which they are shown."""
