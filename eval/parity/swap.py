"""Where acceptance is lost when the served target is not the one that a head learned from: quantized, tuned, with an adapter merged.

Three things may have changed: the target's answers, which are drafted and verified; the states that the head reads, with the embedding and
projection that it shares; and the head's own weights, where an engine rounds them. Each can be swapped alone, as at temperature 0 a
draft is accepted exactly where it says what the answer has: the answers of one target, the states of another along that text, and either
head give a tau each. A thing's share is the mean of what swapping it changes over all orders of swapping (Shapley, "A Value for n-Person Games",
1953), so that the shares add up to the whole difference.

Shapes: D draws, C combinations of swapped things, P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.results.intervals import FEWEST_PROMPTS, Interval
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.base import DraftHead
from draftsmith.target.target import Target

THINGS = ("answers", "states", "head")
DRAWS = 2000
_ROWS = 8

Combination = tuple[bool, ...]
"""Whether each of THINGS is that of the served side."""


@dataclass(frozen=True)
class Side:
    """A target and the head as it drafts beside it, with its own weights or with those of an engine."""

    target: Target
    heads: tuple[DraftHead, DraftHead]


@dataclass(frozen=True)
class Share:
    """Accepted length that is lost by one thing, and its 95% interval over prompts, None of fewer than FEWEST_PROMPTS."""

    thing: str
    lost: float
    interval: Interval | None


@dataclass(frozen=True)
class Swapped:
    """tau: with the head's own target. tau_served: with the served one. differ: share of the served target's tokens that the head's own would
    not say there. shares: of what is lost; they add up to tau - tau_served."""

    tau: float
    tau_served: float
    differ: float
    shares: tuple[Share, ...]


def swap(own: Side, served: Side, requests: Sequence[Request], tokens: int) -> Swapped:
    """Measure drafts of so many tokens on the answers of both targets at temperature 0, each thing swapped alone and together."""
    sides, greedy = (own, served), Sampling(0.0)
    answers = [decode_batch(s.target, TargetAlone(), requests, greedy, rows=_ROWS).generations for s in sides]
    counts: dict[Combination, np.ndarray] = {}
    for texts, states, head in product((False, True), repeat=3):
        side = sides[states]
        found = head_simulator(side.heads[head])(side.target, answers[texts], greedy, tokens)
        pairs = {
            g.request.sample_id: (tally[-1].tokens, tally[-1].rounds)
            for g, tally in zip(answers[texts], found.tallies, strict=True)
        }
        counts[texts, states, head] = np.array([pairs[request.sample_id] for request in requests])
        if (texts, states) == (True, False):
            differ = found.off_text / max(1, sum(len(g.output_ids) for g in answers[1]))
    drawn_DP = np.random.default_rng(0).integers(len(requests), size=(DRAWS, len(requests)))
    whole = {key: _tau(of[None]) for key, of in counts.items()}
    drawn = {key: _tau(of[drawn_DP]) for key, of in counts.items()}
    shares = []
    for thing, name in enumerate(THINGS):
        low, high = np.quantile(_share(drawn, thing), [0.025, 0.975])
        interval = (float(low), float(high)) if len(requests) >= FEWEST_PROMPTS else None
        shares.append(Share(name, float(_share(whole, thing)[0]), interval))
    first, last = (float(whole[side, side, side][0]) for side in (False, True))
    return Swapped(first, last, differ, tuple(shares))


def _tau(counts_DP2: np.ndarray) -> np.ndarray:
    """Return [D] tokens of a round."""
    tokens_D, rounds_D = counts_DP2.sum(1).T
    return np.asarray(tokens_D / np.maximum(rounds_D, 1e-9))


def _share(tau: dict[Combination, np.ndarray], thing: int) -> np.ndarray:
    """Return [D] what is lost by one of THINGS, over all orders of swapping."""
    lost = [
        tau[before] - tau[after]
        for order in permutations(range(3))
        for before, after in [
            [tuple(k in order[:n] for k in range(3)) for n in (order.index(thing), order.index(thing) + 1)]
        ]
    ]
    return np.asarray(np.mean(lost, 0))
