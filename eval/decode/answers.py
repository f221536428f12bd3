"""What a decoder is asked for and what it gives: requests, rounds, answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.eval.decode.noise import row_key


@dataclass(frozen=True)
class Request:
    """A prompt to answer: its token ids, the most tokens to emit, and the key of its random numbers."""

    sample_id: str
    slice: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    key: int = 0

    @classmethod
    def seeded(
        cls, sample_id: str, slice_name: str, prompt_ids: Sequence[int], max_new_tokens: int, seed: int
    ) -> "Request":
        """Build a request whose random numbers depend on `seed` and `sample_id` only."""
        return cls(sample_id, slice_name, tuple(prompt_ids), max_new_tokens, row_key(seed, sample_id))


@dataclass(frozen=True)
class Round:
    """One target pass. root: index in the output of the last token known before it; drafted: tokens
    proposed; accepted: drafted tokens that were emitted (those cut by EOS do not count). levels: tokens proposed
    at each depth of a tree, empty for a chain."""

    root: int
    drafted: int
    accepted: int
    levels: tuple[int, ...] = ()


@dataclass
class Generation:
    """An answer: ids up to and including EOS, why it ended ("eos" or "length"), and its rounds. ttft_s: seconds of the
    pass that read its prompt (with the other prompts of that pass) and gave the first token."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    ttft_s: float = 0.0

    @property
    def tokens_read(self) -> int:
        """Tokens that the target has read: all but the last one emitted, which is the root of the next draft."""
        return len(self.request.prompt_ids) + len(self.output_ids) - 1

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.output_ids)

    def emit(self, tokens: Sequence[int], eos_ids: Sequence[int]) -> int:
        """Append tokens up to EOS or the limit; return how many were kept."""
        for count, token in enumerate(tokens, 1):
            self.output_ids.append(token)
            if token in eos_ids:
                self.finish_reason = "eos"
                return count
            if len(self.output_ids) == self.request.max_new_tokens:
                self.finish_reason = "length"
                return count
        return len(tokens)


@dataclass(frozen=True)
class Decoded:
    """Generations of one batch and the seconds spent: `ttft` (prefill and first token), then draft,
    verify, commit and other, which add up to the decode time. passes: target passes over drafts, each for all rows at
    work. peak_bytes: GPU memory, where it was watched."""

    generations: list[Generation]
    seconds: dict[str, float]
    passes: int = 0
    peak_bytes: int | None = None
