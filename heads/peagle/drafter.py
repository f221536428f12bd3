"""Draft with a P-EAGLE head: one pass per round over the new tokens and one mask entry for each further draft token.

Mask entries stand right behind the last new token and see everything before them, as all entries do; the next round's
new tokens overwrite them.

Shapes: B rows, n new tokens, K drafted tokens, T entries of a pass (new tokens and masks), H hidden, W draft vocab.
"""

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, chain_above, numbers
from draftsmith.decoder.trees import StaticTree
from draftsmith.heads.eagle.drafter import EagleDrafter
from draftsmith.heads.peagle.head import PEagleHead
from draftsmith.heads.static_drafts import draft_chain, draft_tree


class PEagleDrafter(EagleDrafter):
    """Drafts a chain, token k from the distribution of depth k, or a static tree of the most likely tokens of each
    depth, or (drawn) of tokens sampled from it without replacement. greedy_drafts: a chain of argmaxes at every
    temperature."""

    head: PEagleHead

    @torch.no_grad()
    def start(self, rows: int, capacity: int) -> None:
        """Allocate the cache of the head's layers, and fuse the streams of mask entries."""
        super().start(rows, capacity)
        self._mask_hidden_1H = self.head.mask_inputs()[1]

    def most_entries(self) -> int:
        """Return the most entries behind the cached ones: mask entries and as many of padding."""
        return 2 * self.num_speculative_tokens

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Run the new tokens and the mask entries, and draft at most as many tokens as a row may still emit."""
        depth = min(self.num_speculative_tokens, state.tokens_left)
        logits_BKW = self.head.logits(self._parallel(state, depth))
        if isinstance(self.tree, StaticTree):
            return draft_tree(state, logits_BKW, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKW, self.head, greedy=self.greedy_drafts)

    def _parallel(self, state: DecodeState, depth: int) -> Tensor:
        """Return the outputs [B, K, H] of the last new token and of the mask entries behind it."""
        new_tokens, device = state.new_tokens, state.root_B.device
        rows, count = new_tokens.tokens_Bn.shape
        total, mask = count + depth - 1, self.head.options.mask_token_id
        assert mask is not None
        place_n = numbers(0, total, device)
        real_Bn = place_n < new_tokens.count_B[:, None]
        tokens_Bn = torch.nn.functional.pad(new_tokens.tokens_Bn, (0, depth - 1)).masked_fill(~real_Bn, mask)
        hidden_BnH = self.head.initial_hidden(new_tokens.aux_BnF, new_tokens.last_BnD)
        hidden_BnH = torch.nn.functional.pad(hidden_BnH, (0, 0, 0, depth - 1))
        hidden_BnH = torch.where(real_Bn[..., None], hidden_BnH, self._mask_hidden_1H)
        self.cache.rollback(state.length_B - new_tokens.count_B)
        at = self.cache.stage(total, longest=state.longest_before)
        position_Bn, cos_sin = self._positions(at.lengths_B, state.longest_before, total)
        above_BnT = chain_above(total, device).expand(rows, -1, -1)
        out_BnH = self.forward(tokens_Bn, hidden_BnH, position_Bn, cos_sin, at, above_BnT, range(total))
        self.cache.append(new_tokens.count_B)
        last_B1 = (new_tokens.count_B - 1).clamp(min=0)[:, None]
        return out_BnH[numbers(0, rows, device)[:, None], last_B1 + numbers(0, depth, device)]
