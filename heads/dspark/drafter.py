"""Draft with DSpark: one pass gives every slot's logits, and each chosen token adds a bias to those of the next.

Shapes: B rows, K drafted tokens, H hidden, r rank, W draft vocab.
"""

import torch
from torch import Tensor

from draftsmith.eval.decode.draft import DecodeState, Draft
from draftsmith.eval.decode.noise import DRAFT, uniforms
from draftsmith.eval.decode.sampling import draw, probs
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
        greedy = self.greedy_drafts or state.sampling.greedy
        uniform_BK = None if greedy else uniforms(state.keys_B, state.length_B, DRAFT, depth)
        before_B, tokens, draft_probs, survival = state.root_B, [], [], []
        for k in range(depth):
            before_Br = head.markov_head.markov_w1(before_B)
            logits_BW = base_BKW[:, k] + head.bias(before_Br)
            if uniform_BK is None:
                choice_B = logits_BW.argmax(-1)
            else:
                draft_probs.append(probs(logits_BW, state.sampling))
                choice_B = draw(draft_probs[-1], uniform_BK[:, k])
            before_B = head.target_ids(choice_B)
            tokens.append(before_B)
            if head.threshold is not None:
                survival.append(head.calibrated(k, head.log_odds(states_BKH[:, k], before_Br)))
        count_B = state.limit_B.clamp(0, depth)
        if head.threshold is not None:
            lasting_BK = torch.stack(survival, 1).cumprod(1) >= head.threshold
            count_B = torch.minimum(count_B, lasting_BK.int().cumprod(1).sum(1))
        draft_probs_BKW = torch.stack(draft_probs, 1) if draft_probs else None
        vocab_W = head.draft_vocab if draft_probs else None
        return Draft.chain(state.root_B, torch.stack(tokens, 1), count_B, draft_probs_BKW, vocab_W)
