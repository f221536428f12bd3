"""The interface between the decoding loop and a drafter: the state it reads and the draft it returns.

A draft is a tree of tokens; a chain is a tree with one branch.

Shapes: B rows, N nodes (node 0 is the root), M nodes with children, D depths of a tree, K drafted tokens of a chain, n
new tokens, b admitted rows, L tokens of a prompt, F width of the aux streams, W draft vocab. In `NewTokens`: D hidden
of the target.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decoder.sampling import Noise, NoiseTable, Sampling
from draftsmith.decoder.trees import StaticTree


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens per row.

    Args:
        tokens_BN: node 0 is the root, the last token of the text, which the target has not read yet.
        parents_BN: index of each node's parent, -1 for the root; parents come before their children.
        nodes_B: valid nodes per row, the root included; nodes from there on are padding.
        draft_probs_BMW: entry i is the distribution that the children of node i were drawn from, one after the other and
            without replacement; nodes from M on have no children. None where tokens were chosen deterministically. Once
            the distribution is used up, further children are fillers with q = 0, which are never accepted.
        vocab_W: the target ids of a distribution's columns, None if they are the same.
        tree: the static tree that all rows have, if they have one; it saves computing the shape in every round.
        linear: whether all rows are chains, None if not known; it saves the same.
        depth: an upper bound of how deep a valid node is, where there is a better one than the number of nodes.
        listen: called with the target's logits [B, N, V] at all nodes, padding included, once it has read them: for drafters
            that learn from nodes which are never accepted.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    nodes_B: Tensor
    draft_probs_BMW: Tensor | None = None
    vocab_W: Tensor | None = None
    tree: StaticTree | None = None
    linear: bool | None = None
    depth: int | None = None
    listen: Callable[[Tensor], None] | None = None

    @classmethod
    def static(cls, root_B: Tensor, drafted_BN: Tensor, tree: StaticTree, limit_B: Tensor) -> "Draft":
        """Build a static tree from its root and drafted tokens; row b's nodes deeper than limit_B[b] are padding."""
        shape = tree.on(root_B.device)
        nodes_B = (shape.depth_N <= limit_B.clamp(min=0)[:, None]).sum(1)
        parents_BN = shape.parents_N.expand(len(root_B), -1)
        linear = tree.depth == len(tree.choices)
        tokens_BN = torch.cat([root_B[:, None], drafted_BN], 1)
        return cls(tokens_BN, parents_BN, nodes_B, tree=tree, linear=linear, depth=tree.depth)

    @classmethod
    def chain(
        cls,
        root_B: Tensor,
        drafted_BK: Tensor,
        drafted_B: Tensor | None = None,
        draft_probs_BMW: Tensor | None = None,
        vocab_W: Tensor | None = None,
    ) -> "Draft":
        """Build a chain from its root and its drafted tokens; `drafted_B` of these are valid (all by default)."""
        rows, length = drafted_BK.shape
        tokens_BN = torch.cat([root_B[:, None], drafted_BK], 1)
        parents_BN = numbers(-1, length, root_B.device).expand(rows, -1)
        nodes_B = 1 + (torch.full_like(root_B, length) if drafted_B is None else drafted_B)
        return cls(tokens_BN, parents_BN, nodes_B, draft_probs_BMW, vocab_W, linear=True)

    @property
    def most_depth(self) -> int:
        """An upper bound of how deep a valid node is."""
        return self.tokens_BN.shape[1] - 1 if self.depth is None else self.depth

    @cached_property
    def is_chain(self) -> bool:
        """True when every node's parent is the node before it."""
        if self.linear is not None:
            return self.linear
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
        """Bool [B, N]: the nodes that are not padding."""
        return numbers(0, self.tokens_BN.shape[1], self.nodes_B.device) < self.nodes_B[:, None]

    @cached_property
    def levels_BD(self) -> Tensor:
        """Valid nodes at depth 1, 2, ... of each row."""
        depth_BN = self.depth_BN.masked_fill(~self.valid_BN, 0)
        return torch.zeros_like(depth_BN).scatter_add_(1, depth_BN, torch.ones_like(depth_BN))[:, 1:]


