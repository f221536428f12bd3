"""What passes between the decoding loop and a drafter: drafts (trees of tokens; a chain has one branch) and states.

Shapes: B rows, N nodes (node 0 is the root), W draft vocab.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.trees import StaticTree


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.

    tokens_BN: node 0 is the root, the last committed token, which the target has not read yet.
    parents_BN: index of each node's parent, -1 for the root; parents come before their children.
    count_B: valid nodes per row, the root included; nodes from there on are padding.
    draft_probs_BMW: entry i is the distribution that the children of node i were drawn from, in the order of their numbers and without
    replacement; nodes from M on have no children. None where the tokens were chosen deterministically. A child drawn
    when no mass was left is never accepted. vocab_W: the target ids of a distribution's columns; None if they are the same.
    tree: the static tree that every row has; linear: whether every row is a chain, None where it is not known. Both spare
    working out the shape in every round (and, on a GPU, waiting for it).
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    count_B: Tensor
    draft_probs_BMW: Tensor | None = None
    vocab_W: Tensor | None = None
    tree: StaticTree | None = None
    linear: bool | None = None

    @classmethod
    def static(cls, root_B: Tensor, drafted_BN: Tensor, tree: StaticTree, limit_B: Tensor) -> "Draft":
        """Build a static tree from its root and its drafted tokens; row b's nodes deeper than limit_B[b] are padding."""
        shape = tree.on(root_B.device)
        count_B = (shape.depth_N <= limit_B.clamp(min=0)[:, None]).sum(1)
        parents_BN = shape.parents_N.expand(len(root_B), -1)
        return cls(torch.cat([root_B[:, None], drafted_BN], 1), parents_BN, count_B, tree=tree)

    @classmethod
    def chain(
        cls,
        root_B: Tensor,
        drafted_BK: Tensor,
        count_B: Tensor | None = None,
        draft_probs_BMW: Tensor | None = None,
        vocab_W: Tensor | None = None,
    ) -> "Draft":
        """Build a chain from its root and its drafted tokens; `count_B` drafted tokens are valid (all by default)."""
        rows, length = drafted_BK.shape
        tokens_BN = torch.cat([root_B[:, None], drafted_BK], 1)
        parents_BN = numbers(-1, length, root_B.device).expand(rows, -1)
        valid_B = torch.full_like(root_B, length) if count_B is None else count_B
        return cls(tokens_BN, parents_BN, valid_B + 1, draft_probs_BMW, vocab_W, linear=True)

    def drawn_from(self, draft_probs_BMW: Tensor, vocab_W: Tensor | None) -> "Draft":
        """Return the same draft with the distributions that its tokens were drawn from."""
        return replace(self, draft_probs_BMW=draft_probs_BMW, vocab_W=vocab_W)

    @cached_property
    def is_chain(self) -> bool:
        """True when every node's parent is the node before it."""
        if self.linear is not None:
            return self.linear
        if self.tree is not None:
            return self.tree.depth == len(self.tree.choices)
        order = torch.arange(-1, self.parents_BN.shape[1] - 1, device=self.parents_BN.device)
        return bool((self.parents_BN == order).all())

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """Bool [B, N, N]: entry (i, j) is True where node j is node i or one of its ancestors."""
        rows, nodes = self.parents_BN.shape
        device = self.parents_BN.device
        if self.tree is not None:
            return self.tree.on(device).ancestors_NN.expand(rows, -1, -1)
        if self.is_chain:
            return chain_above(nodes, device).expand(rows, -1, -1)
        # Squaring "is my parent or me" doubles how far up it reaches: a loop over levels of depth, not over nodes.
        node = torch.arange(nodes, device=device)
        above = ((self.parents_BN[..., None] == node) | (node[:, None] == node)).float()
        for _ in range((nodes - 1).bit_length()):
            above = (above @ above).clamp_(max=1)
        return above.bool()

    @cached_property
    def depth_BN(self) -> Tensor:
        """Depth of each node; the root has depth 0."""
        if self.tree is not None:
            return self.tree.on(self.parents_BN.device).depth_N.expand(len(self.parents_BN), -1)
        if self.linear:
            return numbers(0, self.tokens_BN.shape[1], self.tokens_BN.device).expand_as(self.tokens_BN)
        return self.ancestors_BNN.sum(-1) - 1

    @cached_property
    def valid_BN(self) -> Tensor:
        """Bool [B, N]: the nodes that are no padding."""
        return numbers(0, self.tokens_BN.shape[1], self.count_B.device) < self.count_B[:, None]

    @cached_property
    def levels_BD(self) -> Tensor:
        """Valid nodes at depth 1, 2, ... of each row."""
        rows, nodes = self.tokens_BN.shape
        depth_BN = self.depth_BN.masked_fill(
            torch.arange(nodes, device=self.count_B.device) >= self.count_B[:, None], 0
        )
        counts_BN = torch.zeros(rows, nodes, dtype=torch.long, device=self.count_B.device)
        return counts_BN.scatter_add_(1, depth_BN, torch.ones_like(depth_BN))[:, 1:]


