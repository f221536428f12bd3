"""Grow drafts: chains token by token, trees level by level, by the plan of a static one or the beam of a dynamic one.

A dynamic tree is a beam by cumulative probability, of whose candidates the best are kept; by the rule accum_logp those with the
best parents. Ties go to the earlier candidate, so that no child is kept without its parent: candidates are numbered by
level, and a child is never more likely than its parent.

Shapes: B rows, K drafted tokens of a chain, W draft vocab. Static: n nodes of one level, m of them with children, T
nodes with children so far (the root included), M nodes up to the last with children, C the most children of a node.
Dynamic: m nodes of the beam, T nodes run so far, c candidates of one level, J all candidates, N nodes kept (the root
included).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, LengthRule, listed, numbers
from draftsmith.decoder.sampling import DRAFT, draw, probs
from draftsmith.decoder.trees import DynamicTree, StaticTree


def chain_token_by_token(
    state: DecodeState,
    length: int,
    next_logits: Callable[[int, Tensor], Tensor],
    *,
    greedy: bool = False,
    vocab_W: Tensor | None = None,
    rule: LengthRule | None = None,
    chance: Callable[[int, Tensor], Tensor] | None = None,
) -> Draft:
    """Return a chain of `length` tokens, each drawn under the target's sampling settings, or the most likely one: at
    temperature 0, and everywhere where `greedy` is set (as vLLM drafts).

    next_logits(k, tokens_B): the logits [B, W] of the k-th drafted token, given the token before it (for k = 0 the
    root); called once for each k, in order. vocab_W: the target ids of their columns, None if they are the same. rule: drafts end where
    it says. chance(k, tokens_B): the chance that the k-th token is accepted, given the one before it, where a head says so; None: by the
    rule.
    """
    greedy = greedy or state.sampling.greedy
    uniform_BK = None if greedy else state.noise.draw(DRAFT, length)
    tokens, draft_probs = [state.root_B], []
    drafted_B, reached_B = state.limit_B.clamp(0, length), None
    for k in range(length):
        logits_BW = next_logits(k, tokens[-1])
        if rule is not None:
            chance_B = rule.chance(logits_BW) if chance is None else chance(k, tokens[-1])
            reached_B = chance_B if reached_B is None else reached_B * chance_B
            drafted_B = torch.where(reached_B < rule.floors[k], drafted_B.clamp(max=k), drafted_B)
            if not bool((drafted_B > k).any()):
                break
        if uniform_BK is None:
            choice_B = logits_BW.argmax(-1)
        else:
            draft_probs.append(probs(logits_BW, state.sampling))
            choice_B = draw(draft_probs[-1], uniform_BK[:, k])
        tokens.append(choice_B if vocab_W is None else vocab_W[choice_B])
    tokens_BK = torch.stack(tokens[1:], 1) if len(tokens) > 1 else state.root_B.new_zeros(len(state.root_B), 0)
    if not draft_probs:
        return Draft.chain(state.root_B, tokens_BK, drafted_B)
    return Draft.chain(state.root_B, tokens_BK, drafted_B, torch.stack(draft_probs, 1), vocab_W)


@dataclass(frozen=True)
class Level:
    """The nodes at one depth of a static tree, in the order of their numbers. An inner node is one with children.

    Attributes:
        above: Number of inner nodes at the depth above.
        parent_n: The parent of each node, as an index into these.
        sibling_n: The number of each node among its siblings, by rank.
        rank_n: The rank of each node's token among the drafts of its parent.
        inner_m: The inner nodes of this depth, as indices into its nodes.
        ancestors_mT: For each of them, bool over all inner nodes down to this depth without the root: is it an ancestor, or
            the node itself?
    """

    above: int
    parent_n: Tensor
    sibling_n: Tensor
    rank_n: Tensor
    inner_m: Tensor
    ancestors_mT: Tensor


@dataclass(frozen=True)
class Growth:
    """The plan of drafting a static tree.

    levels: depth 1, 2, ... inner_T: the numbers of the nodes with children. probs_M: for each node up to the last with
    children, its index into these (0 where it has none). children: the most of any node. ranks: the largest rank + 1.
    """

    levels: tuple[Level, ...]
    inner_T: Tensor
    probs_M: Tensor
    children: int
    ranks: int


@lru_cache(maxsize=64)
def growth(tree: StaticTree, device: torch.device) -> Growth:
    """Return the plan of `tree`, whose nodes are numbered by depth and then by path."""
    shape = tree.on(device)
    node_N, parents_N = torch.arange(tree.max_nodes, device=device), shape.parents_N
    inner_T = parents_N[1:].unique()
    inner_depth_T = shape.depth_N[inner_T]
    siblings_N = ((parents_N[:, None] == parents_N) & (node_N < node_N[:, None])).sum(1)
    levels = []
    for depth in range(1, tree.depth + 1):
        here = (shape.depth_N == depth).nonzero()[:, 0]
        above = inner_T[inner_depth_T == depth - 1]
        so_far = inner_T[(inner_depth_T > 0) & (inner_depth_T <= depth)]
        inner_m = torch.isin(here, inner_T).nonzero()[:, 0]
        levels.append(
            Level(
                len(above),
                torch.searchsorted(above, parents_N[here]),
                siblings_N[here],
                shape.rank_N[here],
                inner_m,
                shape.ancestors_NN[here[inner_m]][:, so_far],
            )
        )
    last = int(inner_T[-1]) + 1
    probs_M = torch.zeros_like(node_N).scatter(0, inner_T, torch.arange(len(inner_T), device=device))[:last]
    return Growth(tuple(levels), inner_T, probs_M, int(siblings_N.max()) + 1, tree.ranks)


def child_uniforms(state: DecodeState, tree: StaticTree, numbers_m: Tensor) -> Tensor:
    """Return uniforms [B, m, C] for drawing the children of the nodes `numbers_m`.

    tree: before it is cut to this round's depth, so that a row's random numbers do not depend on the other rows.
    """
    children = growth(tree, numbers_m.device).children
    uniform_BN = state.noise.draw(DRAFT, (len(tree.choices) + 1) * children)
    return uniform_BN.unflatten(1, (-1, children))[:, numbers_m]


@dataclass(frozen=True)
class Candidates:
    """Nodes that a dynamic tree may keep: tokens, the cumulative log-probabilities by which it does, and their parents' candidate
    numbers (-1 is the root), all [B, c]."""

    tokens_Bc: Tensor
    score_Bc: Tensor
    parent_Bc: Tensor


@dataclass(frozen=True)
class Ranking:
    """All candidates of a dynamic tree, level by level, and the order in which it takes them.

    of_BJ: tokens, scores and parents; the score of a node deeper than its row's limit is -inf. depth_J: their depths. order_BJ:
    indices of the candidates, the first one taken first. count_B: how many may be taken.
    """

    of_BJ: Candidates
    depth_J: Tensor
    order_BJ: Tensor
    count_B: Tensor


@dataclass(frozen=True)
class Beam:
    """A dynamic tree while it grows.

    tokens_Bm, score_Bm, number_Bm: the best nodes of the last level, their cumulative log-probabilities and candidate
    numbers (-1 is the root). parent_Bm: their parents, as indices into the beam before. ancestors_BmT: which of the
    nodes run so far are ancestors of each or itself; None where no node is run. levels: the candidates of each.
    """

    tree: DynamicTree
    root_B: Tensor
    limit_B: Tensor
    tokens_Bm: Tensor
    score_Bm: Tensor
    number_Bm: Tensor
    parent_Bm: Tensor
    ancestors_BmT: Tensor | None
    levels: tuple[Candidates, ...] = ()

    def extend(self, logits_BmW: Tensor, target_ids: Callable[[Tensor], Tensor]) -> "Beam":
        """Add the most likely tokens after every node of the beam as candidates; the best of them are the new beam.

        logits_BmW: of the tokens after each node, or [B, 1, W] after any."""
        branching = min(self.tree.branching, logits_BmW.shape[-1])
        best = logits_BmW.float().log_softmax(-1).topk(branching, -1)
        score_Bmb = self.score_Bm[..., None] + best.values
        score_Bc, tokens_Bc = score_Bmb.flatten(1), target_ids(best.indices).expand_as(score_Bmb).flatten(1)
        number_Bc = self.number_Bm.repeat_interleave(branching, 1)
        first = sum(above.score_Bc.shape[1] for above in self.levels)
        # A node with fewer children leaves room for those of more nodes.
        beam = replace(self.tree, branching=branching).beam if self.tree.rule == "accum_logp" else self.tree.beam
        width = min(beam, score_Bc.shape[1])
        ranked = score_Bc.sort(dim=1, descending=True, stable=True)
        chosen_Bm = ranked.indices[:, :width]
        best_Bm = Candidates(tokens_Bc.gather(1, chosen_Bm), ranked.values[:, :width], number_Bc.gather(1, chosen_Bm))
        if self.tree.rule == "best_first":
            # Its beam is as wide as the tree is large: none of the others is ever kept.
            level, number_Bm = best_Bm, numbers(first, first + width, chosen_Bm.device).expand_as(chosen_Bm)
        else:
            by_parent = self.tree.rule == "accum_logp"
            kept_by = self.score_Bm.repeat_interleave(branching, 1) if by_parent else score_Bc
            level, number_Bm = Candidates(tokens_Bc, kept_by, number_Bc), first + chosen_Bm
        parent_Bm = chosen_Bm // branching
        ancestors_BmT = self.ancestors_BmT
        if ancestors_BmT is not None:
            own_BmT = torch.eye(width, dtype=torch.bool, device=chosen_Bm.device).expand(len(chosen_Bm), -1, -1)
            above_BmT = ancestors_BmT.gather(1, parent_Bm[..., None].expand(-1, -1, ancestors_BmT.shape[2]))
            ancestors_BmT = torch.cat([above_BmT, own_BmT], 2)
        return replace(
            self,
            tokens_Bm=best_Bm.tokens_Bc,
            score_Bm=best_Bm.score_Bc,
            number_Bm=number_Bm,
            parent_Bm=parent_Bm,
            ancestors_BmT=ancestors_BmT,
            levels=(*self.levels, level),
        )

    def ranking(self) -> Ranking:
        """Return the candidates of all levels in the order in which the tree takes them, whatever it may hold."""
        parts = [(level.tokens_Bc, level.score_Bc, level.parent_Bc) for level in self.levels]
        tokens_BJ, score_BJ, parent_BJ = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        depths = [depth for depth, level in enumerate(self.levels, 1) for _ in range(level.score_Bc.shape[1])]
        depth_J = listed(tuple(depths), tokens_BJ.device)
        score_BJ = score_BJ.masked_fill(depth_J > self.limit_B[:, None], -torch.inf)
        order_BJ = score_BJ.sort(dim=1, descending=True, stable=True).indices
        return Ranking(Candidates(tokens_BJ, score_BJ, parent_BJ), depth_J, order_BJ, (score_BJ > -torch.inf).sum(1))

    def draft(self) -> Draft:
        """Return the draft of the best candidates of all levels; nodes deeper than a row's limit are padding."""
        ranking = self.ranking()
        tokens_BJ, parent_BJ = ranking.of_BJ.tokens_Bc, ranking.of_BJ.parent_Bc
        kept = min(self.tree.total_tokens - 1, tokens_BJ.shape[1])
        index_BN = ranking.order_BJ[:, :kept].sort(1).values
        # From parents' numbers among all candidates to numbers among the kept ones; 0 is the root.
        node_BJ = torch.zeros_like(parent_BJ).scatter(
            1, index_BN, numbers(1, kept + 1, index_BN.device).expand_as(index_BN)
        )
        parent_BN = parent_BJ.gather(1, index_BN)
        parents_BN = torch.where(parent_BN < 0, 0, node_BJ.gather(1, parent_BN.clamp(min=0)))
        nodes_B = 1 + ranking.count_B.clamp(max=kept)
        root_B1 = self.root_B[:, None]
        return Draft(
            torch.cat([root_B1, tokens_BJ.gather(1, index_BN)], 1),
            torch.cat([torch.full_like(root_B1, -1), parents_BN], 1),
            nodes_B,
            linear=self.tree.branching == 1,
            depth=len(self.levels),
        )


def start_beam(tree: DynamicTree, root_B: Tensor, limit_B: Tensor, *, run: bool = True) -> Beam:
    """Return the beam that holds the root alone. run: whether nodes will be run, which then need to know their ancestors."""
    zeros_B1 = torch.zeros_like(root_B)[:, None]
    nothing_B10 = torch.zeros(len(root_B), 1, 0, dtype=torch.bool, device=root_B.device) if run else None
    score_B1 = torch.zeros(len(root_B), 1, device=root_B.device)
    return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 1, zeros_B1, nothing_B10)
