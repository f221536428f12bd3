"""Search the static tree with the longest tau for a head, from the ranks of the true tokens among its predictions, and of all sizes
the one that is fastest on this machine.

A node adds one token to every round whose text follows its path, so its gain in tau is the share of such rounds.
Shares never grow along a path, so taking the largest again and again gives the best tree of every size (Cai et al.,
"Medusa", 2024, section 2.3.3, where a share is the product of per-head accuracies). Rounds do not begin everywhere alike:
what counts is where they begin under the tree itself, which is found by following it through the text and searching
again. Shapes: S answers, T roots of the longest one, R roots of all answers, D depth, M ranks, B sizes of trees, L tokens.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import Choice, StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import between
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.results.result import Costs
from draftsmith.eval.simulate.acceptance import find_answers, token_ranks
from draftsmith.eval.simulate.texts import target_passes
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.storage import fingerprint
from draftsmith.target.target import Target


@dataclass(frozen=True)
class TextRanks:
    """The ranks of answers' tokens.

    ranks_STD[s, r, d]: in a round whose root is the r-th token of answer s, the rank of the token d + 1 places after the
    root in the head's step d, 0 for the most likely; `most` where it is not among the first `most`, -1 past the answer's
    end. tokens_S: tokens after an answer's first. conversations: that of each answer.
    """

    ranks_STD: np.ndarray
    tokens_S: np.ndarray
    conversations: tuple[str, ...]
    most: int

    @classmethod
    def of(cls, answers: Sequence[np.ndarray], conversations: Sequence[str], most: int) -> "TextRanks":
        """Gather the ranks [tokens, D] of every answer."""
        tokens_S = np.array([len(answer) for answer in answers])
        ranks_STD = np.full((len(answers), max(1, tokens_S.max()), answers[0].shape[1]), -1, dtype=np.int16)
        for row, answer in enumerate(answers):
            ranks_STD[row, : len(answer)] = answer
        return cls(ranks_STD, tokens_S, tuple(conversations), most)

    @property
    def depth(self) -> int:
        """Steps of the head."""
        return self.ranks_STD.shape[2]

    @property
    def answers(self) -> int:
        """Answers of more than one token: those that drafts are made for."""
        return int((self.tokens_S > 0).sum())

    @property
    def places(self) -> int:
        """Where a round may begin."""
        return int(self.tokens_S.sum())

    @property
    def roots_ST(self) -> np.ndarray:
        """True where a round may begin."""
        return np.arange(self.ranks_STD.shape[1]) < self.tokens_S[:, None]

    def some(self, chosen_S: np.ndarray) -> "TextRanks":
        """Return the answers that `chosen_S` (bool) marks."""
        conversations = tuple(compress(self.conversations, chosen_S))
        return TextRanks(self.ranks_STD[chosen_S], self.tokens_S[chosen_S], conversations, self.most)

    def cut(self, depth: int) -> "TextRanks":
        """Return the same for drafts of at most `depth` tokens."""
        return replace(self, ranks_STD=self.ranks_STD[:, :, :depth])


@torch.no_grad()
def read_ranks(target: Target, head: DraftHead, samples: Sequence[Tokenized], depth: int, most: int) -> TextRanks:
    """Run the target and the head over `samples` and return the ranks of their answers' tokens in steps 0..depth-1."""
    ordered = sorted(samples, key=lambda sample: len(sample.ids))
    ranks, conversations = [], []
    for indices, batch in target_passes(target, ordered, head.reads.layer_ids):
        with drafting(head):
            ranks_BLD = token_ranks(head(batch, depth), batch, head.draft_vocab, most).cpu().numpy()
        for answer in find_answers(batch):
            # The root x_r is drafted from by row t = r - 1.
            ranks.append(ranks_BLD[answer.row, answer.first - 1 : answer.last - 1])
            sample = ordered[indices[answer.row]]
            conversations.append(sample.conversation or sample.sample_id)
    return TextRanks.of(ranks, conversations, most)


