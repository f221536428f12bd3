"""Estimate what trees of every size cost on this machine, and find the fastest."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.eval.clocks.cost_table import between
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.results.result import Costs
from draftsmith.eval.tree_search.search import FoundTree
from draftsmith.heads.base import DraftHead
from draftsmith.target.target import Target

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

    def verify_ms(self, tokens: int) -> float:
        """Return the milliseconds of a target pass over `tokens` tokens."""
        return between(self.measured.verify_ms, tokens)

    def draft_ms(self, tree: StaticTree) -> float:
        """Return the milliseconds that proposing `tree` takes, from trees of its depth."""
        depth = min(tree.depth, max(timed.depth for timed in self.trees))
        deep = [timed for timed in self.trees if timed.depth >= depth]
        times = [self.measured.draft_ms[f"head {timed.name}"][str(depth)] for timed in deep]
        return float(np.interp(len(tree.choices), [len(timed.choices) for timed in deep], times))

    def budget(self, searched: FoundTree) -> Budget:
        """Return what a round with a tree costs and brings."""
        verify_ms, draft_ms = self.verify_ms(len(searched.tree.choices) + 1), self.draft_ms(searched.tree)
        speedup = searched.tau_held_back * self.verify_ms(1) / (verify_ms + draft_ms)
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
