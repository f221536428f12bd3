"""What EAGLE's drafters have in common: one decoder layer that reads a token and a hidden state per row.

Shapes: B batch rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H hidden (draft and
target alike), A aux layers, W draft vocab, G key/value heads, D head size, S cached keys.

Row t at step k sees the token x_{t+1+k} and a hidden state (k = 0: what the target computed at position t; else its
own output of step k-1), stands at RoPE position t+k, and predicts x_{t+2+k}. Its keys are those of step 0 of the rows
j <= t, which hold the target's states as they do in decoding, and its own of steps 1..k.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.draft import Fresh
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, iterate_supervised_rows, shift_left
from draftsmith.heads.eagle_layer import EagleLayer, Rotary, rotate
from draftsmith.heads.ttt_attention import plan_rows, ttt_attention

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class EagleHead(DraftHead):
    """A drafter whose every step is one call of one decoder layer.

    Kinds of it differ in the hidden state of step 0 (`first_hidden`), in how embedding and hidden state enter the
    layer (`enter`), and in what is made of the layer's output (`logits`, `feedback`; `feature` where it stands for a state
    of the target). What training does to the states that it is given is `perturb`.
    """

    config: LlamaConfig
    embed_tokens: nn.Embedding
    fc: nn.Linear
    layers: nn.ModuleList
    rotary_emb: Rotary

    @abstractmethod
    def first_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's aux streams [B, n, A*H] and last states [B, n, H] -> the hidden state of step 0, [B, n, H]."""

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and hidden state [..., H] -> what the attention projects, and the residual [..., H]."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> draft logits [..., W]."""

    @abstractmethod
    def feedback(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> the hidden state of the next step, [..., H]."""

    def perturb(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """The hidden state of step 0 [B, L, H] as it is trained on; called in training alone."""
        return hidden

    def feature(self, out: Tensor) -> Tensor | None:
        """The layer's output [..., H] -> what it takes for the target's next state, None where it stands for none."""
        return None

    def forward(self, batch: TrainBatch, num_steps: int, rows: Sequence[Tensor] | None = None) -> HeadOutput:
        """Run `num_steps` steps on the text of `batch`: logits [R_k, W] each, only on the rows that count.

        rows: one bool [B, L] mask per step instead of rule 1 (for comparisons with other trainers).
        Everything after the keys of step 0 is computed on the union of all steps' rows alone.
        """
        masks = list(islice(iterate_supervised_rows(batch), num_steps) if rows is None else rows)
        assert len(masks) == num_steps
        plan = plan_rows(batch.document, reduce(torch.logical_or, masks))
        first_BLH = self.first_hidden(batch.aux, batch.last)
        first_BLH = self.perturb(first_BLH, batch) if self.training else first_BLH
        k_BLGD, v_BLGD = self._root_keys(batch, first_BLH)
        hidden_RH = first_BLH.flatten(0, 1)[plan.rows]
        position_1R = batch.position.flatten()[plan.rows][None]
        own_k, own_v = (x.new_empty(0, len(plan.rows), *x.shape[2:]) for x in (k_BLGD, v_BLGD))
        steps = []
        for step, mask in enumerate(masks):
            tokens_R = shift_left(batch.ids, 1 + step, 0).flatten()[plan.rows]
            x, residual = self.enter(self._embed(tokens_R), hidden_RH)
            q = self._layer.self_attn.query(x)
            cos, sin = (y[0] for y in self.rotary_emb(q, position_1R + step))
            if step:
                k, v = self._layer.self_attn.key_value(x)
                own_k, own_v = torch.cat([own_k, rotate(k, cos, sin)[None]]), torch.cat([own_v, v[None]])
            scale = self._layer.self_attn.head_dim**-0.5
            attended = ttt_attention(rotate(q, cos, sin), k_BLGD, v_BLGD, own_k, own_v, plan, scale)
            out_RH = self._layer.leave(attended, residual)
            hidden_RH = self.feedback(out_RH)
            counted = mask.flatten()[plan.rows].nonzero().flatten()
            out_RH = out_RH[counted]
            steps.append(StepOutput(step, plan.rows[counted], self.logits(out_RH), self.feature(out_RH)))
        return HeadOutput(tuple(steps))

    def begin(self, fresh: Fresh) -> Tensor:
        """Return the hidden states [B, n, H] of rows whose states the target has computed, for `layer`."""
        return self.first_hidden(fresh.aux_BnF, fresh.last_BnD)

    def layer(
        self,
        tokens: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        update: CacheUpdate,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One decoding call: tokens [B, n] (x_{i+1} of row i), hidden [B, n, H], position_ids [B, n] (i) -> [B, n, H].

        update(k [B, G, n, D], v) stores this call's keys and values and returns all of them, [B, G, S, D] each.
        mask: bool [B, 1, n, S], True where a row may look, or None for everywhere. rotation: cosines and sines [B, n, D]
        of the positions, where the caller has them. The result is the layer's output before any final norm: pass it to
        `logits` and to `feedback`.
        """
        layer = self._layer
        x, residual = self.enter(self._embed(tokens), hidden)
        turning, v = layer.self_attn.together(x)
        cos, sin = self.rotary_emb(x, position_ids) if rotation is None else rotation
        turned = rotate(turning, cos, sin).transpose(1, 2)
        q, k = turned.split((self.config.num_attention_heads, self.config.num_key_value_heads), 1)
        all_k, all_v = update(k, v.transpose(1, 2))
        attended = F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=mask, enable_gqa=True)
        return layer.leave(attended.transpose(1, 2), residual)

    def _root_keys(self, batch: TrainBatch, first_BLH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of step 0, [B, L, G, D] each, for all rows."""
        x, _ = self.enter(self._embed(shift_left(batch.ids, 1, 0)), first_BLH)
        k, v = self._layer.self_attn.key_value(x)
        return rotate(k, *self.rotary_emb(k, batch.position)), v

    @property
    def _layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens).to(self.fc.weight.dtype)
