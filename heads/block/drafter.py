"""How block drafters propose: the block that they are trained on is filled in whole, whatever part of it is proposed.

Before drafting, the keys and values of newly committed tokens are made of the target's states; they overwrite what the
last block left there. Nothing of a block is kept. Shapes: B rows, n fresh tokens, S slots of a block, K drafted tokens,
F width of the aux streams, H hidden, G key/value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decode.cache import WriteRange, build_mask
from draftsmith.eval.decode.draft import DecodeState, Draft, NewTokens, Prompts, numbers
from draftsmith.eval.decode.trees import StaticTree
from draftsmith.heads.block.base import BlockHead, CacheUpdate
from draftsmith.heads.static_drafts import draft_chain, draft_tree


class BlockCache:
    """Keys and values of all layers for a batch of sequences, [layers, B, G, slots, D] each."""

    def __init__(self, head: BlockHead, rows: int, capacity: int) -> None:
        config, weight = head.config, head.norm.weight
        # Behind the fresh tokens of the longest row there is padding, and then the block.
        slots = capacity + head.options.block_size + 1
        shape = (len(head.layers), rows, config.num_key_value_heads, slots, config.head_dim)
        self._head = head
        self._keys, self._values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self._table = head.rotary_emb.table(slots, weight)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]

    def read(self, new_tokens: NewTokens, length_B: Tensor, first: int, rows_b: Tensor | None = None) -> None:
        """Store fresh tokens, the last of which are at position length - 1.

        first: no row's fresh tokens begin behind this slot; a single row's begin there. rows_b: the rows that are read,
        None for all."""
        base_B, count = length_B - new_tokens.count_B, new_tokens.tokens_Bn.shape[1]
        at = WriteRange(base_B, count, first, rows_b)
        self._head.read(new_tokens.aux_BnF, self._rotation(base_B, count), self._update(at))

    def fill(self, root_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
        """Return the states [B, S, H] of the blocks that begin with the roots at position length. longest: the largest
        length of a row that matters."""
        rows, size = len(root_B), self._head.options.block_size
        at = WriteRange(length_B, size, longest)
        # A single row's block sees every slot in use, which takes no mask.
        block_BSS = None if at.single else torch.ones(rows, size, size, dtype=torch.bool, device=root_B.device)
        mask = None if block_BSS is None else build_mask(length_B, block_BSS, at.visible)
        tokens_BS = self._head.block_tokens(root_B)
        return self._head.fill(tokens_BS, self._rotation(length_B, size), self._update(at), mask)

    def _rotation(self, base_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, count, D] of the positions from `base_B` on."""
        position_Bn = base_B[:, None] + numbers(0, count, base_B.device)
        if self._table is None:
            return self._head.rotary_emb(self._keys, position_Bn)
        return self._table[0][position_Bn], self._table[1][position_Bn]

    def _update(self, at: WriteRange) -> CacheUpdate:
        def update(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return at.store(self._keys[layer], keys), at.store(self._values[layer], values)

        return update


class BlockDrafter:
    """Fills in a block per round; subclasses draft from the states of its slots.

    num_speculative_tokens: how many tokens of a block are proposed at most. greedy_drafts: a chain of argmaxes at every
    temperature.
    """

    def __init__(self, head: BlockHead, num_speculative_tokens: int, *, greedy_drafts: bool = False) -> None:
        assert 1 <= num_speculative_tokens <= head.train_steps
        self.head: Any = head.eval()
        self.name, self.layer_ids = head.method, head.layer_ids
        self.num_speculative_tokens, self.greedy_drafts = num_speculative_tokens, greedy_drafts
        self.max_nodes = 1 + num_speculative_tokens
        self._cache: BlockCache | None = None

    @property
    def cache(self) -> BlockCache:
        """What the batch has been read into."""
        assert self._cache is not None, "a batch is started first"
        return self._cache

    def start(self, rows: int, capacity: int) -> None:
        """Allocate keys and values."""
        self._cache = BlockCache(self.head, rows, capacity)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self.cache.select(rows)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Read new prompts; the next proposal reads their last token again."""
        if prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self.cache.read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the fresh tokens, fill in a block, and propose no more of it than any row may still emit."""
        rows, count = state.new_tokens.tokens_Bn.shape
        # A single row has no padding, so it begins where its fresh tokens fit; of several that is no more than a bound.
        first = state.longest - count if rows == 1 else state.longest
        self.cache.read(state.new_tokens, state.length_B, first)
        states_BSH = self.cache.fill(state.root_B, state.length_B, state.longest)
        depth = min(self.num_speculative_tokens, state.room)
        first_slot = self.head.first_slot
        return self.draft(state, states_BSH[:, first_slot : first_slot + depth])

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """The states of the slots that draft -> what is proposed."""
        raise NotImplementedError


class DFlashDrafter(BlockDrafter):
    """Drafts a chain, token k drawn from slot k under the target's sampling settings, or a static tree of the most likely
    tokens of each slot, or (drawn) of tokens sampled from it without replacement. tree: at most as deep as K."""

    def __init__(
        self,
        head: BlockHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        assert tree is not None or not drawn
        assert tree is None or tree.depth <= num_speculative_tokens
        depth = num_speculative_tokens if tree is None else tree.depth
        super().__init__(head, depth, greedy_drafts=greedy_drafts)
        self.tree, self.drawn = tree, drawn
        self.max_nodes = 1 + (depth if tree is None else len(tree.choices))

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """The states of the slots that draft -> a chain or a tree."""
        logits_BKW = self.head.logits(states_BKH)
        if self.tree is not None:
            return draft_tree(state, logits_BKW, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKW, self.head, greedy=self.greedy_drafts)
