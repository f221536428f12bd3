"""Draft with DSpark: one pass gives every slot's logits, and each chosen token adds a bias to those of the next.

Shapes: B rows, K drafted tokens, H hidden, r rank, W draft vocab.
"""

from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.growth import chain_token_by_token
from draftsmith.heads.block.drafter import BlockDrafter
from draftsmith.heads.dspark.head import DSparkHead


class DSparkDrafter(BlockDrafter):
    """Drafts a chain from left to right, which ends early where the head's threshold says so.

    Whether a token is proposed depends on those before it, never on itself: the distribution of what is emitted stays
    the target's.
    """

    head: DSparkHead

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain."""
        head, depth = self.head, states_BKH.shape[1]
        base_BKW = head.logits(states_BKH)
        survival: list[Tensor] = []

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            before_Br = head.markov_head.markov_w1(before_B)
            if head.threshold is not None:
                survival.append(head.calibrated(k, head.log_odds(states_BKH[:, k], before_Br)))
            return base_BKW[:, k] + head.bias(before_Br)

        draft = chain_token_by_token(state, depth, next_logits, greedy=self.greedy_drafts, vocab_W=head.draft_vocab)
        if head.threshold is None:
            return draft
        lasting_BK = torch.stack(survival, 1).cumprod(1) >= head.threshold
        # The root is counted, too.
        return replace(draft, nodes_B=torch.minimum(draft.nodes_B, 1 + lasting_BK.int().cumprod(1).sum(1)))
