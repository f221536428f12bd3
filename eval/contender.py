"""A drafter as an evaluation sees it: a head, how it drafts, and which rule accepts.

K: num_speculative_tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.errors import UserError
from draftsmith.eval.draft import Drafter
from draftsmith.eval.result import DraftInfo
from draftsmith.eval.trees import StaticTree
from draftsmith.eval.verify import Typical
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import find_method

DrafterFactory = Callable[[int], Drafter]
"""Draft length -> drafter."""


@dataclass(frozen=True)
class Contender:
    """One drafter of an evaluation.

    make: drafter of a draft length up to max_k. num_speculative_tokens: K of the decoded run. tree: None for a chain.
    typical: the lossy rule, None for lossless acceptance.
    """

    name: str
    head: DraftHead
    make: DrafterFactory
    num_speculative_tokens: int
    max_k: int
    tree: StaticTree | None = None
    typical: Typical | None = None

    @property
    def lossless(self) -> bool:
        """Whether its texts follow the target's law, so that acceptance can be simulated on them."""
        return self.typical is None

    def nodes(self, k: int) -> int:
        """Tokens that the target reads in a round with drafts of length `k`, the root included."""
        return 1 + (k if self.tree is None else sum(self.tree.levels[:k]))

    def levels(self, k: int) -> tuple[int, ...] | None:
        """Tokens proposed at each depth up to `k`; None for a chain."""
        return None if self.tree is None else self.tree.levels[:k]

    @property
    def info(self) -> DraftInfo:
        """How it drafts, for result.json."""
        return DraftInfo(
            method=self.head.method,
            num_speculative_tokens=self.num_speculative_tokens,
            nodes=self.nodes(self.num_speculative_tokens) - 1,
            tree=None if self.tree is None else self.tree.name,
            lossy=not self.lossless,
            parameters=sum(p.numel() for p in self.head.parameters() if p.requires_grad),
        )


def make_contender(
    name: str,
    head: DraftHead,
    num_speculative_tokens: int,
    max_k: int,
    *,
    tree: StaticTree | None = None,
    typical: Typical | None = None,
) -> Contender:
    """Return the drafter that `head` makes; its name says how it drafts.

    A head that cannot draft as far as asked drafts as far as it can, and a tree decides its own depth. Raises
    UserError for a tree that the head cannot draft.
    """
    method, reach = find_method(head.method), head.max_speculative_tokens
    limit = max_k if reach is None else min(max_k, reach)
    words = [name] + ([tree.name] if tree is not None else [])
    label = " ".join(words) + (", typical (lossy)" if typical is not None else "")
    if tree is None:
        return Contender(
            label, head, lambda k: method.drafter(head, k), min(num_speculative_tokens, limit), limit, None, typical
        )
    if not method.static_trees:
        raise UserError(f"{head.method} heads draft no static trees: remove the tree {tree.name} from evaluate.drafts.")
    if reach is not None and tree.depth > reach:
        raise UserError(
            f"The tree {tree.name} is {tree.depth} deep but {name} has {reach} heads: take a tree of depth {reach} or less."
        )
    return Contender(
        label,
        head,
        lambda k: method.drafter(head, k, tree=tree.cut(k)),
        tree.depth,
        tree.depth,
        tree,
        typical,
    )