@lru_cache(maxsize=64)
def _short_chain_above(nodes: int, device: torch.device) -> Tensor:
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def chain_above(nodes: int, device: torch.device) -> Tensor:
    """Return bool [N, N]: which nodes of a chain are above each or itself."""
    # Those of prompts are too large to keep.
    return (_short_chain_above if nodes <= 64 else _short_chain_above.__wrapped__)(nodes, device)


@lru_cache(maxsize=256)
def numbers(first: int, last: int, device: torch.device) -> Tensor:
    """Return first, ..., last - 1; kept, since every round asks for the same few."""
    return torch.arange(first, last, device=device)


@dataclass(frozen=True)
class NewTokens:
    """Tokens committed since the last proposal, paired as heads read them: token x_{t+1} with the target's state at t.

    tokens_Bn: x_{t+1}. aux_BnF: aux features of t, last_BnD: post-final-norm state of t.
    count_B: valid entries per row (the rest is padding at the end); the last valid row has t = length - 1.
    """

    tokens_Bn: Tensor
    aux_BnF: Tensor
    last_BnD: Tensor
    count_B: Tensor

    def select(self, rows: Tensor) -> "NewTokens":
        """Return the same for some of the rows, without padding that none of them needs."""
        count_B = self.count_B[rows]
        width = max(1, int(count_B.max()))
        return NewTokens(self.tokens_Bn[rows, :width], self.aux_BnF[rows, :width], self.last_BnD[rows, :width], count_B)


@dataclass(frozen=True)
class Prompts:
    """Sequences that enter a batch.

    rows_b: the batch rows they take. ids_bL: their prompts, padded at the end. length_b: tokens of each prompt.
    fresh: every token but the first, the first emitted one included, with the target's states (count = length).
    """

    rows_b: Tensor
    ids_bL: Tensor
    length_b: Tensor
    new_tokens: NewTokens


@dataclass(frozen=True)
class DecodeState:
    """What a drafter may know at the start of a round.

    root_B: last committed token. length_B: its position, which is the number of tokens the target has
    read. limit_B: draft tokens allowed this round. keys_B: noise keys. lengths, limits: the same as length_B and limit_B of
    the rows that are not finished, where the host knows them, which spares waiting for a GPU.
    """

    root_B: Tensor
    length_B: Tensor
    limit_B: Tensor
    keys_B: Tensor
    new_tokens: NewTokens
    sampling: Sampling
    lengths: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    @cached_property
    def longest(self) -> int:
        """The largest length of a row that is not finished."""
        return max(self.lengths) if self.lengths else int(self.length_B.max())

    @cached_property
    def room(self) -> int:
        """How deep the row with the most room may draft; at least 1."""
        return max(1, *self.limits) if self.limits else max(1, int(self.limit_B.max()))

    def select(self, rows: Tensor) -> "DecodeState":
        """Return the same for some of the rows, which hold all that are not finished."""
        return replace(
            self,
            root_B=self.root_B[rows],
            length_B=self.length_B[rows],
            limit_B=self.limit_B[rows],
            keys_B=self.keys_B[rows],
            new_tokens=self.new_tokens.select(rows),
        )


class Drafter(Protocol):
    """Proposes tokens. Holds its own cache for one batch at a time."""

    name: str
    layer_ids: tuple[int, ...]
    max_nodes: int
    """Most nodes a draft can have, the root included."""
    num_speculative_tokens: int
    """Length of the longest path that is drafted, the root not counted."""

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch of `rows` sequences of at most `capacity` tokens; drafted ones come on top."""

    def admit(self, prompts: Prompts) -> None:
        """Read new prompts into their rows, which forget what they held; the last pair of `prompts.fresh` comes again
        as the only fresh one of the rows' next proposal."""

    def propose(self, state: DecodeState) -> Draft:
        """Read the fresh tokens, then propose a draft whose root is `state.root_B`."""

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""


class TargetAlone:
    """The baseline: nothing is drafted, every round is one target pass for one token."""

    name = "target alone"
    layer_ids: tuple[int, ...] = ()
    max_nodes = 1
    num_speculative_tokens = 0

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: Prompts) -> None:
        """Nothing to read."""

    def propose(self, state: DecodeState) -> Draft:
        """Return the root alone."""
        return Draft.chain(state.root_B, state.root_B.new_zeros(len(state.root_B), 0))

    def select(self, rows: Tensor) -> None:
        """Nothing to keep."""
