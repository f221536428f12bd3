"""Draft with an EAGLE head: chains, static trees and dynamic trees, through a KV cache of the head's own layers.

Entry t of a sequence pairs token x_{t+1} with a hidden state of position t. A proposal first runs the new tokens with
the target's states and appends them to the head's cache; the output at the last one gives the first draft tokens. A
draft token of depth d becomes entry t + d, with its parent's output as hidden state, and sees the cached entries and
its ancestors in the draft. Entries of a draft are never kept: the next proposal overwrites them.

Shapes: B rows, n new tokens, m nodes of one level that are run, T draft tokens run so far, K drafted tokens, C children
of a node, H hidden, W draft vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache, WriteRange, build_mask, llama_layer_shapes
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, Prompts, chain_above, numbers
from draftsmith.decoder.growth import Level, chain_token_by_token, start_beam
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.eagle.base import EagleHead
from draftsmith.heads.static_drafts import HeadDrafter, grow_tree


class EagleDrafter(HeadDrafter):
    """Drafts a chain of `num_speculative_tokens` tokens sampled under the target's settings, or a tree: a static one, or a dynamic
    one. A chain of argmaxes (greedy_drafts) is lossless too, but accepted less often above temperature 0."""

    head: EagleHead
    _cache: KVCache | None = None
    # Cosines and sines of every position, and those of this round's drafts by depth.
    _cos_sin_table: tuple[Tensor, Tensor] | None = None
    _draft_cos_sin: list[tuple[Tensor, Tensor]] | None = None
    _draft_positions: tuple[Tensor, ...] = ()
    _longest = 0
    # The depth of each draft token that was run, which masks of a sliding window need.
    _draft_depths: tuple[int, ...] = ()

    def most_entries(self) -> int:
        """Return the most entries that a draft writes."""
        dynamic = isinstance(self.tree, DynamicTree)
        return self.tree.depth * self.tree.branching if dynamic else self.max_nodes - 1

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the cache of the head's layers."""
        weight = self.head.fc.weight
        # Cached and drafted entries, and one more for padding behind the new ones.
        slots = capacity + self.most_entries() + 1
        shapes = llama_layer_shapes(self.head.config, len(self.head.layers), weight.dtype)
        self._cache = KVCache(shapes, rows, slots, weight.device)
        self._cos_sin_table = self.head.rotary_emb.table(slots, weight)
        self._every_position = torch.arange(slots, device=weight.device)

    @property
    def cache(self) -> KVCache:
        """Keys and values of the batch at work."""
        assert self._cache is not None, "start() begins a batch"
        return self._cache

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Run new prompts; the next proposal runs their last entry again, to draft from it."""
        if prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self._read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Run the new tokens, then draft at most as many tokens as a row may still emit."""
        self._longest = state.longest
        out_BH = self._read(state.new_tokens, state.length_B, state.longest_before)
        depth = min(self.num_speculative_tokens, state.tokens_left)
        if self.tree is None:
            return self._chain(state, out_BH, depth)
        if isinstance(self.tree, StaticTree):
            return self._static(state, out_BH, self.tree, depth)
        return self._dynamic(state, out_BH, self.tree, depth)

    def _chain(self, state: DecodeState, out_BH: Tensor, depth: int) -> Draft:
        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            nonlocal out_BH
            if k:
                hidden_B1H = self.head.feedback(out_BH)[:, None]
                # A single row's next token sees every slot in use, which takes no mask.
                above_B1T = (
                    None
                    if len(out_BH) == 1 and self.head.window is None
                    else chain_above(k, out_BH.device)[-1:].expand(len(out_BH), -1, -1)
                )
                out_BH = self._grow(tokens_B[:, None], hidden_B1H, k - 1, above_B1T)[:, 0]
            return self.head.logits(out_BH)

        return chain_token_by_token(state, depth, next_logits, greedy=self.greedy_drafts, vocab_W=self.head.draft_vocab)

    def _static(self, state: DecodeState, out_BH: Tensor, whole: StaticTree, depth: int) -> Draft:
        def run(step: int, level: Level, out_BmH: Tensor, tokens_Bm: Tensor) -> Tensor:
            hidden_BmH = self.head.feedback(out_BmH)[:, level.parent_n[level.inner_m]]
            return self._grow(tokens_Bm, hidden_BmH, step, level.ancestors_mT.expand(len(out_BH), -1, -1))

        def logits(step: int, out_BmH: Tensor) -> Tensor:
            return self.head.logits(out_BmH)

        return grow_tree(state, out_BH, self.head, whole, depth, logits, run, drawn=self.drawn)

    def _dynamic(self, state: DecodeState, out_BH: Tensor, tree: DynamicTree, depth: int) -> Draft:
        """Grow a beam, then keep the best nodes of all levels."""
        out_BmH, beam = out_BH[:, None], start_beam(tree, state.root_B, state.limit_B)
        for level in range(depth):
            beam = beam.extend(self.head.logits(out_BmH), self.head.target_ids)
            if level + 1 < depth:
                hidden_BmH = self.head.feedback(out_BmH).gather(
                    1, beam.parent_Bm[..., None].expand(-1, -1, out_BmH.shape[-1])
                )
                out_BmH = self._grow(beam.tokens_Bm, hidden_BmH, level, beam.ancestors_BmT)
        return beam.draft()

    def _read(self, new_tokens: NewTokens, length_B: Tensor, longest: int, rows_b: Tensor | None = None) -> Tensor:
        """Run new tokens, the last of which makes a row `length_B` long, and append them; return the output [B, H] at
        each row's last one. longest: an upper bound of where a row's new tokens begin, exact for a single row."""
        rows, count = new_tokens.tokens_Bn.shape
        self.cache.rollback(length_B - new_tokens.count_B, rows_b)
        at = self.cache.stage(count, rows_b, longest)
        above_BnT = None
        if count > 1 or not at.single or self.head.window is not None:
            above_BnT = chain_above(count, length_B.device).expand(rows, -1, -1)
        position_Bn, cos_sin = self._positions(at.lengths_B, longest, count)
        out_BnH = self.forward(
            new_tokens.tokens_Bn,
            self.head.initial_hidden(new_tokens.aux_BnF, new_tokens.last_BnD),
            position_Bn,
            cos_sin,
            at,
            above_BnT,
            range(count),
        )
        self.cache.append(new_tokens.count_B, rows_b)
        return out_BnH[:, -1] if rows == 1 else new_tokens.at_last(out_BnH)

    def _grow(self, tokens_Bm: Tensor, hidden_BmH: Tensor, depth: int, above_BmT: Tensor | None) -> Tensor:
        """Run draft tokens of one depth (0 for children of the root) behind the T - m draft tokens that were run
        before.

        above_BmT: which of the T each sees; None where a single one sees them all."""
        if depth == 0:
            positions, cos_sin = self._positions(self.cache.lengths_B, self._longest, self.num_speculative_tokens)
            self._draft_positions = positions.split(1, 1)
            self._draft_cos_sin = None
            if cos_sin is not None:
                self._draft_cos_sin = list(zip(cos_sin[0].split(1, 1), cos_sin[1].split(1, 1), strict=True))
        new, total = (1, depth + 1) if above_BmT is None else above_BmT.shape[1:]
        at = self.cache.stage(new, longest=self._longest, skip=total - new)
        cos_sin = None if self._draft_cos_sin is None else self._draft_cos_sin[depth]
        depths = self._draft_depths = (*self._draft_depths[: total - new], *[depth] * new)
        position_Bm = self._draft_positions[depth].expand_as(tokens_Bm)
        return self.forward(tokens_Bm, hidden_BmH, position_Bm, cos_sin, at, above_BmT, depths)

    def _positions(self, base_B: Tensor, first: int, count: int) -> "tuple[Tensor, tuple[Tensor, Tensor] | None]":
        """Return `count` positions per row from `base_B` on, and their cosines and sines if these are in a table.

        first: where a single row begins, whose positions are then one slice."""
        table = self._cos_sin_table
        if len(base_B) == 1 and table is not None:
            here = slice(first, first + count)
            return self._every_position[None, here], (table[0][None, here], table[1][None, here])
        position_Bn = base_B[:, None] + numbers(0, count, base_B.device)
        return position_Bn, None if table is None else (table[0][position_Bn], table[1][position_Bn])

    def forward(
        self,
        tokens_Bm: Tensor,
        hidden_BmH: Tensor,
        position_Bm: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        at: WriteRange,
        above_BmT: Tensor | None,
        depths: Sequence[int],
    ) -> Tensor:
        """Run the head's layers over the last m of T entries that follow the cached ones; return their outputs [B,
        m, H].

        cos_sin: of the positions, None to compute them. above_BmT: which of the T each entry sees, None for all.
        depths: each of the T entries' distance from the first position behind the cached ones."""
        mask, window = None, self.head.window
        if above_BmT is not None:
            depth_BT = None if window is None else torch.tensor([depths], device=at.lengths_B.device)
            depth_BT = None if depth_BT is None else depth_BT.expand(len(above_BmT), -1)
            mask = build_mask(at.lengths_B, above_BmT, at.visible, depth_BT, window)
        return self.head.layer(tokens_Bm, hidden_BmH, position_Bm, self.cache.write, mask, cos_sin)
