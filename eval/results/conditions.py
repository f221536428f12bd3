"""Split acceptance by the conditions that a round was drafted under, such as the tokens that stood before the draft.

Shapes: T tokens of an answer after its first, which is one per possible root; G groups; K speculative tokens.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.decoder.answers import Generation, Tally
from draftsmith.eval.results.intervals import Interval, bootstrap_tau

Counted = Sequence[tuple[Generation, Tally]]
"""Answers with their own tallies, decoded or simulated."""

WITHIN, PAST = "within", "past"
"""The groups by the length that a head was trained to."""
THINKING, ANSWER = "thinking", "answer"
"""The groups of answers with thought."""
_EDGES = (1, *(2**n for n in range(5, 32)))
"""The shortest contexts of the groups: powers of two from 32 on."""
CONTEXTS = tuple(f"{low:,} to {high - 1:,}" for low, high in pairwise(_EDGES))
"""The groups by context, in tokens."""

_TEMPLATE_END = 32
"""Tokens at a prompt's end in which a chat template may open thought."""
_NOTICED = 0.02
"""The share of rounds past the trained length from which it is worth a warning."""


@dataclass(frozen=True)
class Group:
    """The rounds under one condition. rounds, tau: as decoded; rounds_simulated, tau_simulated: expected ones, by simulation.
    interval: 95% of tau over the prompts that have such rounds; alpha_at: see `Measures`."""

    name: str
    rounds: int | None = None
    tau: float | None = None
    rounds_simulated: float | None = None
    tau_simulated: float | None = None
    interval: Interval | None = None
    interval_simulated: Interval | None = None
    alpha_at: tuple[float | None, ...] | None = None
    alpha_at_simulated: tuple[float | None, ...] | None = None


class Thinking:
    """Tells how many of an answer's tokens are thought, as some models write it before what they answer.

    decode: the text of token ids, special tokens included. marks: what opens thought, in the answer or at the prompt's end, and what
    closes it, which is thought too; an answer that never closes what was opened is all thought.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: Sequence[str]) -> None:
        self._decode, (self._opens, self._closes) = decode, marks
        self._counted: dict[Sequence[int], int] = {}

    def __call__(self, generation: Generation) -> int:
        """Return the number of the answer's tokens up to and with the mark that ends its thought; 0 where it does not think."""
        ids = tuple(generation.output_ids)
        key = (*generation.request.prompt_ids[-_TEMPLATE_END:], *ids)
        if key not in self._counted:
            before, text = self._decode(key[: -len(ids)]), self._decode(ids)
            opened = before.rfind(self._opens) > before.rfind(self._closes) or self._opens in text
            count = len(ids) if opened else 0
            if self._closes in text:
                whole = range(1, len(ids) + 1)
                count = whole[bisect_left(whole, True, key=lambda n: self._closes in self._decode(ids[:n]))]
            self._counted[key] = count
        return self._counted[key]

    def answer(self, generation: Generation) -> list[int]:
        """Return the ids behind the thought, of which some models' marks are special tokens, which a text leaves out."""
        return list(generation.output_ids[self(generation) :])


def acceptance_by_condition(
    trained_length: int | None, thought_of: Callable[[Generation], int], decoded: Counted, simulated: Counted
) -> dict[str, Any]:
    """Return the fields of `Measures` that split acceptance: by the tokens that stood before the draft, by whether these are more
    than the head learned from, and by whether the first drafted token is thought, with the mark that closes it.

    trained_length: of the head, in tokens, None where it is not known. thought_of: the tokens of an answer that are thought.
    """

    def by(names: Sequence[str], group_of: Callable[[Generation], np.ndarray]) -> tuple[Group, ...]:
        return split(names, group_of, decoded, simulated)

    def in_answer(generation: Generation) -> np.ndarray:
        return (np.arange(1, len(generation.output_ids)) >= thought_of(generation)).astype(int)

    edges, length = np.array(_EDGES), trained_length
    thinks = any(thought_of(generation) for generation, _ in (*decoded, *simulated))
    return {
        "contexts": by(CONTEXTS, lambda g: np.searchsorted(edges, contexts_of(g), "right") - 1),
        "training_split": None
        if length is None
        else by((WITHIN, PAST), lambda g: (contexts_of(g) > length).astype(int)),
        "thinking": by((THINKING, ANSWER), in_answer) if thinks else None,
    }


