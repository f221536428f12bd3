"""Suffix decoding against brute force: every substring counted at every place, every path of the draft by its counts."""

from itertools import product

import numpy as np
import pytest

from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixRules, speculate
from draftsmith.decoder.drafters.texts import Branches

pytestmark = pytest.mark.full

Text = tuple[int, ...]
NONE = Outputs([])


def times(texts: list[Text], wanted: Text, open_ended: bool) -> int:
    """How often a sequence stands in the texts; with something behind it where the texts go on (`open_ended`)."""
    last = len(wanted) if open_ended else len(wanted) - 1
    return sum(text[i : i + len(wanted)] == wanted for text in texts for i in range(len(text) - last))


def latest(texts: list[Text], wanted: Text) -> tuple[int, int]:
    """Where a sequence stands last: which text, and where in it."""
    places = ((n, i) for n, text in enumerate(texts) for i in range(len(text)) if text[i : i + len(wanted)] == wanted)
    return max(places, default=(-1, -1))


def path_probability(texts: list[Text], match: Text, path: Text, open_ended: bool) -> float:
    """The product over a path's tokens of how often each followed what stands before it."""
    p = 1.0
    for end in range(1, len(path) + 1):
        before = times(texts, (*match, *path[: end - 1]), open_ended)
        p *= times(texts, (*match, *path[:end]), False) / before if before else 0.0
    return p


def slow_score(texts: list[Text], text: Text, most: int, rules: SuffixRules, open_ended: bool) -> float:
    """The best score of all match lengths: the sum of the largest path probabilities, which a greedy expansion reaches as no
    path is likelier than the one it goes on from. A chain follows the most frequent token, of equals the latest."""
    best = 0.0
    for length in range(1, min(len(text), rules.max_tree_depth - 1) + 1):
        match = text[-length:]
        budget, depth = min(most, int(rules.alpha * length + 1e-6)), rules.max_tree_depth - length
        found: list[float] = []
        open_paths: list[tuple[Text, float]] = [((), 1.0)]
        for _ in range(min(depth, budget)):
            grown = []
            for path, _ in open_paths:
                children = [(*path, t) for t in sorted({t for one in texts for t in one})]
                scored = [(c, path_probability(texts, match, c, open_ended)) for c in children]
                if scored and not rules.tree:
                    scored = [max(scored, key=lambda pair: (pair[1], latest(texts, (*match, *pair[0]))))]
                grown += [(c, p) for c, p in scored if p >= rules.min_token_prob]
            open_paths = grown
            found += [p for _, p in grown]
        best = max(best, sum(sorted(found, reverse=True)[:budget]))
    return best


def score(branches: Branches, texts: list[Text], match: Text, open_ended: bool) -> float:
    """The sum of the probabilities of a draft's paths behind one match."""
    paths: dict[int, Text] = {0: ()}
    for node, (token, parent) in enumerate(zip(branches.tokens, branches.parents, strict=True), 1):
        paths[node] = (*paths[parent], token)
    assert len(set(paths.values())) == len(paths), "no path stands twice"
    return sum(path_probability(texts, match, path, open_ended) for path in paths.values() if path)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("alpha", "depth", "least"), [(1.0, 24, 0.1), (2.0, 5, 0.3), (0.5, 8, 0.01)])
def test_drafts_have_the_score_of_brute_force(tree: bool, alpha: float, depth: int, least: float) -> None:
    generator = np.random.default_rng(1)
    rules = SuffixRules(alpha, depth, least, tree)
    drafted = 0
    for symbols, length, most in product((2, 4, 12), (1, 2, 8, 20), (1, 3, 5)):
        text = tuple(generator.integers(0, symbols, length).tolist())
        earlier = [tuple(generator.integers(0, symbols, n).tolist()) for n in (0, 1, 6, 9)]
        for outputs in ([], earlier):
            branches = speculate(np.array(text), most, rules, Outputs(outputs))
            own, other = slow_score([text], text, most, rules, True), slow_score(outputs, text, most, rules, False)
            reached = [
                score(branches, texts, text[-n:], open_ended)
                for texts, open_ended in (([text], True), (outputs, False))
                for n in range(1, len(text) + 1)
                if len(branches.tokens) <= int(alpha * n + 1e-6) and max(branches.depths, default=0) <= depth - n
            ]
            assert max([0.0, *reached]) == pytest.approx(max(own, other))
            assert len(branches.tokens) <= most
            assert bool(branches.tokens) == (max(own, other) > 0)
            drafted += bool(branches.tokens)
    assert drafted > 15


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        ([1, 2, 3, 1], SuffixRules(), [2]),  # a match of one token drafts one
        ([1, 2, 3, 1], SuffixRules(alpha=2.5), [2, 3]),
        ([1, 2, 3, 4, 1, 2], SuffixRules(), [3, 4]),
        ([1, 2, 3, 4, 1, 2], SuffixRules(max_tree_depth=3), [3]),  # a match of two leaves one, one of one drafts one
        ([7, 1, 7, 2, 7, 2, 7], SuffixRules(max_tree_depth=2), [2]),
        ([7, 1, 7, 2, 7, 3, 7], SuffixRules(max_tree_depth=2, min_token_prob=0.4), []),
        ([7, 1, 7, 2, 7, 3, 7], SuffixRules(max_tree_depth=2), [3]),  # of equals the latest
        ([1, 2, 3], SuffixRules(), []),
    ],
)
def test_the_chain_by_hand(text: list[int], rules: SuffixRules, expected: list[int]) -> None:
    assert speculate(np.array(text), 4, rules, NONE) == Branches.chain(expected)


def test_the_tree_by_hand() -> None:
    """Behind 7 7 stand 1 twice and 2 once: 1 (2/3), then 5 behind it (2/3), then 2 (1/3)."""
    text = [7, 7, 1, 5, 7, 7, 1, 5, 7, 7, 2, 6, 7, 7]
    found = speculate(np.array(text), 3, SuffixRules(alpha=1.5, tree=True), NONE)
    assert (found.tokens, found.parents) == ([1, 5, 7], [0, 1, 2])
    found = speculate(np.array(text), 6, SuffixRules(alpha=2, tree=True, max_tree_depth=4), NONE)
    assert (found.tokens, found.parents) == ([1, 5, 2, 6], [0, 1, 0, 3])


def test_earlier_outputs_are_matched_one_by_one() -> None:
    outputs = Outputs([[4, 5], [6, 7, 8]])
    assert speculate(np.array([5]), 4, SuffixRules(alpha=4), outputs).tokens == [], "no match goes into the next output"
    assert speculate(np.array([6]), 4, SuffixRules(alpha=4), outputs).tokens == [7, 8]
    assert speculate(np.array([5, 6]), 4, SuffixRules(), outputs).tokens == [7]
    # The text's own continuation is taken where both are certain.
    assert speculate(np.array([6, 9, 6]), 1, SuffixRules(), outputs).tokens == [9]
