"""Draft with a trained draft model: as with any draft model, with the head's own weights."""

import torch
from transformers import LlamaForCausalLM

from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.heads.draft_model.head import DraftLmHead
from draftsmith.target.target import Target


class DraftLmDrafter(DraftModel):
    """Drafts chains of `num_speculative_tokens` tokens, sampled under the target's sampling settings.

    greedy_drafts: draft the argmax at every temperature (as vLLM drafts).
    """

    def __init__(self, head: DraftLmHead, num_speculative_tokens: int, *, greedy_drafts: bool = False) -> None:
        super().__init__(
            as_model(head.eval()), num_speculative_tokens, head.config.vocab_size, greedy_drafts=greedy_drafts
        )


def as_model(head: DraftLmHead) -> Target:
    """Return the head as a language model with a cache. It shares the head's memory, and freezes nothing of it."""
    with torch.device("meta"):
        model = LlamaForCausalLM(head.config)
    model.load_state_dict(head.state_dict(), strict=False, assign=True)
    if head.lm_head is None:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = head.model.rotary_emb
    return Target(model, path="of the method draft_model", fingerprint="")
