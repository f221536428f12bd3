"""Draft with an EAGLE head: chains, static trees and dynamic trees.

Entry t of a sequence pairs token x_{t+1} with a hidden state of position t: the target's for tokens of the text. The output at
the last of these gives the first draft tokens. A draft token of depth d becomes entry t + d, with its parent's output as hidden
state, and sees the cached entries and its ancestors in the draft.

Shapes: B rows, n new tokens, m nodes of one level that are run, T draft tokens run so far, K drafted tokens, C children
of a node, H hidden, W draft vocab.
"""

from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, chain_above
from draftsmith.decoder.growth import Level, start_beam
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.drafters import CachedDrafter, grow_tree
from draftsmith.heads.eagle.base import EagleHead


class EagleDrafter(CachedDrafter):
    """Drafts a chain of `num_speculative_tokens` tokens sampled under the target's settings, or a tree: a static one, or a dynamic
    one. A chain of argmaxes (greedy_drafts) is lossless too, but accepted less often above temperature 0."""

    head: EagleHead
    _longest = 0
    # Of this round's draft: cosines and sines by depth, and the depth of each draft token that was run.
    _rotations: list[tuple[Tensor, Tensor]]
    _depths: tuple[int, ...] = ()

    def most_entries(self) -> int:
        """Return the most entries that a draft writes."""
        dynamic = isinstance(self.tree, DynamicTree)
        return self.tree.depth * self.tree.branching if dynamic else self.max_nodes - 1

    def make(self, state: DecodeState) -> Draft:
        """Run the new tokens, then draft at most as many tokens as a row may still emit."""
        self._longest = state.longest
        out_BH = self.read_last(state)
        depth = min(self.num_speculative_tokens, state.tokens_left)
        if self.tree is None:
            return self._chain(state, out_BH, depth)
        if isinstance(self.tree, StaticTree):

            def run(step: int, level: Level, out_BmH: Tensor, tokens_Bm: Tensor) -> Tensor:
                hidden_BmH = self.head.feedback(out_BmH)[:, level.parent_n[level.inner_m]]
                return self._grow(tokens_Bm, hidden_BmH, step, level.ancestors_mT.expand(len(out_BH), -1, -1))

            def logits(step: int, out_BmH: Tensor) -> Tensor:
                return self.head.logits(out_BmH)

            return grow_tree(state, out_BH, self.head, self.tree, depth, logits, run, drawn=self.drawn)
        out_BmH, beam = out_BH[:, None], start_beam(self.tree, state.root_B, state.limit_B)
        for level in range(depth):
            beam = beam.extend(self.head.logits(out_BmH), self.head.target_ids)
            if level + 1 < depth:
                hidden_BmH = self.head.feedback(out_BmH).gather(
                    1, beam.parent_Bm[..., None].expand(-1, -1, out_BmH.shape[-1])
                )
                out_BmH = self._grow(beam.tokens_Bm, hidden_BmH, level, beam.ancestors_BmT)
        return beam.draft()

    def _chain(self, state: DecodeState, out_BH: Tensor, depth: int) -> Draft:
        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            nonlocal out_BH
            if k:
                hidden_B1H = self.head.feedback(out_BH)[:, None]
                # A single row's next token sees every slot in use, which takes no mask.
                above_B1T = (
                    None if self.cache.unmasked else chain_above(k, out_BH.device)[-1:].expand(len(out_BH), -1, -1)
                )
                out_BH = self._grow(tokens_B[:, None], hidden_B1H, k - 1, above_B1T)[:, 0]
            return self.head.logits(out_BH)

        return self.chain(state, depth, next_logits)

    def run(self, new_tokens: NewTokens) -> Tensor:
        hidden_BnH = self.head.initial_hidden(new_tokens.aux_BnF, new_tokens.last_BnD)
        cache = self.cache
        return self.head.layer(new_tokens.tokens_Bn, hidden_BnH, cache.rotation(), cache.write, cache.chain_mask())

    def _grow(self, tokens_Bm: Tensor, hidden_BmH: Tensor, depth: int, above_BmT: Tensor | None) -> Tensor:
        """Run draft tokens of one depth (0 for children of the root) behind the T - m draft tokens that were run
        before.

        above_BmT: which of the T each sees; None where a single one sees them all."""
        if depth == 0:
            self._rotations = self.cache.rotations_apart(self.num_speculative_tokens, self._longest)
        new, total = (1, depth + 1) if above_BmT is None else above_BmT.shape[1:]
        self.cache.stage(new, longest=self._longest, skip=total - new)
        self._depths = (*self._depths[: total - new], *[depth] * new)
        mask = None if above_BmT is None else self.cache.tree_mask(above_BmT, self._depths)
        return self.head.layer(tokens_Bm, hidden_BmH, self._rotations[depth], self.cache.write, mask)
