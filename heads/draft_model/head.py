"""A small stand-alone language model as the drafter, distilled from the target's answers.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), draft with one; Zhou et al.,
"DistillSpec" (2024), train it on the target's own answers and distributions.

Shapes: B batch rows, L tokens, T tokens that are read, R positions with logits, H hidden, V target vocab, N query heads,
G key/value heads, D head size.

It reads tokens and nothing of the target. Row t at step k predicts x_{t+2+k} from x_0..x_{t+1+k}: all steps are one and the
same pass over the text, read at shifted rows, and so training needs the first step alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead, HeadOutput, Reads, StepOutput, iterate_supervised_rows
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.draft_model.start import KEYS, starting_point
from draftsmith.heads.layers.decoder_layer import Rotary, rotate
from draftsmith.heads.layers.row_plan import RowPlan, plan_rows
from draftsmith.heads.layers.ttt_attention import ttt_attention
from draftsmith.target.target import Target, context_of


@dataclass(frozen=True)
class _Texts:
    """What a batch makes the model read: documents end to end, each up to its last position with logits.

    ids_T, position_T: tokens and their positions. plan: which of them belong together. read_R: flat indices b*L+t of the
    positions with logits, ascending; place_R: where these are among T.
    """

    ids_T: Tensor
    position_T: Tensor
    plan: RowPlan
    read_R: Tensor
    place_R: Tensor


class DraftLmHead(DraftHead):
    """A Llama. Parameters carry the names of transformers' LlamaForCausalLM; one with tied ends has no `lm_head`.

    Weights start in fp32 as transformers makes them, all of them trained.
    """

    method: ClassVar[str] = "draft_model"
    options_class = DraftLmOptions
    layer_keys = KEYS

    def __init__(
        self,
        options: DraftLmOptions,
        config: LlamaConfig,
        target: Any = None,
        layer_ids: Sequence[int] = (),
        draft_vocab: None = None,
    ) -> None:
        assert draft_vocab is None, "these heads draft from all tokens"
        super().__init__()
        self.options, self.config = options, config
        self.reads = Reads(target_states=False, context_length=context_of(config))
        made = LlamaForCausalLM(config)
        self.model = made.model
        self.model.rotary_emb = Rotary(config)
        self.lm_head: nn.Linear | None = None if config.tie_word_embeddings else made.lm_head

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_k, V] of `num_steps` steps, from one pass over the documents that have rows."""
        rows = [mask.flatten().nonzero().flatten() for mask in islice(iterate_supervised_rows(batch), num_steps)]
        texts = _texts(batch, rows[0] + 1)
        logits_RV = self.logits(self._read(texts)[texts.place_R])
        # The positions of later steps are among those of the first.
        at = [torch.searchsorted(texts.read_R, rows_k + 1 + k) for k, rows_k in enumerate(rows)]
        return HeadOutput(tuple(StepOutput(k, rows[k], logits_RV[at[k]] if k else logits_RV) for k in range(num_steps)))

    def logits(self, states: Tensor) -> Tensor:
        """States behind the final norm [..., H] -> draft logits [..., V]."""
        return F.linear(states, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)

    def _read(self, texts: _Texts) -> Tensor:
        """Return the states [T, H] behind the final norm."""
        x = self.model.embed_tokens(texts.ids_T)
        cos, sin = (turn[0] for turn in self.model.rotary_emb(x, texts.position_T[None]))
        for layer in self.model.layers:
            x = x + _attend(layer.self_attn, layer.input_layernorm(x), cos, sin, texts.plan)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)


def _attend(attention: LlamaAttention, x_TH: Tensor, cos: Tensor, sin: Tensor, plan: RowPlan) -> Tensor:
    """Causal attention within documents, [T, H] -> [T, H]."""
    D = attention.head_dim
    q, k, v = (
        project(x_TH).unflatten(-1, (-1, D)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    none = k.new_empty(0, *k.shape)  # diagonal keys are EAGLE-3's
    return attention.o_proj(ttt_attention(q, k[None], v[None], none, none, plan, attention.scaling).flatten(-2))


def _texts(batch: TrainBatch, read_R: Tensor) -> _Texts:
    """Return what is to be read for logits at the flat positions `read_R`."""
    read_BL = torch.zeros_like(batch.mask, dtype=torch.bool)
    read_BL.view(-1)[read_R] = True
    outer = plan_rows(batch.document, read_BL)
    if outer.spans:
        tokens_T, place_R = outer.packed.tokens_T, outer.packed.place_R
    else:
        tokens_T, place_R = read_R.new_zeros(1), read_R  # one token, so that every parameter has its gradient of zero
    numbers_1T = outer.documents.flatten()[tokens_T][None]
    plan = plan_rows(numbers_1T, torch.ones_like(numbers_1T, dtype=torch.bool))
    return _Texts(batch.ids.flatten()[tokens_T], batch.position.flatten()[tokens_T], plan, read_R, place_R)


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
