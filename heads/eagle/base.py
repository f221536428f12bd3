"""What EAGLE's drafters have in common: a decoder layer that reads a token and a hidden state per row, and maybe plain
Llama layers above it.

Shapes: B batch rows, L tokens, n tokens of one decoding call, R needed rows (flat b*L+t), H draft hidden, Ht target
hidden, A aux layers, W draft vocab, G key/value heads, D head size, S cached keys.

Row t at step k sees the token x_{t+1+k} and a hidden state (k = 0: what the target computed at position t; else its
own output of step k-1), stands at RoPE position t+k, and predicts x_{t+2+k}. Its keys are those of step 0 of the rows
j <= t, which hold the target's states as they do in decoding, and its own of steps 1..k; in every layer.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.eval.decode.draft import NewTokens
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, iterate_supervised_rows, shift_left
from draftsmith.heads.layers.decoder_layer import EagleLayer, PlainLayer, Rotary, attend, rotate
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.training_pass import TrainingPass

CacheUpdate = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class EagleHead(DraftHead):
    """A drafter whose every step is one call of its decoder layers. window: how many tokens a row sees, itself the last of
    them; None for all.

    Kinds of it differ in the hidden state of step 0 (`first_hidden`), in how embedding and hidden state enter the
    first layer (`enter`), and in what is made of the last one's output (`logits`, `feedback`; `feature` where it stands for a state
    of the target). What training does to the states that it is given is `perturb`.
    """

    config: LlamaConfig
    embed_tokens: nn.Embedding
    fc: nn.Linear
    layers: nn.ModuleList
    rotary_emb: Rotary
    window: int | None = None

    @abstractmethod
    def first_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's aux streams [B, n, A*Ht] and last states [B, n, Ht] -> the hidden state of step 0, [B, n, H]."""

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

        rows: one bool [B, L] mask per step instead of docs/algorithms.md, rule 1 (for comparisons with other trainers).
        Everything after the keys of step 0 is computed on the union of all steps' rows alone.
        """
        masks = list(islice(iterate_supervised_rows(batch), num_steps) if rows is None else rows)
        assert len(masks) == num_steps
        plan = plan_rows(batch.document, reduce(torch.logical_or, masks))
        hidden_BLH = self.first_hidden(batch.aux, batch.last)
        hidden_BLH = self.perturb(hidden_BLH, batch) if self.training else hidden_BLH
        passing = TrainingPass(*self.stack, self.rotary_emb, batch.position, plan, num_steps, self.window)
        out_RH, steps = self.first_step(batch, hidden_BLH, passing), []
        for step, mask in enumerate(masks):
            if step:
                tokens_R = shift_left(batch.ids, 1 + step, 0).flatten()[plan.rows]
                out_RH = passing.step(step, *self.enter(self._embed(tokens_R), self.feedback(out_RH)))
            counted = mask.flatten()[plan.rows].nonzero().flatten()
            found = out_RH[counted]
            steps.append(StepOutput(step, plan.rows[counted], self.logits(found), self.feature(found)))
        return HeadOutput(tuple(steps))

    def first_step(self, batch: TrainBatch, hidden_BLH: Tensor, passing: TrainingPass) -> Tensor:
        """Return the output [R, H] of step 0, whose keys later steps of `passing` see; hidden_BLH is its hidden state."""
        tokens_BL, rows = shift_left(batch.ids, 1, 0), passing.plan.rows
        lower = passing.roots(*self.enter(self._embed(tokens_BL), hidden_BLH))
        if lower is not None:
            return passing.first(*self.stack[1][-1].read(lower[rows]))
        # Entered anew: what the few rows need is less to keep than what all tokens had.
        return passing.first(*self.enter(self._embed(tokens_BL.flatten()[rows]), hidden_BLH.flatten(0, 1)[rows]))

    def begin(self, new_tokens: NewTokens) -> Tensor:
        """Return the hidden states [B, n, H] of rows whose states the target has computed, for `layer`."""
        return self.first_hidden(new_tokens.aux_BnF, new_tokens.last_BnD)

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

        update(i, k [B, G, n, D], v) stores this call's keys and values of layer i and returns all of them, [B, G, S, D]
        each. mask: bool [B, 1, n, S], True where a row may look, or None for everywhere. rotation: cosines and sines
        [B, n, D] of the positions, where the caller has them. The result is the last layer's output before any final norm:
        pass it to `logits` and to `feedback`.
        """
        below, above = self.stack
        x, residual = self.enter(self._embed(tokens), hidden)
        rotation = self.rotary_emb(x, position_ids) if rotation is None else rotation
        out = self._decode(0, below, x, residual, rotation, update, mask)
        for number, layer in enumerate(above, 1):
            out = self._decode(number, layer, *layer.read(out), rotation, update, mask)
        return out

    def _decode(
        self,
        number: int,
        layer: EagleLayer,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        update: CacheUpdate,
        mask: Tensor | None,
    ) -> Tensor:
        """One layer of a decoding call."""
        turning, v = layer.self_attn.together(x)
        turned = rotate(turning, *rotation).transpose(1, 2)
        q, k = turned.split((self.config.num_attention_heads, self.config.num_key_value_heads), 1)
        all_k, all_v = update(number, k, v.transpose(1, 2))
        attended = attend(q, all_k, all_v, mask)
        return layer.leave(attended.transpose(1, 2), residual)

    @property
    def stack(self) -> tuple[EagleLayer, list[PlainLayer]]:
        """The layer that reads tokens, and the plain ones above it."""
        below, above = self.layers[0], list(self.layers)[1:]
        assert isinstance(below, EagleLayer)
        return below, [layer for layer in above if isinstance(layer, PlainLayer)]

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens).to(self.fc.weight.dtype)
