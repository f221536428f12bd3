"""What thresholds, comparisons and their tables know of each number, a row of METRICS each; and means and intervals over prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from draftsmith.eval.results.result import Lossless, Measures

Interval = tuple[float, float]
FEWEST_PROMPTS = 10
"""No interval over prompts is given of fewer: resampling them says little about prompts that are not among them."""
WITHIN = 0.02
"""The half-width of an interval, as a share of the number, that is worth asking for."""


@dataclass(frozen=True)
class Metric:
    """A number of `Measures` that is compared or has thresholds.

    name: the field.
    label, digits, scale: how tables print it.
    sign: 1 where more is better, -1 where less is, 0 where neither is.
    timed: depends on the machine; its interval is the field `<name>_spread` over repeats, of others `<name>_interval` over prompts.
    bounds: least and most that it can be, so that a threshold must be between; None where it has no thresholds.
    compared: by `draftsmith compare`.
    decoded: needs decoding.
    rounds: of a tau, the field of `PromptSums` with its rounds.
    of_k: depends on the draft length.
    exact: a full count, so any difference is beyond noise.
    count, interval: how to find the number and its interval, in place of the fields.
    """

    name: str
    label: str = ""
    digits: int = 2
    scale: int = 1
    sign: int = 1
    timed: bool = False
    bounds: Interval | None = None
    compared: bool = True
    decoded: bool = True
    rounds: str = ""
    of_k: bool = False
    exact: bool = False
    count: Callable[[Measures], float | None] | None = None
    interval: Callable[[Measures], Interval | None] | None = None

    def value(self, m: Measures) -> float | None:
        """Return the number, None where it was not measured."""
        number: float | None = self.count(m) if self.count else getattr(m, self.name)
        return number

    @property
    def ends(self) -> str:
        """The field with its interval."""
        return f"{self.name}_{'spread' if self.timed else 'interval'}"

    @property
    def has_ends(self) -> bool:
        """Whether `Measures` hold an interval of it."""
        return self.ends in Measures.__dataclass_fields__

    @property
    def worse(self) -> str:
        """Which end of its interval is the worse one: low or high."""
        return "low" if self.sign > 0 else "high"

    def worse_end(self, m: Measures) -> float | None:
        """Return the worse end of its interval, None where it has none."""
        ends: Interval | None = getattr(m, self.ends)
        return ends and ends[self.worse == "high"]

    def interval_of(self, m: Measures, repeats: int) -> Interval | None:
        """Return its interval, None where too few prompts or repeats made it."""
        value = self.value(m)
        if self.exact and value is not None:
            return value, value
        if not (repeats > 1 if self.timed else m.prompts >= FEWEST_PROMPTS):
            return None
        interval: Interval | None = self.interval(m) if self.interval else getattr(m, self.ends, None)
        return interval


def mean_tau(prompts: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean of the prompts' own tau, each prompt weighing the same; prompts: see `bootstrap_tau`."""
    ratios = [tokens / rounds for tokens, rounds in prompts if rounds]
    return sum(ratios) / len(ratios) if ratios else None


def bootstrap_tau(
    prompts: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]] | None = None, draws: int = 1000
) -> Interval | None:
    """Return the 95% interval of tau, all tokens over all rounds, by resampling prompts; None where there are fewer than
    FEWEST_PROMPTS with a round.

    prompts: tokens and rounds of each, all answers to it together. before: those of the same prompts in the same order with another
    drafter; the interval is then of tau minus the other one's tau, on the same resampled prompts.
    """
    both = [prompts] if before is None else [prompts, before]
    sides = np.array(both).reshape(len(both), -1, 2)
    # A prompt counts in both taus where one drafter alone had rounds for it.
    sides = sides[:, (sides[..., 1] > 0).any(0)]
    if (sides[..., 1] > 0).sum(1).min() < FEWEST_PROMPTS:
        return None
    picks = np.random.default_rng(0).integers(0, sides.shape[1], (draws, sides.shape[1]))
    sums = sides[:, picks].sum(2)
    sums = sums[:, (sums[..., 1] > 0).all(0)]
    taus = sums[..., 0] / sums[..., 1]
    low, high = np.percentile(taus[0] if before is None else taus[0] - taus[1], [2.5, 97.5])
    return float(low), float(high)


def prompts_needed(value: float, interval: Interval, prompts: int) -> int:
    """Return how many prompts of the same kind would bring an interval to +-WITHIN of the value: its width falls with their root."""
    half = (interval[1] - interval[0]) / 2 / value
    return max(1, ceil(round(prompts * (half / WITHIN) ** 2, 6)))


def wilson(share: float, count: int) -> Interval:
    """Return Wilson's 95% interval of a share of `count` (Journal of the American Statistical Association 22, 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return middle - half, middle + half


def _differing(lossless: Lossless | None) -> int | None:
    return lossless.checked - lossless.equal if lossless else None


def _differing_timed(m: Measures) -> Interval | None:
    """Return the interval of the number of answers, from that of their share."""
    if m.lossless_timed is None or not m.lossless_timed.checked:
        return None
    count = m.lossless_timed.checked
    low, high = wilson(1 - m.lossless_timed.equal / count, count)
    return count * low, count * high


METRICS = (
    Metric("tau", "tau", bounds=(1, inf), rounds="rounds", of_k=True),
    Metric("tau_simulated", "tau simulated", bounds=(1, inf), decoded=False, rounds="rounds_simulated", of_k=True),
    Metric("speedup", "speedup", timed=True, bounds=(0, inf), of_k=True),
    Metric("acceptance_rate", bounds=(0, 1), decoded=False, compared=False),
    Metric("decode_tok_s", "tok/s", 1, timed=True, bounds=(0, inf), of_k=True),
    Metric("baseline_tok_s", "target tok/s", 1, sign=0, timed=True),
    Metric("ttft_s", "TTFT ms", 1, scale=1000, sign=-1, timed=True),
    Metric(
        "looping", "looping", 3, sign=-1, interval=lambda m: None if m.looping is None else wilson(m.looping, m.prompts)
    ),
    Metric("differing", "unequal fp32", 0, sign=-1, exact=True, count=lambda m: _differing(m.lossless)),
    Metric(
        "differing_timed",
        "unequal timed",
        0,
        sign=-1,
        count=lambda m: _differing(m.lossless_timed),
        interval=_differing_timed,
    ),
)
"""In the order of messages and tables. differing, differing_timed: greedy answers other than the target's."""
