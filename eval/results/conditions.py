"""Split acceptance by the conditions that a round was drafted under, such as the tokens that stood before the draft.

Shapes: T tokens of an answer after its first, which is one per possible root; G groups.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.decoder.answers import Generation, Tally

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
    """The rounds under one condition. rounds, tau: as decoded; rounds_simulated, tau_simulated: expected ones, by simulation."""

    name: str
    rounds: int | None = None
    tau: float | None = None
    rounds_simulated: float | None = None
    tau_simulated: float | None = None


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
    (rounds_G, tokens_G), (expected_G, emitted_G) = (_sums(len(names), group_of, c) for c in (decoded, simulated))
    filled = []
    for i, name in enumerate(names):
        counts = (round(rounds_G[i]), tokens_G[i] / rounds_G[i]) if rounds_G[i] else (None, None)
        means = (float(expected_G[i]), float(emitted_G[i] / expected_G[i])) if expected_G[i] else (None, None)
        if rounds_G[i] or expected_G[i]:
            filled.append(Group(name, *counts, *means))
    return tuple(filled)


def _sums(
    groups: int, group_of: Callable[[Generation], np.ndarray], answers: Iterable[tuple[Generation, Tally]]
) -> np.ndarray:
    """Return [2, G]: the rounds and the tokens of each group."""
    sums_2G = np.zeros((2, groups))
    for generation, tally in answers:
        assert tally.rounds_T is not None
        assert tally.tokens_T is not None
        group_T = group_of(generation)
        sums_2G[0] += np.bincount(group_T, tally.rounds_T, groups)
        sums_2G[1] += np.bincount(group_T, tally.tokens_T, groups)
    return sums_2G
