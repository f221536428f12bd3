"""Requests, the answers of a decoder, and the counts of accepted tokens that every acceptance figure is computed from.

Counts are whole numbers when decoded and expectations when simulated. K is num_speculative_tokens.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise

import numpy as np

from draftsmith.decoder.sampling import row_key


@dataclass(frozen=True)
class Request:
    """A prompt to answer.

    Args:
        sample_id: names the prompt in results and errors.
        slice: any word that groups prompts in reports.
        prompt_ids: token ids, the generation prompt included.
        max_new_tokens: most tokens of the answer, the end token included.
        key: of its random numbers; equal keys give equal sampled answers.
        ignore_eos: go on to `max_new_tokens`, past end tokens.
    """

    sample_id: str
    slice: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    key: int = 0
    ignore_eos: bool = False

    @classmethod
    def seeded(
        cls, sample_id: str, slice_name: str, prompt_ids: Sequence[int], max_new_tokens: int, seed: int
    ) -> "Request":
        """Build a request whose random numbers depend on `seed` and `sample_id` only."""
        return cls(sample_id, slice_name, tuple(prompt_ids), max_new_tokens, row_key(seed, sample_id))


@dataclass(frozen=True)
class Round:
    """A round, which is one target pass over a draft.

    root: index in the output of the last token known before it. drafted: tokens proposed. accepted: drafted tokens that
    were emitted (those behind EOS do not count). levels: tokens proposed at each depth of a tree, empty for a chain.
    """

    root: int
    drafted: int
    accepted: int
    levels: tuple[int, ...] = ()


@dataclass
class Generation:
    """An answer, which grows while it is decoded.

    Args:
        request: what it answers.
        output_ids: its token ids, up to and including the end token.
        finish_reason: "eos" or "length"; empty before it ends.
        rounds: the target passes over drafts that it took.
        ttft_s: seconds of the pass that read its prompt, with the other prompts of that pass, and gave the first token.
        emitted_at: readings of the clock, in seconds, when the first token and then the tokens of each round were there.
    """

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    ttft_s: float = 0.0
    emitted_at: list[float] = field(default_factory=list, compare=False)

    @property
    def tokens_read(self) -> int:
        """Tokens that the target has read: all but the last one emitted, which is the root of the next draft."""
        return len(self.request.prompt_ids) + len(self.output_ids) - 1

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.output_ids)

    @property
    def waits(self) -> list[float]:
        """Seconds that somebody who reads along waits for each token after the first: those of a round come together, so that all
        but its first take 0. Empty where the clock was not read."""
        roots, waits = [round_.root for round_ in self.rounds], []
        ends = [*roots[1:], len(self.output_ids) - 1]
        for root, end, (before, now) in zip(roots, ends, pairwise(self.emitted_at), strict=False):
            waits += [now - before, *[0.0] * (end - root - 1)]
        return waits

    def emit(self, tokens: Sequence[int], eos_ids: Sequence[int]) -> int:
        """Append tokens, which are on the host, up to EOS or the limit, and note the time; return how many were kept."""
        self.emitted_at.append(time.perf_counter())
        for count, token in enumerate(tokens, 1):
            self.output_ids.append(token)
            if token in eos_ids and not self.request.ignore_eos:
                self.finish_reason = "eos"
                return count
            if len(self.output_ids) == self.request.max_new_tokens:
                self.finish_reason = "length"
                return count
        return len(tokens)


@dataclass(frozen=True)
class Decoded:
    """The answers of one batch and the seconds spent: `ttft` (prefill and first token), then draft, verify, commit and
    other, which add up to the decode time. passes: target passes over drafts, each for all rows. peak_bytes: on a GPU. early:
    tokens beyond each answer's first that came within `ttft`. What else is counted per batch is a field here."""

    generations: list[Generation]
    seconds: dict[str, float]
    passes: int = 0
    peak_bytes: int | None = None
    early: int = 0

    @property
    def timed_tokens(self) -> int:
        """Tokens that came in the decode time."""
        return sum(len(g.output_ids) - 1 for g in self.generations) - self.early

    @property
    def decode_s(self) -> float:
        """Seconds of the decode time."""
        return sum(seconds for part, seconds in self.seconds.items() if part != "ttft")


