"""EAGLE-3: one Llama layer that reads the target's aux streams and, in training, its own outputs (TTT).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2025), sections 3.1-3.2; the switches of EAGLE-3.1 follow vLLM's `llama_eagle3.py`.

Shapes: B batch rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H hidden (draft and
target alike), A aux layers, V target vocab, W draft vocab, N query heads, G key/value heads, D head size, S cached keys.

Row t at step k sees the token x_{t+1+k} and a hidden state (k = 0: the fused aux streams of position t; else its
own output of step k-1), stands at RoPE position t+k, and predicts x_{t+2+k}.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, iterate_supervised_rows, shift_left
from draftsmith.heads.eagle3_layer import Eagle3Layer, Rotary, rotate
from draftsmith.heads.eagle3_options import Eagle3Options
from draftsmith.heads.layer_config import derive_layer_config, describe_layer_config
from draftsmith.heads.target import Target
from draftsmith.heads.ttt_attention import plan_rows, ttt_attention

__all__ = ["CacheUpdate", "Eagle3Head", "Eagle3Options", "build", "load"]

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Eagle3Head(DraftHead):
    """The EAGLE-3 drafter. Parameters carry the names of the flat EAGLE-3 layout (see contracts.py).

    embedding: [V, H] the target's raw input embedding, shared and frozen. draft_vocab: [W] sorted target ids, or
    None for all of them. Weights start in fp32 at torch's defaults; `build` fills lm_head.
    """

    method: ClassVar[str] = "eagle3"

    def __init__(
        self,
        options: Eagle3Options,
        config: LlamaConfig,
        layer_ids: Sequence[int],
        embedding: Tensor,
        draft_vocab: Tensor | None,
    ) -> None:
        super().__init__()
        H, A, eps = config.hidden_size, len(layer_ids), config.rms_norm_eps
        assert embedding.shape == (config.vocab_size, H)
        self.options, self.config, self.layer_ids = options, config, tuple(layer_ids)
        self.train_steps = options.ttt_steps
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach(), freeze=True)
        self.input_norm = LlamaRMSNorm(A * H, eps=eps) if options.norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(H, eps=eps) for _ in layer_ids) if options.fc_norm else None
        self.fc = nn.Linear(A * H, H, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config, options.norm_before_residual)])
        self.norm = LlamaRMSNorm(H, eps=eps)
        self.lm_head = nn.Linear(H, config.vocab_size if draft_vocab is None else len(draft_vocab), bias=False)
        self.lm_head.requires_grad_(options.train_lm_head)
        self.rotary_emb = Rotary(config)
        self.register_buffer("draft_vocab", draft_vocab)

    def forward(self, batch: TrainBatch, num_steps: int, rows: Sequence[Tensor] | None = None) -> HeadOutput:
        """Run the training-time test: `num_steps` steps of logits [R_k, W], only on the rows that count.

        rows: one bool [B, L] mask per step instead of rule 1 (for comparisons with other trainers).
        Everything after the keys of step 0 is computed on the union of all steps' rows alone.
        """
        masks = list(islice(iterate_supervised_rows(batch), num_steps) if rows is None else rows)
        assert len(masks) == num_steps
        plan = plan_rows(batch.document, reduce(torch.logical_or, masks))
        fused_BLH = self.fuse(batch.aux)
        k_BLGD, v_BLGD = self._root_keys(batch, fused_BLH)
        hidden_RH = fused_BLH.flatten(0, 1)[plan.rows]
        position_1R = batch.position.flatten()[plan.rows][None]
        own_k, own_v = (x.new_empty(0, len(plan.rows), *x.shape[2:]) for x in (k_BLGD, v_BLGD))
        steps = []
        for step, mask in enumerate(masks):
            tokens_R = shift_left(batch.ids, 1 + step, 0).flatten()[plan.rows]
            x, residual = self._layer.enter(self._embed(tokens_R), hidden_RH)
            q = self._layer.self_attn.query(x)
            cos, sin = (y[0] for y in self.rotary_emb(q, position_1R + step))
            if step:
                k, v = self._layer.self_attn.key_value(x)
                own_k, own_v = torch.cat([own_k, rotate(k, cos, sin)[None]]), torch.cat([own_v, v[None]])
            attended = ttt_attention(rotate(q, cos, sin), k_BLGD, v_BLGD, own_k, own_v, plan, self.head_dim**-0.5)
            out_RH = self._layer.leave(attended, residual)
            hidden_RH = self.feedback(out_RH)
            counted = mask.flatten()[plan.rows].nonzero().flatten()
            steps.append(StepOutput(step, plan.rows[counted], self.logits(out_RH[counted])))
        return HeadOutput(tuple(steps))

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux streams [B, n, A*H] -> the hidden state of step 0, [B, n, H]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = torch.cat(
                [norm(x) for norm, x in zip(self.fc_norm, aux.chunk(len(self.fc_norm), -1), strict=True)], -1
            )
        return self.fc(aux)

    def layer(
        self, tokens: Tensor, hidden: Tensor, position_ids: Tensor, update: CacheUpdate, mask: Tensor | None
    ) -> Tensor:
        """One decoding call: tokens [B, n] (x_{i+1} of row i), hidden [B, n, H], position_ids [B, n] (i) -> [B, n, H].

        update(k [B, G, n, D], v) stores this call's keys and values and returns all of them, [B, G, S, D] each.
        mask: bool [B, 1, n, S], True where a row may look, or None for everywhere. The result is the layer's
        output before the final norm: pass it to `logits` and to `feedback`.
        """
        x, residual = self._layer.enter(self._embed(tokens), hidden)
        q, (k, v) = self._layer.self_attn.query(x), self._layer.self_attn.key_value(x)
        cos, sin = self.rotary_emb(q, position_ids)
        all_k, all_v = update(rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2))
        q = rotate(q, cos, sin).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=mask, enable_gqa=True)
        return self._layer.leave(attended.transpose(1, 2), residual)

    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> draft logits [..., W]."""
        return self.lm_head(self.norm(out))

    def feedback(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> the hidden state of the next step, [..., H]."""
        return self.norm(out) if self.options.norm_output else out

    def describe(self) -> dict[str, Any]:
        """Return what `load` needs besides the tensors, as JSON."""
        return {"options": asdict(self.options), "layer_config": describe_layer_config(self.config)}

    def _root_keys(self, batch: TrainBatch, fused_BLH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of step 0, [B, L, G, D] each, for all rows."""
        x, _ = self._layer.enter(self._embed(shift_left(batch.ids, 1, 0)), fused_BLH)
        k, v = self._layer.self_attn.key_value(x)
        return rotate(k, *self.rotary_emb(k, batch.position)), v

    @property
    def _layer(self) -> Eagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens).to(self.fc.weight.dtype)


def build(options: Eagle3Options, target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return an untrained fp32 head for `target`, its lm_head the target's rows of the draft vocabulary.

    draft_vocab: [W] sorted unique target ids, or None for all. Raises UserError for layer ids that the target
    does not have and for dimensions that do not fit together.
    """
    layer_ids = target.default_layer_ids() if options.layer_ids is None else tuple(options.layer_ids)
    target.check_layer_ids(layer_ids)
    vocab = None if draft_vocab is None else draft_vocab.to(target.device, torch.int64)
    assert vocab is None or bool((vocab.diff() > 0).all()), "the draft vocabulary is sorted and unique"
    with torch.device(target.device):
        head = Eagle3Head(options, derive_layer_config(options, target), layer_ids, target.embedding, vocab)
    weight = target.head.weight if vocab is None else target.head.weight[vocab]
    with torch.no_grad():
        head.lm_head.weight.copy_(weight)
    return head


def load(spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return the head that `Eagle3Head.describe` and its layer_ids wrote down; its weights are still to be filled in."""
    options, config = Eagle3Options(**spec["options"]), LlamaConfig(**spec["layer_config"])
    with torch.device(target.device):
        return Eagle3Head(options, config, spec["layer_ids"], target.embedding, draft_vocab)
