"""What thresholds, comparisons and their tables know of each number, a row of METRICS each."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from draftsmith.eval.results.intervals import FEWEST_PROMPTS, Interval, wilson
from draftsmith.eval.results.result import Lossless, Measures


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


def taus_by_k(m: Measures) -> dict[int, float]:
    """Return the simulated tau of every draft length."""
    points = m.k_sweep or ()
    return {p.num_speculative_tokens: p.tau_simulated for p in points if p.tau_simulated is not None}
