"""The sequential test of a watch: acceptance against that of the first requests, with errors that hold whatever its distribution.

An observation is an answer, or an interval of a server's counters: r rounds that gave x tokens. The first N are the baseline: its tau,
the bounds at which later excesses x - tau r are clipped (so that no single answer decides), and how much observations clump together.
Each side then bets against "acceptance is what it was": 1 + bet * score, where a score has no positive mean while tau is within the
error of the baseline's own estimate. Products of such bets are e-processes: summed over all possible starts of a change, each start
weighing the part of a day that it took, they stay below 1/p within a day with probability 1 - p, at any rate of requests. That is the
Shiryaev-Roberts statistic of e-detectors (Shin, Ramdas and Rinaldo, "E-detectors", 2023, section 3). Correlated observations are beyond
that theorem: a penalty of the bet's variance as often as the baseline's sums vary more than those of independent ones makes up for them,
and scripts/bench/drift.py says how well.

d: days. N: observations of the baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from draftsmith.fields import LATER

FALL = 0.1
"""The change of tau that bets are chosen for, as a share."""
DAILY, ONCE = 0.008, 0.002
"""The chance of a false alarm on a day, and that of a baseline so far from the truth that one follows: together 1%."""
WITHIN = 2000
"""Requests within which a fall of 10% is to be seen."""
LARGEST = 16
"""A baseline grows by doubling, so many times its first size at most, until it expects to see a fall in half of WITHIN."""
_TAIL = 0.005
_BLOCKS = 32
"""The fewest sums of neighbours that tell how they vary."""
_LEAST = 100
"""Observations: an expectation of so few is good enough, as bets that lose nine tenths at most take some dozens."""
_SLOWER = 3
"""Beside the best bet a third of it: it sees smaller changes, later."""
_WORST = 5
"""Requests that are named where acceptance changed."""
LOW, HIGH = "low", "high"
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bets:
    """One side of a baseline. tau: what acceptance is held against, the baseline's less or more its error. sizes: of the bets. within:
    observations in which a change of FALL is expected to show, 0 where never."""

    tau: float
    sizes: tuple[float, ...]
    within: float


@dataclass(frozen=True)
class Baseline:
    """What the first observations told. tau: tokens of a round, of intervals each weighing the root of its rounds. spread: an observation's excess, as a share of its mean tokens.
    bounds: excesses are clipped to them. centre: mean of the clipped ones. clumping: variance of sums over that of independent ones."""

    observations: int
    tau: float
    spread: float
    bounds: tuple[float, float]
    centre: float
    clumping: float
    low: Bets
    high: Bets


def learn(rounds: Array, tokens: Array, days: float, share: float) -> Baseline:
    """Return the baseline of observations in their order.

    rounds, tokens: [N]. days: that they took. share: of the chances of an error, which is this slice's.
    """
    tau = float(tokens.sum() / rounds.sum())
    excess = tokens - tau * rounds
    low, high = (float(one) for one in np.quantile(excess, (_TAIL, 1 - _TAIL)))
    clipped = excess.clip(low, high)
    centre, deviation = float(clipped.mean()), max(float(clipped.std()), 1e-9 * float(tokens.mean()))
    # The largest variance of sums of 2, 4, 8, ... neighbours, over that of as many independent ones; at least 1.
    deviations = clipped - centre
    variance, clumping, size = float((deviations**2).mean()), 1.0, 2
    while variance and len(deviations) // size >= _BLOCKS:
        sums = deviations[: len(deviations) // size * size].reshape(-1, size).sum(1)
        clumping, size = max(clumping, float((sums**2).mean()) / (size * variance)), 2 * size
    error = NormalDist().inv_cdf(1 - ONCE * share / 2) * deviation * (clumping / len(rounds)) ** 0.5 / rounds.mean()
    start = days / len(rounds)

    def bets(name: str, reference: float) -> Bets:
        changed = tokens * (1 - FALL if name == LOW else 1 + FALL)
        scores = score(name, reference, centre, (low, high), rounds, changed)
        # A bet may lose nine tenths at most.
        most = 0.9 / max(centre - low, high - centre, deviation)
        grid = most * np.geomspace(0.01, 1, 25)
        growth = [float(np.log(gain(size, scores, clumping)).mean()) for size in grid]
        best = int(np.argmax(growth))
        within = float(np.log(limit(share) / start)) / growth[best] if growth[best] > 0 and start > 0 else 0.0
        return Bets(reference, (float(grid[best]), float(grid[best]) / _SLOWER), within)

    sides = bets(LOW, tau - float(error)), bets(HIGH, tau + float(error))
    return Baseline(len(rounds), tau, deviation / float(tokens.mean()), (low, high), centre, clumping, *sides)


def score(name: str, tau: float, centre: float, bounds: tuple[float, float], rounds: Array, tokens: Array) -> Array:
    """Return what each observation says for a change: for a fall how much its clipped excess over `tau` is below the centre."""
    clipped = (tokens - tau * rounds).clip(*bounds) - centre
    return -clipped if name == LOW else clipped


def gain(size: float, scores: Array, clumping: float) -> Array:
    """Return by how much each observation multiplies the evidence: (1 + y) exp(-(clumping - 1) y^2 / 2), y = size * score."""
    bet = size * scores
    return (1 + bet) * np.exp(-(clumping - 1) * bet * bet / 2)


def limit(share: float) -> float:
    """Return the evidence at which a side raises its alarm."""
    return 2 / (DAILY * share)


@dataclass(frozen=True)
class Observation:
    """An answer, or an interval of a server's counters. rounds, tokens: that they gave, bonus tokens included. at: days on a clock that
    never runs backwards. requests: that it tells of, None where that is not known. name: of an answer. interval: of many answers,
    which so vary less the more they are. loops: whether its text repeats itself."""

    rounds: float
    tokens: float
    at: float
    requests: float | None = 1.0
    name: str = ""
    interval: bool = False
    loops: bool = False


@dataclass(frozen=True)
class Seen:
    """A request that spoke for a change. score: by how many tokens."""

    name: str
    score: float


@dataclass
class Side:
    """How far one side has come. evidence: of each bet. run: log evidence since the likeliest start of a change; since: observation with
    which that began, rounds and tokens what came from there on, worst: requests that spoke most for the change."""

    evidence: tuple[float, ...] = (0.0, 0.0)
    run: float = 0.0
    since: int = 0
    rounds: float = 0.0
    tokens: float = 0.0
    worst: tuple[Seen, ...] = ()

    def follow(
        self, name: str, bets: Bets, baseline: Baseline, most: float, first: int, days: Array, of: "_Rows"
    ) -> int | None:
        """Take observations number `first` and on, each after so many `days`; return the place of that which brings the evidence to
        `most`, None where none does."""
        scores = score(name, bets.tau, baseline.centre, baseline.bounds, of.rounds, of.tokens)
        gains = np.log(np.stack([gain(size, scores, baseline.clumping) for size in bets.sizes]))
        product = gains.cumsum(1)
        # Evidence (e + d) g from one to the next, as sums of logarithms over every start.
        with np.errstate(divide="ignore"):
            starts = np.log(days) - (product - gains)
            starts[:, 0] = np.logaddexp(starts[:, 0], np.log(self.evidence))
        evidence = product + np.logaddexp.accumulate(starts, axis=1)
        reached = np.logaddexp.reduce(evidence, axis=0) >= np.log(most * len(evidence))
        alarm = int(reached.argmax()) if reached.any() else None
        end = len(days) if alarm is None else alarm + 1
        self.evidence = tuple(np.exp(evidence[:, end - 1]).tolist())
        walk = self.run + product[0, :end]
        floor = np.minimum(np.minimum.accumulate(walk), 0.0)
        self.run = float(walk[-1] - floor[-1])
        start = 0
        if not self.rounds:
            self.since = first
        if (lowest := np.flatnonzero(walk == floor)).size:
            start = int(lowest[-1]) + 1
            self.since, self.rounds, self.tokens, self.worst = first + start, 0.0, 0.0, ()
        inside = slice(start, end)
        self.rounds += float(of.raw_rounds[inside].sum())
        self.tokens += float(of.raw_tokens[inside].sum())
        spoke = [Seen(*pair) for pair in zip(of.names[inside], scores[inside].tolist(), strict=True) if pair[1] > 0]
        self.worst = tuple(sorted((*self.worst, *spoke), key=lambda seen: -seen.score)[:_WORST])
        return alarm


@dataclass(frozen=True)
class _Rows:
    """Observations as arrays [n]. An interval's sums are divided by the root of its rounds, so that all vary alike."""

    raw_rounds: Array
    raw_tokens: Array
    rounds: Array
    tokens: Array
    names: Sequence[str]

    @classmethod
    def of(cls, rows: Sequence[Observation]) -> "_Rows":
        rounds, tokens = np.array([one.rounds for one in rows]), np.array([one.tokens for one in rows])
        by = np.sqrt(np.where([one.interval for one in rows], rounds, 1.0))
        return cls(
            rounds, tokens, rounds / by, tokens / by, [one.name + one.loops * " (repeats itself)" for one in rows]
        )


