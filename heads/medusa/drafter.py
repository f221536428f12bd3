"""Draft with Medusa's heads: all read the target's state at the last token, so a round is one pass and keeps nothing.

Shapes: B rows, K drafted tokens (heads used), H target hidden, V target vocab.
"""

import torch

from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.heads.static_drafts import HeadDrafter, draft_chain, draft_tree


class MedusaDrafter(HeadDrafter):
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head, or (drawn) of tokens sampled from it without replacement."""

    name = "medusa"
    head: MedusaHead

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Draft at most as many tokens as a row may still emit."""
        depth = min(self.num_speculative_tokens, state.tokens_left)
        last_BH = state.new_tokens.at_last(state.new_tokens.last_BnD)
        logits_BKV = torch.stack([self.head.logits(k, last_BH) for k in range(depth)], 1)
        if self.tree is not None:
            return draft_tree(state, logits_BKV, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKV, self.head, greedy=self.greedy_drafts)