PRIOR = 16.0
"""Roots that the product rule weighs as much as. On held-back answers within half a percent of the best of 0 to 512,
whether a weak or a strong head's, and whether 10 or 300 answers were searched."""
PASSES = 4
"""Searches, each under the rounds of the tree before; from the third on they change next to nothing."""
FOLDS = 4


@dataclass(frozen=True)
class FoundTree:
    """A tree and its accepted length: tau on the answers that it was found on, tau_held_back that of trees found in the
    same way, each on all folds but one, on the fold left out."""

    tree: StaticTree
    tau: float
    tau_held_back: float


def find_trees(texts: TextRanks, sizes: Sequence[int]) -> list[FoundTree]:
    """Return the best tree of every size in `sizes`, as far as there are so many nodes; texts decide the depth.

    Raises UserError for too few answers to hold some back.
    """
    fold_S = folds(texts.conversations, texts.tokens_S)
    chosen, rounds_BS = _search(texts, sizes)
    held_back_BS = np.zeros_like(rounds_BS)
    for fold in range(FOLDS):
        inside_S = fold_S == fold
        rest, left_out = texts.some(~inside_S), texts.some(inside_S)
        for index, order in enumerate(_search(rest, [len(order) for order in chosen])[0]):
            held_back_BS[index, inside_S] = count_rounds(arrivals(order, left_out), left_out.tokens_S, [len(order)])
    tokens = texts.tokens_S.sum()
    return [
        FoundTree(StaticTree.of(f"{len(order)} nodes", order), float(tokens / rounds), float(tokens / held_back))
        for order, rounds, held_back in zip(chosen, rounds_BS.sum(1), held_back_BS.sum(1), strict=True)
    ]


def measure_tree(tree: StaticTree, texts: TextRanks) -> float:
    """Return the accepted length of any tree on the texts, whose ranks must reach as far as the tree's."""
    rounds = count_rounds(arrivals(tree.choices, texts), texts.tokens_S, [len(tree.choices)]).sum()
    return float(texts.tokens_S.sum() / rounds)


def folds(conversations: Sequence[str], tokens_S: np.ndarray) -> np.ndarray:
    """Return the fold of each answer; the answers of a conversation share one. Raises UserError for too few."""
    known = sorted(set(compress(conversations, tokens_S > 0)), key=fingerprint)
    if len(known) < FOLDS:
        raise UserError(
            f"There are only {len(known)} conversations with answers to draft for, too few to search a tree on (a few "
            f"hundred are right, {FOLDS} the least): train with a larger data.heldout."
        )
    number = {name: index for index, name in enumerate(known)}
    return np.array([number.get(name, 0) % FOLDS for name in conversations])


def _search(texts: TextRanks, sizes: Sequence[int]) -> tuple[list[list[Choice]], np.ndarray]:
    """Return the best tree of every size that exists, its nodes by descending gain in tau, and its rounds [B, S]."""
    roots_ST = texts.roots_ST
    ranks_RD, weight_R = texts.ranks_STD[roots_ST], np.ones(roots_ST.sum())
    chosen: list[list[Choice]] = []
    rounds_BS = np.zeros((0, len(texts.tokens_S)), dtype=np.int64)
    for _ in range(PASSES):
        order = grow(ranks_RD, weight_R, max(sizes), texts.most)
        some = [size for size in sizes if size <= len(order)]
        reached_STD = arrivals(order, texts)
        again_BS = count_rounds(reached_STD, texts.tokens_S, some)
        if not chosen:
            chosen, rounds_BS = [order[:size] for size in some], again_BS
        for index in np.flatnonzero(again_BS.sum(1) < rounds_BS.sum(1)):
            chosen[index], rounds_BS[index] = order[: some[index]], again_BS[index]
        weight_R = count_visits(reached_STD, texts.tokens_S, len(order))[roots_ST]
    return chosen, rounds_BS