@dataclass
class Watched:
    """A slice of the traffic. share: of the chances of an error. size: observations of its baseline, which doubles up to `largest`.
    learning: those so far, as rounds and tokens. requests, rounds, tokens: of all. started, at: days, of the first and the last.
    alarm: LOW or HIGH; alarmed: observations up to it. first_tau: see `baseline_tau`."""

    share: float
    size: int
    largest: int
    learning: tuple[tuple[float, float], ...] = ()
    baseline: Baseline | None = None
    sides: dict[str, Side] = field(default_factory=lambda: {LOW: Side(), HIGH: Side()})
    observations: int = 0
    requests: float | None = 0.0
    rounds: float = 0.0
    tokens: float = 0.0
    started: float | None = None
    at: float = 0.0
    alarm: str | None = None
    alarmed: int = 0
    first_tau: float | None = field(default=None, metadata=LATER)

    def take(self, rows: Sequence[Observation]) -> bool:
        """Learn from observations, then test them; return whether the baseline was learned meanwhile. Those after an alarm only count."""
        learned = False
        while rows:
            if self.baseline is None:
                before, rows = rows[: self.size - len(self.learning)], rows[self.size - len(self.learning) :]
                self._count(before)
                of = _Rows.of(before)
                self.learning += tuple(zip(of.rounds.tolist(), of.tokens.tolist(), strict=True))
                learned = len(self.learning) == self.size and self._learn()
            else:
                self._test(self.baseline, rows)
                self._count(rows)
                rows = ()
        return learned

    def _learn(self) -> bool:
        """Learn the baseline, unless it is to grow."""
        rounds, tokens = np.array(self.learning).T
        days = self.at - (self.started or 0.0)
        if not days:
            raise ValueError("no time passed")
        found = learn(rounds, tokens, days, self.share)
        within = self.in_requests(found.low.within)
        enough = found.low.within > 0 and (within <= WITHIN / 2 or found.low.within <= _LEAST)
        if not enough and self.size * 2 <= self.largest:
            self.size *= 2
            return False
        self.baseline, self.learning, self.first_tau = found, (), self.tokens / self.rounds
        return True

    def in_requests(self, observations: float) -> float:
        """Return about how many requests so many observations tell of; the same number where that is not known."""
        return observations * self.requests / self.observations if self.requests else observations

    @property
    def baseline_tau(self) -> float:
        """Tokens of a round in the baseline's observations, 0 before it is learned; of states that lack them its `tau`."""
        return self.first_tau or (self.baseline.tau if self.baseline else 0.0)

    @property
    def told(self) -> float:
        """The requests so far; where these are not known, the intervals."""
        return self.observations if self.requests is None else self.requests

    def _test(self, baseline: Baseline, rows: Sequence[Observation]) -> None:
        if self.alarm is not None:
            return
        days = np.diff([self.at, *(one.at for one in rows)])
        for name, bets in ((LOW, baseline.low), (HIGH, baseline.high)):
            # The second side goes no further than an alarm of the first: its own comes before.
            some = rows[: self.alarmed - self.observations] if self.alarm else rows
            of, most = _Rows.of(some), limit(self.share)
            place = self.sides[name].follow(name, bets, baseline, most, self.observations, days[: len(some)], of)
            if place is not None:
                self.alarm, self.alarmed = name, self.observations + place + 1

    def _count(self, rows: Sequence[Observation]) -> None:
        if rows:
            self.started = rows[0].at if self.started is None else self.started
            self.at = rows[-1].at
            self.observations += len(rows)
            self.rounds += sum([one.rounds for one in rows])
            self.tokens += sum([one.tokens for one in rows])
            known = [one.requests for one in rows if one.requests is not None]
            self.requests = None if self.requests is None or len(known) < len(rows) else self.requests + sum(known)


def share_of(number: int) -> float:
    """Return the share of the chances of an error of slice number 0, 1, ...: those of all together are below 1."""
    return 1 / ((number + 1) * (number + 2))
