"""Suffix decoding: propose what most often followed the longest suffixes of the text, in the text itself and in earlier
outputs; nothing is trained.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024). A node of the
paper's suffix trees stands for all occurrences of a token sequence; here the occurrences themselves are narrowed down token by
token, which gives the same counts, takes no more memory than the texts, and needs nothing rebuilt as a text grows. Match
lengths, budget, threshold and scores are those of its authors' code, which vLLM serves as the method "suffix".

Shapes: L tokens of a text, T tokens that are searched, E occurrences.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter

import numpy as np

from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.drafters.texts import Branches, TextDrafter, pack

_END = -1
"""Stands behind every earlier output: no token has this id, so no match goes over it."""
_COUNTED = 1024
"""Occurrences, the latest ones, that frequencies are counted from: more would cost time and change little."""


class Outputs:
    """Earlier outputs, which never change while drafts are made: so a draft depends on nothing but its own text, whatever
    the batch and the order of answers."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.text_T = np.array([token for output in outputs for token in (*output, _END)], dtype=np.int32)
        self._order_T = np.argsort(self.text_T, kind="stable")
        self._sorted_T = self.text_T[self._order_T]

    def ends_of(self, token: int) -> np.ndarray:
        """Return the positions [E] right behind a token's occurrences, in ascending order."""
        first, last = np.searchsorted(self._sorted_T, [token, token + 1])
        return self._order_T[first:last] + 1


@dataclass(frozen=True)
class SuffixRules:
    """How far and how surely is drafted. A match of p tokens drafts at most `alpha` * p; match and draft together are at most
    `max_tree_depth` tokens deep; a token is drafted if its path is at least `min_token_prob` likely by its counts. tree: the
    most likely paths of the counts (the paper's greedy expansion); otherwise the most frequent token after each."""

    alpha: float = 1.0
    max_tree_depth: int = 24
    min_token_prob: float = 0.1
    tree: bool = False


def speculate(text_L: np.ndarray, most: int, rules: SuffixRules, outputs: Outputs) -> Branches:
    """Return the draft of at most `most` tokens with the largest sum of its paths' probabilities, of all match lengths, from
    the text itself or from earlier outputs; of equal ones that from the text itself."""
    last = int(text_L[-1])
    own = _best(text_L, np.flatnonzero(text_L[:-1] == last) + 1, text_L, most, rules)
    other = _best(outputs.text_T, outputs.ends_of(last), text_L, most, rules)
    return max(own, other, key=attrgetter("score"))


def _best(text_T: np.ndarray, ends_E: np.ndarray, suffix_L: np.ndarray, most: int, rules: SuffixRules) -> Branches:
    """Return the best draft from one text. ends_E: the positions behind the occurrences of the suffix's last token."""
    matches: list[np.ndarray] = []
    for length in range(1, min(len(suffix_L), rules.max_tree_depth - 1) + 1):
        ends_E = ends_E[ends_E >= length]
        ends_E = ends_E[text_T[ends_E - length] == suffix_L[-length]]
        if not len(ends_E):
            break
        matches.append(ends_E)
    # Those that may draft the longest path come first: it often is certain, and then no other can do better.
    budgets = {n: min(most, int(rules.alpha * n + 1e-6)) for n in range(1, len(matches) + 1)}
    best = Branches()
    for length in sorted(budgets, key=lambda n: (min(budgets[n], rules.max_tree_depth - n), n), reverse=True):
        if best.score < budgets[length]:
            ends_E, depth = matches[length - 1][-_COUNTED:], rules.max_tree_depth - length
            expanded = _expand(text_T, ends_E, budgets[length], depth, rules)
            best = max(best, expanded, key=attrgetter("score"))
    return best


def _expand(text_T: np.ndarray, ends_E: np.ndarray, budget: int, depth: int, rules: SuffixRules) -> Branches:
    """Add the most likely token to the draft until `budget` is spent (the paper's greedy expansion), no deeper than `depth`."""
    branches, score, number = Branches(), 0.0, count()
    likely: list[tuple[float, int, int, int, int, np.ndarray]] = []

    def offer(path: float, parent: int, level: int, ends_E: np.ndarray) -> None:
        """Offer what follows a path, whose probability is `path`; of equally frequent tokens the latest comes first."""
        inside_E = ends_E[ends_E < len(text_T)]  # what the end of the text cuts off tells nothing
        next_E = text_T[inside_E]
        counts = Counter(next_E[::-1].tolist())
        counts.pop(_END, None)
        for token, times in counts.most_common(None if rules.tree else 1):
            probability = path * times / len(inside_E)
            if probability < rules.min_token_prob:
                break
            behind_E = inside_E[next_E == token] + 1
            heapq.heappush(likely, (-probability, next(number), token, parent, level, behind_E))

    offer(1.0, 0, 1, ends_E)
    while likely and len(branches.tokens) < budget:
        negative, _, token, parent, level, behind_E = heapq.heappop(likely)
        branches.tokens.append(token)
        branches.parents.append(parent)
        score -= negative
        if level < depth:
            offer(-negative, len(branches.tokens), level + 1, behind_E)
    return replace(branches, score=score)


class SuffixDecoding(TextDrafter):
    """Drafts at most `num_speculative_tokens` tokens, as a chain or a tree, from the prompt, the answer so far, and earlier
    outputs."""

    name = "suffix decoding"

    def __init__(self, num_speculative_tokens: int, rules: SuffixRules, outputs: Outputs) -> None:
        assert num_speculative_tokens >= 1
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1
        self.rules, self.outputs = rules, outputs

    def propose(self, state: DecodeState) -> Draft:
        """Match every row's last tokens; a row whose last token has not occurred before drafts nothing."""
        rows = [self._draft(text_L, limit) for text_L, limit in self.read(state)]
        return pack(state.root_B, rows, linear=not self.rules.tree)

    def _draft(self, text_L: np.ndarray, limit: int) -> Branches:
        most = min(self.num_speculative_tokens, limit)
        return speculate(text_L, most, self.rules, self.outputs) if most else Branches()
