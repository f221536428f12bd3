"""A small stand-alone language model as the drafter, distilled from the target's answers.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), draft with one; Zhou et al.,
"DistillSpec" (2024), train it on the target's own answers and distributions.

Shapes: R_k rows of step k (flat b*L+t), H hidden, V target vocab.

It reads tokens and nothing of the target. Row t at step k predicts x_{t+2+k} from x_0..x_{t+1+k}: all steps are one and the
same pass over the text, read at shifted rows, and so training needs the first step alone.
"""

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import TrainBatch, plan_documents
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.heads.base import DraftHead, HeadOutput, Reads, StepOutput
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.draft_model.start import KEYS, starting_point
from draftsmith.heads.layers.decoder_layer import Rotary
from draftsmith.heads.plan import Plan
from draftsmith.target.target import Target, context_of
from draftsmith.target.tuned import read_documents


class DraftLmHead(DraftHead):
    """A Llama. Parameters carry the names of transformers' LlamaForCausalLM; one with tied ends has no `lm_head`.

    Weights start in fp32 as transformers makes them, all of them trained.
    """

    method: ClassVar[str] = "draft_model"
    options_class = DraftLmOptions
    layer_keys = KEYS

    def __init__(self, options: DraftLmOptions, config: LlamaConfig, *_: object) -> None:
        super().__init__()
        self.options, self.config = options, config
        self.reads = Reads(target_states=False, context_length=context_of(config))
        made = LlamaForCausalLM(config)
        self.model = made.model
        self.model.rotary_emb = Rotary(config)
        self.lm_head: nn.Linear | None = None if config.tie_word_embeddings else made.lm_head

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: the positions of later steps are among those of the first, whose logits serve all."""
        plan = super().plan(batch, num_steps)
        among = tuple(torch.searchsorted(plan.rows[0], rows + k) for k, rows in enumerate(plan.rows))
        return replace(plan, among=among, passes=plan_documents(batch.document, batch.ids.numel()))

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_k, V] of `num_steps` steps, from one pass over the documents."""
        plan = self.planned(batch, num_steps)
        states_RH = read_documents(self.model, batch, plan.passes).flatten(0, 1)[plan.rows[0] + 1]
        if num_steps == 1:
            return HeadOutput((StepOutput(0, plan.rows[0], states_RH, self.logits),))
        logits_RV = self.logits(states_RH)
        steps = enumerate(zip(plan.rows, plan.among, strict=True))
        return HeadOutput(tuple(StepOutput(k, rows, logits_RV[at]) for k, (rows, at) in steps))

    def logits(self, states: Tensor) -> Tensor:
        """States behind the final norm [..., H] -> draft logits [..., V]."""
        return F.linear(states, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)


class DraftLmDrafter(DraftModel):
    """Drafts chains of `num_speculative_tokens` tokens, sampled under the target's sampling settings.

    greedy_drafts: draft the argmax at every temperature (as vLLM drafts). rule: drafts end where it says.
    """

    def __init__(
        self,
        head: DraftLmHead,
        num_speculative_tokens: int,
        *,
        greedy_drafts: bool = False,
        rule: LengthRule | None = None,
    ) -> None:
        model, vocab_size = as_model(head.eval()), head.config.vocab_size
        super().__init__(model, num_speculative_tokens, vocab_size, greedy_drafts=greedy_drafts, rule=rule)


def as_model(head: DraftLmHead) -> Target:
    """Return the head as a language model with a cache. It shares the head's memory, and freezes nothing of it."""
    with torch.device("meta"):
        model = LlamaForCausalLM(head.config)
    model.load_state_dict(head.state_dict(), strict=False, assign=True)
    if head.lm_head is None:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = head.model.rotary_emb
    return Target(model, path="of the method draft_model", fingerprint="")


def build(options: DraftLmOptions, target: Target, draft_vocab: Tensor | None) -> DraftLmHead:
    """Return an fp32 draft model for `target`, new or with the weights of what `options` start from.

    Raises UserError for sizes that do not fit together and for what cannot be started from.
    """
    assert draft_vocab is None, "a draft model predicts the whole vocabulary"
    config, tensors = starting_point(options, target)
    with torch.device(target.device):
        head = DraftLmHead(options, config)
    if tensors is not None:
        head.load_state_dict(tensors)
    return head


load = DraftLmHead.load
