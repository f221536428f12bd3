"""Draft with a block drafter: one pass fills in the whole block that the head was trained on, and part of it is
proposed.

Before that, the keys and values of new tokens are made of the target's states and appended to the context's cache. A
block's own entries are never kept: the next round overwrites them.

Shapes: B rows, n new tokens, S slots of a block, K drafted tokens, H hidden, W draft vocab.
"""

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache, build_mask, llama_layer_shapes
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, Prompts, numbers
from draftsmith.heads.block.base import BlockHead
from draftsmith.heads.static_drafts import HeadDrafter, draft_chain, draft_tree


class BlockCache(KVCache):
    """Keys and values of the context, of all layers, for the sequences of a batch."""

    def __init__(self, head: BlockHead, rows: int, capacity: int) -> None:
        """capacity: most tokens of a sequence."""
        weight = head.norm.weight
        # Behind the new tokens of the longest row there is padding, and then the block.
        slots = capacity + head.options.block_size + 1
        shapes = llama_layer_shapes(head.config, len(head.layers), weight.dtype)
        super().__init__(shapes, rows, slots, weight.device)
        self.head = head
        self.cos_sin_table = head.rotary_emb.table(slots, weight)

    def read(self, new_tokens: NewTokens, length_B: Tensor, longest: int, rows_b: Tensor | None = None) -> None:
        """Append new tokens, the last of which make a row `length_B` long. longest: an upper bound of where a row's new
        tokens begin, exact for a single row. rows_b: the rows that are read, None for all."""
        count = new_tokens.tokens_Bn.shape[1]
        self.rollback(length_B - new_tokens.count_B, rows_b)
        at = self.stage(count, rows_b, longest)
        self.head.read(new_tokens.aux_BnF, self._cos_sin(at.lengths_B, count), self.write)
        self.append(new_tokens.count_B, rows_b)

    def fill(self, root_B: Tensor, longest: int) -> Tensor:
        """Run the blocks that begin with the roots, behind the context; return their states [B, S, H]. longest: the
        largest length of a row that matters."""
        rows, size = len(root_B), self.head.options.block_size
        at = self.stage(size, longest=longest)
        # A single row's block sees every slot in use, which takes no mask.
        block_BSS = None if at.single else torch.ones(rows, size, size, dtype=torch.bool, device=root_B.device)
        mask = None if block_BSS is None else build_mask(at.lengths_B, block_BSS, at.visible)
        tokens_BS = self.head.block_tokens(root_B)
        return self.head.fill(tokens_BS, self._cos_sin(at.lengths_B, size), self.write, mask)

    def _cos_sin(self, base_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, count, D] of the positions from `base_B` on."""
        position_Bn = base_B[:, None] + numbers(0, count, base_B.device)
        if self.cos_sin_table is None:
            return self.head.rotary_emb(self.head.norm.weight, position_Bn)
        return self.cos_sin_table[0][position_Bn], self.cos_sin_table[1][position_Bn]


class BlockDrafter(HeadDrafter):
    """Fill in a block per round, of which at most `num_speculative_tokens` are proposed; subclasses draft from the states of its
    slots."""

    _cache: BlockCache | None = None

    @property
    def cache(self) -> BlockCache:
        """Keys and values of the batch at work."""
        assert self._cache is not None, "start() begins a batch"
        return self._cache

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the context's cache."""
        self._cache = BlockCache(self.head, rows, capacity)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Append new prompts to the context; the next proposal reads their last token again."""
        if prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self.cache.read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Append the new tokens, fill in a block, and propose at most as many of its tokens as a row may still emit."""
        self.cache.read(state.new_tokens, state.length_B, state.longest_before)
        states_BSH = self.cache.fill(state.root_B, state.longest)
        depth = min(self.num_speculative_tokens, state.tokens_left)
        first_slot = self.head.first_slot
        return self.draft(state, states_BSH[:, first_slot : first_slot + depth])

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a draft."""
        raise NotImplementedError


class DFlashDrafter(BlockDrafter):
    """Drafts a chain, token k drawn from slot k under the target's sampling settings, or a static tree of the most
    likely tokens of each slot, or (drawn) of tokens sampled from it without replacement."""

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain or a tree."""
        logits_BKW = self.head.logits(states_BKH)
        if self.tree is not None:
            return draft_tree(state, logits_BKW, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKW, self.head, greedy=self.greedy_drafts)