def grow(ranks_RD: np.ndarray, weight_R: np.ndarray, nodes: int, most: int) -> list[Choice]:
    """Return the paths of the best tree with `nodes` nodes by descending gain in tau: the first n are the best with n.

    weight_R: how often rounds begin at each root. The share of a path is that of its parent times
    (roots that follow it + PRIOR * share of the rank at its depth) / (roots that follow its parent + PRIOR).
    Fewer paths come back where there are no more.
    """
    overall_DM = _rank_shares(ranks_RD, weight_R, most)
    order: list[Choice] = []
    waiting: list[tuple[float, int, Choice]] = []
    behind: dict[Choice, np.ndarray] = {(): np.arange(len(ranks_RD))}

    def offer_children(path: Choice, share: float) -> None:
        if len(path) < ranks_RD.shape[1]:
            at = behind[path]
            counts_M = _counts(ranks_RD[at, len(path)], weight_R[at], most)
            chance_M = (counts_M + PRIOR * overall_DM[len(path)]) / (float(weight_R[at].sum()) + PRIOR)
            for rank in range(most):
                heapq.heappush(waiting, (-share * chance_M[rank], len(path) + 1, (*path, rank)))

    offer_children((), 1.0)
    while waiting and len(order) < nodes:
        share, depth, path = heapq.heappop(waiting)
        above = behind[path[:-1]]
        behind[path] = above[ranks_RD[above, depth - 1] == path[-1]]
        order.append(path)
        offer_children(path, -share)
    return order


def _rank_shares(ranks_RD: np.ndarray, weight_R: np.ndarray, most: int) -> np.ndarray:
    """Return [D, M]: of the roots whose text has not ended before depth d, the share with each rank there."""
    shares = []
    going_R = np.ones(len(ranks_RD), dtype=bool)
    for ranks_R in ranks_RD.T:
        shares.append(_counts(ranks_R, weight_R, most) / max(float(weight_R[going_R].sum()), 1e-9))
        going_R = ranks_R >= 0
    return np.stack(shares)


def _counts(ranks_R: np.ndarray, weight_R: np.ndarray, most: int) -> np.ndarray:
    hit_R = (ranks_R >= 0) & (ranks_R < most)
    return np.bincount(ranks_R[hit_R], weights=weight_R[hit_R], minlength=most)


def arrivals(order: Sequence[Choice], texts: TextRanks) -> np.ndarray:
    """Return [S, T, D]: the number of the node that the text after a root reaches at each depth, counted from 1 in
    `order`, or one more than there are where it has left the tree. Parents come before their children."""
    off = len(order) + 1
    child = np.full((off + 1, texts.most + 1), off, dtype=np.int32)
    number = {path: index for index, path in enumerate([(), *order])}
    for path in order:
        child[number[path[:-1]], path[-1]] = number[path]
    node_ST = np.zeros(texts.ranks_STD.shape[:2], dtype=np.int32)
    reached = []
    for depth in range(texts.ranks_STD.shape[2]):
        # The last column, which -1 takes too, stands for "not among the ranks".
        node_ST = child[node_ST, texts.ranks_STD[:, :, depth]]
        reached.append(node_ST)
    return np.stack(reached, 2)


