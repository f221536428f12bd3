"""What was measured, and how it was run: two parts of result.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The sampling setting and how it was run.

    temperature 0 is greedy. top_k, top_p, min_p, repetition_penalty: null = off. num_speculative_tokens: K of the decoded
    run. batch: requests decoded together. dtype: of target and drafter. repeats: timed passes per system.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    num_speculative_tokens: int
    batch: int
    dtype: str
    seed: int
    repeats: int
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def filters(self) -> dict[str, float | None]:
        """What shapes the target's law beside the temperature, by the name a report gives it."""
        return {
            "top-k": self.top_k,
            "top-p": self.top_p,
            "min-p": self.min_p,
            "repetition penalty": self.repetition_penalty,
        }


@dataclass(frozen=True)
class TargetInfo:
    """The frozen target: path or Hub name, fingerprint of weights and config, its size."""

    path: str
    fingerprint: str | None = None
    parameters: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
