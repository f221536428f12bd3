"""Verification by the book in plain Python and float64, for one row: an oracle that shares no code with `verify`.

What is left to chance comes from a coin, so the same rule can be enumerated (every outcome with its probability) and
driven by given uniforms.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

from draftsmith.decoder.sampling import Sampling

T = TypeVar("T")
Weights = list[float]


def normalised(weights: Sequence[float]) -> Weights:
    """The weights with sum 1; all zeros if nothing is there."""
    mass = math.fsum(weights)
    return [w / mass for w in weights] if mass > 0 else [0.0] * len(weights)


def plain_probs(
    logits: Sequence[float], sampling: Sampling, seen: "set[int] | frozenset[int]" = frozenset()
) -> Weights:
    """Penalty, temperature, top-k, top-p, min-p; the argmax alone at temperature 0."""
    penalty = sampling.repetition_penalty
    scores = [(x * penalty if x < 0 else x / penalty) if token in seen else x for token, x in enumerate(logits)]
    best = max(scores)
    if sampling.greedy:
        first = scores.index(best)
        return [float(token == first) for token in range(len(scores))]
    p = normalised([math.exp((x - best) / sampling.temperature) for x in scores])
    if sampling.top_k:
        least = sorted(p, reverse=True)[: sampling.top_k][-1]
        p = normalised([x if x >= least else 0.0 for x in p])
    if sampling.top_p < 1:
        kept, mass = [0.0] * len(p), 0.0
        for token in sorted(range(len(p)), key=lambda token: -p[token]):
            if mass >= sampling.top_p:
                break
            kept[token], mass = p[token], mass + p[token]
        p = normalised(kept)
    return normalised([x if x >= sampling.min_p * max(p) else 0.0 for x in p])


class Coin(Protocol):
    """Where chance comes from; a key says what a number is for."""

    def flip(self, key: tuple[str, int], chance: float) -> bool:
        """True with probability `chance`."""

    def draw(self, key: tuple[str, int], weights: Weights) -> int:
        """An index in proportion to `weights`."""


@dataclass
class _Fixed:
    """Replays choices, then takes the first possible one each time and notes the others."""

    choices: list[int]
    chance: float = 1.0
    taken: list[int] = field(default_factory=list)
    other: list[list[int]] = field(default_factory=list)

    def draw(self, key: tuple[str, int], weights: Weights) -> int:
        shares = normalised(weights)
        possible = [i for i, share in enumerate(shares) if share > 0]
        if len(self.taken) < len(self.choices):
            choice = self.choices[len(self.taken)]
        else:
            choice = possible[0]
            self.other += [[*self.taken, i] for i in possible[1:]]
        self.taken.append(choice)
        self.chance *= shares[choice]
        return choice

    def flip(self, key: tuple[str, int], chance: float) -> bool:
        return self.draw(key, [1 - chance, chance]) == 1


def outcomes(play: Callable[[Coin], T]) -> Iterator[tuple[T, float]]:
    """Every way that `play` can go, with its probability."""
    todo: list[list[int]] = [[]]
    while todo:
        coin = _Fixed(todo.pop())
        result = play(coin)
        todo += coin.other
        yield result, coin.chance


@dataclass
class Uniforms:
    """Chance from given numbers; `margin` is how close the closest decision was."""

    numbers: dict[str, Sequence[float]]
    margin: float = 1.0

    def flip(self, key: tuple[str, int], chance: float) -> bool:
        u = self.numbers[key[0]][key[1]]
        self.margin = min(self.margin, abs(u - chance))
        return u < chance

    def draw(self, key: tuple[str, int], weights: Weights) -> int:
        cdf = list(accumulate(weights))
        point = self.numbers[key[0]][key[1]] * cdf[-1]
        self.margin = min([self.margin, *(abs(edge - point) / cdf[-1] for edge in cdf if edge < cdf[-1])])
        return next(i for i, edge in enumerate(cdf) if point < edge)


def reject(p: Weights, q: Weights, token: int) -> tuple[Weights, Weights]:
    """First p <- norm((p - q)+), unless nothing is left; then the token leaves q."""
    left = normalised([max(a - b, 0.0) for a, b in zip(p, q, strict=True)])
    return (left if any(left) else p), normalised([0.0 if i == token else b for i, b in enumerate(q)])


class Branches(Protocol):
    """A draft as the rule sees it. Node 0 is the root."""

    def children(self, node: int) -> list[int]:
        """The node's children in the order they were drawn."""

    def token(self, node: int) -> int:
        """The token that a node holds."""

    def probs(self, node: int) -> Weights | None:
        """The distribution over the target's vocabulary that the node's children were drawn from; None if from none."""


def verify_plainly(draft: Branches, p_after: Callable[[list[int]], Weights], coin: Coin) -> tuple[list[int], int]:
    """One round: the accepted nodes, the root first, and the token of the target's own.

    p_after: the target's distribution after a path of nodes.
    """
    path = [0]
    while True:
        p, q = p_after(path), draft.probs(path[-1])
        accepted = None
        if q is None:
            token = coin.draw(("emit", path[-1]), p)
            accepted = next((c for c in draft.children(path[-1]) if draft.token(c) == token), None)
        else:
            for child in draft.children(path[-1]):
                x = draft.token(child)
                if q[x] == 0:
                    continue  # drawn when nothing was left
                if coin.flip(("accept", child), min(1.0, p[x] / q[x])):
                    accepted = child
                    break
                p, q = reject(p, q, x)
            if accepted is None:
                token = coin.draw(("emit", 0), p)
        if accepted is None:
            return path, token
        path.append(accepted)