def contexts_of(generation: Generation) -> np.ndarray:
    """Return [T]: the tokens that stand before the draft of a round at each root."""
    return len(generation.request.prompt_ids) + np.arange(1, len(generation.output_ids))


def explain_past(trained_length: int, groups: Sequence[Group]) -> str:
    """Say how acceptance changes past the longest text that a head learned from; groups: WITHIN and PAST. Empty where nothing,
    or next to nothing, stands past it, and where tau does not fall there."""
    by_name = {group.name: group for group in groups}
    past, within = by_name.get(PAST), by_name.get(WITHIN, Group(WITHIN))
    if past is None:
        return ""
    decoded = past.rounds is not None
    rounds, before = (within.rounds, within.tau) if decoded else (within.rounds_simulated, within.tau_simulated)
    count, after = (past.rounds, past.tau) if decoded else (past.rounds_simulated, past.tau_simulated)
    if not count or after is None or (share := count / (count + (rounds or 0))) < _NOTICED:
        return ""
    text = f"{share:.0%} of its rounds past the {trained_length:,} tokens of the longest text that it learned from"
    advice = "train on texts as long as those that you serve (data.max_length)"
    if not before:
        return f"{text}, with a tau of {after:.2f}: {advice}"
    if 1 - after / before < 0.005:  # which would be a fall by 0%
        return ""
    return f"{text}, where tau falls by {1 - after / before:.0%}, from {before:.2f} to {after:.2f}: {advice}"


def split(
    names: Sequence[str], group_of: Callable[[Generation], np.ndarray], decoded: Counted, simulated: Counted
) -> tuple[Group, ...]:
    """Return the groups that hold rounds, in the order of `names`. group_of: the number [T] of the group of each root."""
    counts, means = (_Sums(len(names), group_of, answers) for answers in (decoded, simulated))
    filled = []
    for i, name in enumerate(names):
        rounds, expected = counts.rounds_G[i], means.rounds_G[i]
        if rounds or expected:
            group = Group(name, round(rounds) or None, counts.tau(i), float(expected) or None, means.tau(i))
            group = replace(group, interval=counts.interval(i), interval_simulated=means.interval(i))
            filled.append(replace(group, alpha_at=counts.alpha_at(i), alpha_at_simulated=means.alpha_at(i)))
    return tuple(filled)


class _Sums:
    """What answers add up to in each group: the rounds and tokens of each prompt, and the rounds that reach and accept each position."""

    def __init__(self, groups: int, group_of: Callable[[Generation], np.ndarray], answers: Counted) -> None:
        self._prompts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, groups)))
        self._positions_2GK = np.zeros((2, groups, max((len(t.accepted_K) for _, t in answers), default=0)))
        for generation, tally in answers:
            assert tally.rounds_T is not None
            assert tally.tokens_T is not None
            group_T, sums_2G = group_of(generation), self._prompts[generation.request.sample_id]
            for sums_G, of_T in zip(sums_2G, (tally.rounds_T, tally.tokens_T), strict=True):
                sums_G += np.bincount(group_T, of_T, groups)
            for sums_GK, of_TK in zip(self._positions_2GK, tally.positions() or (), strict=False):
                np.add.at(sums_GK, group_T, of_TK)
        sums_2G = sum(self._prompts.values(), np.zeros((2, groups)))
        self.rounds_G, self._tokens_G = sums_2G[0], sums_2G[1]

    def tau(self, group: int) -> float | None:
        return float(self._tokens_G[group] / self.rounds_G[group]) if self.rounds_G[group] else None

    def interval(self, group: int) -> Interval | None:
        return bootstrap_tau([(tokens[group], rounds[group]) for rounds, tokens in self._prompts.values()])

    def alpha_at(self, group: int) -> tuple[float | None, ...] | None:
        accepted_K, reached_K = self._positions_2GK[:, group]
        alphas = [float(a / r) if r else None for a, r in zip(accepted_K, reached_K, strict=True)]
        return tuple(alphas) if reached_K.any() else None


def sharers(recipe: Mapping[str, Any] | None) -> int:
    """Return how many processes shared the target of a result with this recipe."""
    target = (recipe or {}).get("target")
    return int(target.get("tensor_parallel", 1)) if isinstance(target, dict) else 1
