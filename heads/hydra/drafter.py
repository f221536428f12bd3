"""Draft with Hydra's heads: each head reads the path of draft tokens that leads to it.

The heads keep nothing between two rounds. The prefix layer of Hydra++ has a KV cache of the text's tokens, to which
every proposal appends the new ones.

Shapes: B rows, n new tokens, m nodes of one level with children, K drafted tokens, H target hidden, V target vocab; C the width of
what a head reads.
"""

from functools import partial

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache, build_mask, llama_layer_shapes
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, Prompts, chain_above, numbers
from draftsmith.decoder.growth import Level, chain_token_by_token
from draftsmith.heads.hydra.head import HydraHead, PrefixLayer
from draftsmith.heads.static_drafts import HeadDrafter, grow_tree


class PrefixCache(KVCache):
    """The keys and values of a prefix layer for the sequences of a batch.

    Its entries are made of states that the target has computed, so no draft ever enters it.
    """

    def __init__(self, layer: PrefixLayer, rows: int, capacity: int, new_tokens: int) -> None:
        """capacity: most tokens of a sequence. new_tokens: most tokens that join a row's text in a round of several rows."""
        weight = layer.norm.weight
        # Behind the new tokens of the longest row there is padding, where another row has more of them.
        super().__init__(llama_layer_shapes(layer.config, 1, weight.dtype), rows, capacity + new_tokens, weight.device)
        self.prefix = layer

    def read(self, new_tokens: NewTokens, length_B: Tensor, longest: int, rows_b: Tensor | None = None) -> Tensor:
        """Run and append the states of new tokens, the last of which make a row `length_B` long; return the outputs [B,
        H] there. longest: an upper bound of where a row's new tokens begin, exact for a single row. rows_b: the rows
        that are read, None for all."""
        rows, count = new_tokens.tokens_Bn.shape
        self.rollback(length_B - new_tokens.count_B, rows_b)
        at = self.stage(count, rows_b, longest)
        mask = None
        if count > 1 or not at.single:
            above_BnT = chain_above(count, length_B.device).expand(rows, -1, -1)
            mask = build_mask(at.lengths_B, above_BnT, at.visible)
        position_Bn = at.lengths_B[:, None] + numbers(0, count, length_B.device)
        out_BnH = self.prefix.step(new_tokens.last_BnD, position_Bn, partial(self.write, 0), mask)
        self.append(new_tokens.count_B, rows_b)
        return new_tokens.at_last(out_BnH)


class HydraDrafter(HeadDrafter):
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head given the path to them, or (drawn) of tokens sampled from it without replacement."""

    head: HydraHead
    cache: PrefixCache | None = None
    """Of the batch at work, None without a prefix layer."""

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the prefix layer's cache, if there is one."""
        prefix = self.head.prefix_embedding_layer
        self.cache = None if prefix is None else PrefixCache(prefix, rows, capacity, self.num_speculative_tokens + 1)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Run new prompts through the prefix layer; the next proposal runs their last state again, to draft from it."""
        if self.cache is not None and prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self.cache.read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    def select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(rows)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Run the new states, then draft at most as many tokens as a row may still emit."""
        depth = min(self.num_speculative_tokens, state.tokens_left)
        states_BH = self._state(state)
        if self.tree is None:
            return self._chain(state, states_BH, depth)
        path_BC = self.head.extend(states_BH, state.root_B)
        return grow_tree(state, path_BC, self.head, self.tree, depth, self.head.logits, self._extend, drawn=self.drawn)

    def _state(self, state: DecodeState) -> Tensor:
        """Return [B, H]: what the heads read of the text before the root."""
        if self.cache is None:
            return state.new_tokens.at_last(state.new_tokens.last_BnD).to(self.head.dtype)
        return self.cache.read(state.new_tokens, state.length_B, state.longest_before)

    def _chain(self, state: DecodeState, path_BC: Tensor, depth: int) -> Draft:
        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            nonlocal path_BC
            path_BC = self.head.extend(path_BC, tokens_B)
            return self.head.logits(k, path_BC)

        return chain_token_by_token(state, depth, next_logits, greedy=self.greedy_drafts)

    def _extend(self, step: int, level: Level, path_BmC: Tensor, tokens_Bm: Tensor) -> Tensor:
        return self.head.extend(path_BmC[:, level.parent_n[level.inner_m]], tokens_Bm)