def count_rounds(reached_STD: np.ndarray, tokens_S: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return [B, S]: target passes for each answer with the first n nodes, n in `sizes`.

    Given the text it is certain which node is accepted, so one walk gives what the recursion of eval/simulate/acceptance.py does.
    """
    place_BS = np.zeros((len(sizes), len(tokens_S)), dtype=np.int64)
    rounds_BS = np.zeros_like(place_BS)
    while (going_BS := place_BS < tokens_S).any():
        rounds_BS += going_BS
        place_BS += 1 + _accepted(reached_STD, place_BS, np.array(sizes)[:, None])
    return rounds_BS


def count_visits(reached_STD: np.ndarray, tokens_S: np.ndarray, nodes: int) -> np.ndarray:
    """Return [S, T]: 1 where a round begins with the first `nodes` nodes, else 0."""
    visits_ST = np.zeros(reached_STD.shape[:2])
    place_S = np.zeros(len(tokens_S), dtype=np.int64)
    while (going_S := place_S < tokens_S).any():
        visits_ST[going_S, place_S[going_S]] = 1
        place_S += 1 + _accepted(reached_STD, place_S[None], np.array([[nodes]]))[0]
    return visits_ST


def _accepted(reached_STD: np.ndarray, place_BS: np.ndarray, size_B1: np.ndarray) -> np.ndarray:
    """Return how many tokens are accepted in rounds that begin at `place_BS`; anything past an answer's end."""
    here_BS = np.minimum(place_BS, reached_STD.shape[1] - 1)
    return (reached_STD[np.arange(place_BS.shape[1]), here_BS] <= size_B1[..., None]).sum(-1)


_PASSES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
"""Tokens of the target passes that are timed; between them costs are interpolated."""
_DRAFTS = (1, 7, 31, 127)
"""Nodes of the trees whose drafts are timed, besides the largest one."""


@dataclass(frozen=True)
class Budget:
    """A tree with what a round of it costs. verify_ms: the target pass over its nodes and the root. draft_ms: proposing
    it. speedup: over the target alone, from the accepted length on answers held back."""

    found: FoundTree
    verify_ms: float
    draft_ms: float
    speedup: float

    @property
    def nodes(self) -> int:
        """Drafted tokens per round."""
        return len(self.found.tree.choices)


def sizes_up_to(nodes: int) -> list[int]:
    """Return the sizes to look at: every one up to 16, then such that the target's pass, root included, has a round
    number of tokens; `nodes` itself is the last."""
    sizes = list(range(1, 17))
    while sizes[-1] < nodes:
        # Steps of 2 from 16 on, of 4 from 32, of 8 from 64, ...
        step = 1 << max(1, (sizes[-1] + 1).bit_length() - 4)
        sizes.append((sizes[-1] + 1) // step * step + step - 1)
    return [*(size for size in sizes if size < nodes), nodes]


@dataclass(frozen=True)
class TreeCosts:
    """measured: target passes of several sizes, and the drafts of `trees`, cut at each of their depths."""

    measured: Costs
    trees: tuple[StaticTree, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The milliseconds by size, as JSON."""
        verify_ms = {size: round(ms, 4) for size, ms in self.measured.verify_ms.items()}
        draft_ms = {name: {k: round(ms, 4) for k, ms in by_k.items()} for name, by_k in self.measured.draft_ms.items()}
        return {"verify_ms": verify_ms, "draft_ms": draft_ms}

    def budget(self, searched: FoundTree) -> Budget:
        """Return what a round with a tree costs and brings; proposing it, by the times of trees of its depth."""
        tree, timed = searched.tree, self.measured
        depth = min(tree.depth, max(one.depth for one in self.trees))
        by_size = {
            str(len(one.choices)): timed.draft_ms[f"head {one.name}"][str(depth)]
            for one in self.trees
            if one.depth >= depth
        }
        verify_ms, draft_ms = between(timed.verify_ms, tree.max_nodes), between(by_size, len(tree.choices))
        speedup = searched.tau_held_back * between(timed.verify_ms, 1) / (verify_ms + draft_ms)
        return Budget(searched, verify_ms, draft_ms, speedup)


def measure_tree_costs(
    target: Target,
    head: DraftHead,
    searched: Sequence[FoundTree],
    context_ids: Sequence[int],
    sampling: Sampling,
    *,
    rows: int = 1,
) -> TreeCosts:
    """Time target passes up to the largest tree's size, and the drafts of a few of the trees, which ascend in size."""
    largest = len(searched[-1].tree.choices)
    numbers = [len(one.tree.choices) for one in searched]
    indices = {bisect_left(numbers, nodes) for nodes in _DRAFTS if nodes < largest} | {len(searched) - 1}
    trees = tuple(searched[index].tree for index in sorted(indices))
    drafters = [head_system("head", head, tree.depth, tree.depth, tree=tree) for tree in trees]
    # A name of its own may say more of how the head drafts.
    systems = [replace(c, name=f"head {tree.name}") for c, tree in zip(drafters, trees, strict=True)]
    passes = [*(tokens for tokens in _PASSES if tokens <= largest), largest + 1]
    costs = measure_costs(target, systems, context_ids, sampling, rows=rows, passes=passes)
    return TreeCosts(costs, trees)


def fastest(budgets: Sequence[Budget]) -> Budget:
    """Return the budget with the largest speedup, of equals the smallest."""
    return max(budgets, key=lambda budget: (budget.speedup, -budget.nodes))
