"""What drafters of several heads have in common: how far and in which shapes they draft, and nothing to keep.

Shapes: K drafted tokens.
"""

from typing import Any

from torch import Tensor

from draftsmith.eval.draft import Prompts
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.base import DraftHead


class StaticDrafter:
    """A drafter of chains and static trees.

    num_speculative_tokens: heads used. tree: at most that deep. drawn: a tree's tokens are drawn from their laws without
    replacement instead of being the most likely ones. greedy_drafts: a chain of argmaxes at every temperature (as vLLM
    drafts).
    """

    name: str
    layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        head: DraftHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        reach = head.max_speculative_tokens
        assert tree is not None or not drawn
        assert num_speculative_tokens >= 1
        assert reach is None or num_speculative_tokens <= reach
        assert tree is None or tree.depth <= num_speculative_tokens
        self.head: Any = head.eval()
        self.num_speculative_tokens = num_speculative_tokens
        self.tree, self.drawn = tree, drawn
        self.max_nodes = 1 + (num_speculative_tokens if tree is None else len(tree.choices))
        self.greedy_drafts = greedy_drafts

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: Prompts) -> None:
        """Nothing to read."""

    def select(self, rows: Tensor) -> None:
        """Nothing to keep."""