@dataclass(frozen=True)
class Tally:
    """Acceptance counts, summed over answers.

    answers: how many. tokens: emitted after each answer's first. rounds: target passes. drafted:
    tokens proposed that could still be emitted, all nodes of a tree. accepted_K / reached_K: rounds in which position i
    was accepted / in which every position before it was accepted and a token was drafted there. rounds_T, tokens_T: of one
    answer, the rounds whose root is its i-th token and the tokens that they emitted, T = tokens; None in a sum. chances_TK: how
    likely these accept each position that they reach, NaN where none is drafted; None where nobody asks for it.
    """

    answers: int
    tokens: float
    rounds: float
    drafted: float
    accepted_K: np.ndarray
    reached_K: np.ndarray
    rounds_T: np.ndarray | None = None
    tokens_T: np.ndarray | None = None
    chances_TK: np.ndarray | None = None

    @classmethod
    def empty(cls, num_speculative_tokens: int) -> "Tally":
        """Return a tally of no answers."""
        return cls(0, 0.0, 0.0, 0.0, np.zeros(num_speculative_tokens), np.zeros(num_speculative_tokens))

    def __add__(self, other: "Tally") -> "Tally":
        names = (part.name for part in fields(self) if part.default is MISSING)
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))

    def positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return accepted_K and reached_K of the rounds at each root of an answer, [T, K] both."""
        if self.chances_TK is None or self.rounds_T is None:
            return None
        roots, width = self.chances_TK.shape
        drafted_TK = ~np.isnan(self.chances_TK) & (np.arange(width) < np.arange(roots, 0, -1)[:, None])
        accepted_TK = np.where(drafted_TK, self.chances_TK, 0).cumprod(1) * self.rounds_T[:, None]
        before_TK = np.concatenate([self.rounds_T[:, None], accepted_TK[:, :-1]], 1)
        return accepted_TK, np.where(drafted_TK, before_TK, 0)

    @property
    def tau(self) -> float | None:
        """Tokens emitted per round, the bonus included (sums, never a mean of ratios)."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return float(self.accepted_K.sum() / self.drafted) if self.drafted else None

    @property
    def acceptance_at(self) -> list[float]:
        """P(position i accepted), unconditional."""
        return [float(x / self.rounds) for x in self.accepted_K] if self.rounds else []

    @property
    def alpha_at(self) -> list[float | None]:
        """P(position i accepted, given that all before it were); None where no round came that far."""
        pairs = zip(self.accepted_K, self.reached_K, strict=True)
        return [float(accepted / reached) if reached else None for accepted, reached in pairs]


def total(tallies: Iterable[Tally], num_speculative_tokens: int) -> Tally:
    """Add up tallies."""
    return sum(tallies, Tally.empty(num_speculative_tokens))


def tally_generation(generation: Generation, num_speculative_tokens: int) -> Tally:
    """Count the rounds of one decoded answer."""
    accepted_K = np.zeros(num_speculative_tokens)
    reached_K = np.zeros(num_speculative_tokens)
    drafted, tokens = 0, len(generation.output_ids) - 1
    chances_TK = np.full((tokens, num_speculative_tokens), np.nan, np.float32)
    for round_ in generation.rounds:
        left = tokens - round_.root
        depth = min(len(round_.levels) or round_.drafted, left)
        accepted_K[: round_.accepted] += 1
        reached_K[: min(round_.accepted + 1, depth)] += 1
        chances_TK[round_.root, :depth] = np.arange(num_speculative_tokens)[:depth] < round_.accepted
        drafted += sum(round_.levels[:left]) if round_.levels else depth
    rounds_T, tokens_T = np.zeros(tokens), np.zeros(tokens)
    roots = [round_.root for round_ in generation.rounds]
    rounds_T[roots], tokens_T[roots] = 1, np.diff([*roots, tokens])
    return Tally(1, tokens, len(generation.rounds), drafted, accepted_K, reached_K, rounds_T, tokens_T, chances_TK)
