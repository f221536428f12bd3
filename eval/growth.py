"""Static trees as they are drafted, level by level: who has children, and whose child is who.

Shapes: B rows, n nodes of one level, m of them with children, T nodes with children so far (the root included),
N all nodes, C the most children that a node has.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.eval.draft import DecodeState
from draftsmith.eval.noise import DRAFT, uniforms
from draftsmith.eval.trees import StaticTree


@dataclass(frozen=True)
class Level:
    """The nodes at one depth, in the order of their numbers.

    above: how many nodes of the level above have children. parent_n: their parents' places among the nodes with children of the level above. sibling_n: which child of its
    parent a node is, by rank. rank_n: its rank. inner_m: the places of the nodes that have children themselves.
    ancestors_mT: for each of these, which of the nodes with children so far are above it or itself, the root left out.
    """

    above: int
    parent_n: Tensor
    sibling_n: Tensor
    rank_n: Tensor
    inner_m: Tensor
    ancestors_mT: Tensor


@dataclass(frozen=True)
class Growth:
    """levels: depth 1, 2, ... inner_T: the numbers of the nodes with children. law_M: for each node up to the last with
    children its place among these (0 where it has none). children: the most that any node has. ranks: one more than the
    largest rank."""

    levels: tuple[Level, ...]
    inner_T: Tensor
    law_M: Tensor
    children: int
    ranks: int


@lru_cache(maxsize=64)
def growth(tree: StaticTree, device: torch.device) -> Growth:
    """Return the levels of `tree`, whose nodes are numbered by depth and then by path."""
    paths = [(), *tree.choices]
    parents = {path[:-1] for path in tree.choices}
    inner = [path for path in paths if path in parents]
    levels = []
    for depth in range(1, tree.depth + 1):
        here = [path for path in paths if len(path) == depth]
        above = [path for path in inner if len(path) == depth - 1]
        so_far = [path for path in inner if 0 < len(path) <= depth]
        grown = [path for path in here if path in parents]
        siblings = [sum(other[:-1] == path[:-1] for other in here[:i]) for i, path in enumerate(here)]
        seen = [[path[: len(other)] == other for other in so_far] for path in grown]
        levels.append(
            Level(
                len(above),
                torch.tensor([above.index(path[:-1]) for path in here], device=device),
                torch.tensor(siblings, device=device),
                torch.tensor([path[-1] for path in here], device=device),
                torch.tensor([here.index(path) for path in grown], dtype=torch.long, device=device),
                torch.tensor(seen, dtype=torch.bool, device=device).view(len(grown), len(so_far)),
            )
        )
    numbers = [paths.index(path) for path in inner]
    law = [numbers.index(node) if node in numbers else 0 for node in range(numbers[-1] + 1)]
    children = max(int(level.sibling_n.max()) + 1 for level in levels)
    return Growth(
        tuple(levels), torch.tensor(numbers, device=device), torch.tensor(law, device=device), children, tree.ranks
    )


def child_uniforms(state: DecodeState, tree: StaticTree, numbers_m: Tensor) -> Tensor:
    """Return uniforms [B, m, C] for drawing the children of the nodes `numbers_m`.

    tree: the whole one, however deep this round drafts: a row's numbers must not depend on the rows beside it.
    """
    children = growth(tree, numbers_m.device).children
    uniform_BN = uniforms(state.keys_B, state.length_B, DRAFT, (len(tree.choices) + 1) * children)
    return uniform_BN.unflatten(1, (-1, children))[:, numbers_m]
