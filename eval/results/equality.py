"""Whether speculated texts are the target's own: what a result says of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """The first place where a speculated greedy text differs from the target alone.

    prompt: the prompt's id. position: emitted tokens before it (0 = the first token of the answer).
    expected, got: token ids of the target alone and of the speculated text. logit_gap: the target's
    logit of `expected` minus that of `got`, in the dtype checked; rounding explains it only when tiny.
    """

    prompt: str
    slice: str
    position: int
    expected: int
    got: int
    logit_gap: float | None = None


@dataclass(frozen=True)
class Lossless:
    """Greedy equality, token for token, with the target alone.

    dtype: e.g. "float32". checked: prompts compared. equal: prompts whose texts are the same ids. tau,
    tau_simulated: accepted length of the checked greedy texts, decoded and simulated: the same number in fp32.
    """

    dtype: str
    checked: int
    equal: int
    first_divergences: tuple[Divergence, ...] = ()
    tau: float | None = None
    tau_simulated: float | None = None