@lru_cache(maxsize=64)
def _short_chain_above(nodes: int, device: torch.device) -> Tensor:
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def chain_above(nodes: int, device: torch.device) -> Tensor:
    """Return bool [N, N]: entry (i, j) is True where node j of a chain is node i or above it."""
    # Only short ones are cached: those of prompts are large.
    return (_short_chain_above if nodes <= 64 else _short_chain_above.__wrapped__)(nodes, device)


@lru_cache(maxsize=256)
def numbers(first: int, last: int, device: torch.device) -> Tensor:
    """Return first, ..., last - 1 as a cached tensor: every round needs the same few."""
    return torch.arange(first, last, device=device)


@lru_cache(maxsize=256)
def listed(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `values` as a cached tensor, which is uploaded once."""
    return torch.tensor(values, device=device)


@dataclass(frozen=True)
class LengthRule:
    """A chain ends before the first token whose chance to be reached and accepted is below its floor, without looking at that token.

    What is estimated is known before the token is drawn: the distribution that it will be drawn from, and the tokens before it. So a
    drafted token is a sample of the distribution that it names, and the text stays the target's at every temperature. A rule that looked
    at the token would keep those that it likes, which have another distribution than the one that acceptance divides by.

    floors: of the first token, the second, ...; one above 1 ends every draft there. The chance is the product of the largest
    probabilities of the distributions so far, or of a head's own confidences.
    """

    floors: tuple[float, ...]

    @property
    def name(self) -> str:
        """The rule in a drafter's name."""
        alike = len(set(self.floors)) == 1 and 0 < self.floors[0] < 1
        return f" until {self.floors[0]:g}" if alike else " adaptive"

    def chance(self, logits_RW: Tensor) -> Tensor:
        """Return [R]: the chance that a token is accepted, by the logits that it will be drawn by, before any sampling setting."""
        logits_RW = logits_RW.float()
        return (logits_RW.amax(-1) - logits_RW.logsumexp(-1)).exp()

    def length(self, logits_BKW: Tensor) -> Tensor:
        """Return [B]: how many of K tokens are drafted whose distributions are known at once."""
        floors_K = listed(self.floors[: logits_BKW.shape[1]], logits_BKW.device)
        return (self.chance(logits_BKW).cumprod(1) >= floors_K).long().cumprod(1).sum(1)


@dataclass(frozen=True)
class NewTokens:
    """The tokens that joined the text since the last proposal, paired as heads read them: token x_{t+1} with the target's state at t.

    tokens_Bn: x_{t+1}. aux_BnF: aux features of t. last_BnD: post-final-norm state of t.
    count_B: valid entries per row, padding follows; the last valid entry has t = length - 1.
    """

    tokens_Bn: Tensor
    aux_BnF: Tensor
    last_BnD: Tensor
    count_B: Tensor

    def at_last(self, x_BnX: Tensor) -> Tensor:
        """Return [B, X]: what stands in `x_BnX` at each row's last new token."""
        return x_BnX[numbers(0, len(x_BnX), x_BnX.device), (self.count_B - 1).clamp(min=0)]

    def select(self, rows: Tensor) -> "NewTokens":
        """Keep only these rows, and no more padding than they need."""
        count_B = self.count_B[rows]
        width = max(1, int(count_B.max()))
        return NewTokens(self.tokens_Bn[rows, :width], self.aux_BnF[rows, :width], self.last_BnD[rows, :width], count_B)


@dataclass(frozen=True)
class Prompts:
    """Prompts that are admitted to a batch.

    rows_b: the batch rows they take. ids_bL: token ids, padded at the end. length_b: tokens of each prompt. new_tokens:
    every token but the first, and the first emitted one, with the target's states (count = length).
    """

    rows_b: Tensor
    ids_bL: Tensor
    length_b: Tensor
    new_tokens: NewTokens


@dataclass(frozen=True)
class DecodeState:
    """What a drafter reads at the start of a round.

    root_B: the last token of the text. length_B: its position, which is the number of tokens in the target's cache
    (`KVCache.lengths_B`). limit_B: tokens that may still be emitted. keys_B: keys of the rows' random numbers.
    new_tokens: what joined the text since the last proposal. host_lengths, host_limits: length_B and limit_B of the
    unfinished rows where the host knows them, which saves waiting for a GPU. table: random numbers that are at hand.
    """

    root_B: Tensor
    length_B: Tensor
    limit_B: Tensor
    keys_B: Tensor
    new_tokens: NewTokens
    sampling: Sampling
    host_lengths: tuple[int, ...] = ()
    host_limits: tuple[int, ...] = ()
    table: NoiseTable | None = None

    @cached_property
    def noise(self) -> Noise:
        """This round's random numbers."""
        return Noise(self.keys_B, self.length_B, self.table, 0 if self.table is None else self.longest)

    @cached_property
    def longest(self) -> int:
        """The largest length of an unfinished row."""
        return max(self.host_lengths) if self.host_lengths else int(self.length_B.max())

    @cached_property
    def longest_before(self) -> int:
        """An upper bound of a row's length before its new tokens; exact for a single row, which has no padding."""
        rows, count = self.new_tokens.tokens_Bn.shape
        return self.longest - count if rows == 1 else self.longest

    @cached_property
    def tokens_left(self) -> int:
        """The most tokens that a row may still emit, at least 1: no draft need be longer."""
        return max(1, *self.host_limits) if self.host_limits else max(1, int(self.limit_B.max()))

    def select(self, rows: Tensor) -> "DecodeState":
        """Keep only these rows, which must hold all unfinished ones."""
        return replace(
            self,
            root_B=self.root_B[rows],
            length_B=self.length_B[rows],
            limit_B=self.limit_B[rows],
            keys_B=self.keys_B[rows],
            new_tokens=self.new_tokens.select(rows),
            table=None,
        )


class Drafter(Protocol):
    """Proposes drafts for one batch at a time, with a cache of its own if it needs one.

    A `KVCache` that it has as `cache` once a batch begins counts in the memory that a report gives.

    Attributes:
        name: for tables.
        layer_ids: the target's layers whose streams it reads, which come as `aux`.
        max_nodes: most nodes of a draft, the root included.
        num_speculative_tokens: length of the longest path that is drafted, the root not counted.
    """

    name: str
    layer_ids: tuple[int, ...]
    max_nodes: int
    num_speculative_tokens: int

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch.

        Args:
            rows: sequences at work at once.
            capacity: most tokens of one, not counting drafted ones.

        Raises:
            UserError: where such texts cannot be drafted for.
        """

    def admit(self, prompts: Prompts) -> None:
        """Read new prompts into their rows, whose former content is forgotten. The next `propose` hands over a prompt's last
        token once more, alone: do not keep it here."""

    def propose(self, state: DecodeState) -> Draft:
        """Read the new tokens, then return a draft whose root is `state.root_B`."""

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows [b] of these numbers, which ascend."""


class StatelessDrafter:
    """The base of drafters that keep nothing between two rounds."""

    layer_ids: tuple[int, ...] = ()

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: Prompts) -> None:
        """Nothing to read."""

    def select(self, rows: Tensor) -> None:
        """Nothing to keep."""


class TargetAlone(StatelessDrafter):
    """The baseline: nothing is drafted, every round is one target pass for one token."""

    name = "target alone"
    max_nodes = 1
    num_speculative_tokens = 0

    def propose(self, state: DecodeState) -> Draft:
        """Return the root alone."""
        return Draft.chain(state.root_B, state.root_B.new_zeros(len(state.root_B), 0))
