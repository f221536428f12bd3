"""The base of EAGLE's heads: a decoder layer that reads a token and a hidden state per row, and optional Llama layers
above; and how they draft.

Shapes: B batch rows, L tokens, n tokens of one decoding call, R query rows (flat b*L+t), H draft hidden, Ht target
hidden, A aux layers, W draft vocab, G key/value heads, D head size, S cached keys.

Row t at step k sees the token x_{t+1+k} and a hidden state (k = 0: what the target computed at position t; else its own
output of step k-1), stands at RoPE position t+k, and predicts x_{t+2+k}. Its keys are those of step 0 of the rows j <=
t (the context keys), which are made of the target's states as in decoding, and its own of steps 1..k; in every layer.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, chain_above
from draftsmith.decoder.growth import Level, start_beam
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput, shift_left
from draftsmith.heads.drafters import CachedDrafter, grow_tree
from draftsmith.heads.layers.decoder_layer import CacheUpdate, EagleLayer, PlainLayer, Rotary
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.training_pass import LayerInput, TrainingPass
from draftsmith.heads.plan import Plan, plan_queries

Reader = Callable[[Tensor, int, Tensor], LayerInput]
"""(flat index of rows, number of the step, their hidden states) -> what they read at that step."""


class EagleHead(DraftHead):
    """A head whose every step is one call of its decoder layers.

    Subclasses define the hidden state of step 0 (`initial_hidden`), how embedding and hidden state form the first
    layer's input (`layer_input`), what the last layer's output becomes (`logits`, `feedback`, and `feature` where it
    predicts a state of the target), and what noise training adds (`perturb`).
    """

    config: LlamaConfig
    embed_tokens: nn.Embedding
    fc: nn.Linear
    layers: nn.ModuleList
    rotary_emb: Rotary

    @property
    def least_window(self) -> int | None:
        """The token that a row reads."""
        return 1

    @abstractmethod
    def initial_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's aux streams [B, n, A*Ht] and last states [B, n, Ht] -> the hidden state of step 0, [B, n, H]."""

    @abstractmethod
    def layer_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and hidden state [..., H] -> the input of the first layer's attention, and the residual [...,
        H]."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> draft logits [..., W]."""

    @abstractmethod
    def feedback(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> the hidden state of the next step, [..., H]."""

    def perturb(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Return the hidden state of step 0 [B, L, H] with the noise of training; called in training mode alone."""
        return hidden

    def feature(self, out: Tensor) -> Tensor | None:
        """The layer's output [..., H] -> its prediction of the target's next state, None where it predicts none."""
        return None

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: query rows are those of all steps together."""
        plan = super().plan(batch, num_steps)
        queries = plan_queries(batch, torch.cat(plan.rows))
        among = tuple(torch.searchsorted(queries.rows, rows) for rows in plan.rows)
        return replace(plan, queries=(queries,), among=among)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Run `num_steps` steps on the text of `batch`: logits [R_k, W] each, only on the supervised rows.

        Everything but the context keys is computed on the union of all steps' rows alone.
        """
        plan = self.planned(batch, num_steps)
        (queries,) = plan.queries
        hidden_BLH = self.initial_hidden(batch.aux, batch.last)
        hidden_BLH = self.perturb(hidden_BLH, batch) if self.training else hidden_BLH
        passing = self.training_pass(batch.position, queries, num_steps)
        read = self.reader(batch, passing, num_steps)
        out_RH, steps = self.first_step(read, hidden_BLH, passing), []
        for step, (rows, counted) in enumerate(zip(plan.rows, plan.among, strict=True)):
            if step:
                out_RH = passing.step(step, read(queries.rows, step, self.feedback(out_RH)))
            states = out_RH[counted]
            steps.append(StepOutput(step, rows, states, self.logits, self.feature(states)))
        return HeadOutput(tuple(steps))

    def training_pass(self, position_BL: Tensor, queries: RowPlan, num_steps: int) -> TrainingPass:
        """Return the pass of `num_steps` steps through the layers for these query rows."""
        return TrainingPass(*self.stack, self.rotary_emb, position_BL, queries, num_steps, self.window)

    def reader(self, batch: TrainBatch, passing: TrainingPass, num_steps: int) -> Reader:
        """Return what makes the first layer's input of `num_steps` steps of a pass."""

        def read(rows: Tensor, step: int, hidden: Tensor) -> LayerInput:
            tokens = shift_left(batch.ids, 1 + step, 0).flatten()[rows]
            return LayerInput(*self.layer_input(self._embed(tokens), hidden))

        return read

    def first_step(self, read: Reader, hidden_BLH: Tensor, passing: TrainingPass) -> Tensor:
        """Return the output [R, H] of step 0 from its hidden state, and let `passing` keep the context keys for later
        steps."""
        rows, hidden_TH = passing.plan.rows, hidden_BLH.flatten(0, 1)
        lower = passing.context_keys(read(torch.arange(len(hidden_TH), device=rows.device), 0, hidden_TH))
        if lower is not None:
            return passing.first(LayerInput(*self.stack[1][-1].layer_input(lower[rows])))
        # Computed again for the few rows: that keeps less for the backward pass than the input of all tokens.
        return passing.first(read(rows, 0, hidden_TH[rows]))

    def layer(
        self, tokens: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], update: CacheUpdate, mask: Tensor | None
    ) -> Tensor:
        """One decoding call: tokens [B, n] (x_{i+1} of row i), hidden [B, n, H], cosines and sines [B, n, D] of the positions i ->
        [B, n, H].

        update(i, k [B, G, n, D], v) stores this call's keys and values of layer i and returns all of them, [B, G, S, D]
        each. mask: bool [B, 1, n, S], True where a row may look, or None for everywhere. The result is the last layer's output
        before any final norm: pass it to `logits` and to `feedback`.
        """
        first, above = self.stack
        x, residual = self.layer_input(self._embed(tokens), hidden)
        out = first.decode(x, residual, rotation, update, mask)
        for number, layer in enumerate(above, 1):
            out = layer.decode(*layer.layer_input(out), rotation, update, mask, number)
        return out

    @property
    def stack(self) -> tuple[EagleLayer, list[PlainLayer]]:
        """The first layer, which reads tokens, and the plain ones above it."""
        first, above = self.layers[0], list(self.layers)[1:]
        assert isinstance(first, EagleLayer)
        return first, [layer for layer in above if isinstance(layer, PlainLayer)]

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens).to(self.fc.weight.dtype)


class EagleDrafter(CachedDrafter):
    """Drafts a chain of `num_speculative_tokens` tokens sampled under the target's settings, or a tree: a static one, or a dynamic
    one. A chain of argmaxes (greedy_drafts) is lossless too, but accepted less often above temperature 0.

    Entry t of a sequence pairs token x_{t+1} with a hidden state of position t: the target's for tokens of the text. The output at
    the last of these gives the first draft tokens. A draft token of depth d becomes entry t + d, with its parent's output as hidden
    state, and sees the cached entries and its ancestors in the draft.

    Shapes: B rows, n new tokens, m nodes of one level that are run, T draft tokens run so far, K drafted tokens, C children of a node.
    """

    head: EagleHead
    _longest = 0
    # Of this round's draft: cosines and sines by depth, and the depth of each draft token that was run.
    _rotations: list[tuple[Tensor, Tensor]]
    _depths: tuple[int, ...] = ()

    def most_entries(self) -> int:
        """Return the most entries that a draft writes."""
        dynamic = isinstance(self.tree, DynamicTree)
        return self.tree.depth * self.tree.branching if dynamic else self.max_nodes - 1

    def make(self, state: DecodeState) -> Draft:
        """Run the new tokens, then draft at most as many tokens as a row may still emit."""
        self._longest = state.longest
        out_BH = self.read_last(state)
        depth = min(self.num_speculative_tokens, state.tokens_left)
        if self.tree is None:
            return self._chain(state, out_BH, depth)
        if isinstance(self.tree, StaticTree):

            def run(step: int, level: Level, out_BmH: Tensor, tokens_Bm: Tensor) -> Tensor:
                hidden_BmH = self.head.feedback(out_BmH)[:, level.parent_n[level.inner_m]]
                return self._grow(tokens_Bm, hidden_BmH, step, level.ancestors_mT.expand(len(out_BH), -1, -1))

            def logits(step: int, out_BmH: Tensor) -> Tensor:
                return self.head.logits(out_BmH)

            return grow_tree(state, out_BH, self.head, self.tree, depth, logits, run, drawn=self.drawn)
        out_BmH, beam = out_BH[:, None], start_beam(self.tree, state.root_B, state.limit_B)
        for level in range(depth):
            beam = beam.extend(self.head.logits(out_BmH), self.head.target_ids)
            if level + 1 < depth:
                hidden_BmH = self.head.feedback(out_BmH).gather(
                    1, beam.parent_Bm[..., None].expand(-1, -1, out_BmH.shape[-1])
                )
                out_BmH = self._grow(beam.tokens_Bm, hidden_BmH, level, beam.ancestors_BmT)
        return beam.draft()

    def _chain(self, state: DecodeState, out_BH: Tensor, depth: int) -> Draft:
        # A single row's next token sees every slot in use, which takes no mask.
        unmasked = len(out_BH) == 1 and self.cache.window is None and self.cache.bucket == 1

        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            nonlocal out_BH
            if k:
                hidden_B1H = self.head.feedback(out_BH)[:, None]
                above_B1T = None if unmasked else chain_above(k, out_BH.device)[-1:].expand(len(out_BH), -1, -1)
                out_BH = self._grow(tokens_B[:, None], hidden_B1H, k - 1, above_B1T)[:, 0]
            return self.head.logits(out_BH)

        return self.chain(state, depth, next_logits)

    def run(self, new_tokens: NewTokens) -> Tensor:
        hidden_BnH = self.head.initial_hidden(new_tokens.aux_BnF, new_tokens.last_BnD)
        cache = self.cache
        return self.head.layer(new_tokens.tokens_Bn, hidden_BnH, cache.rotation(), cache.write, cache.chain_mask())

    def _grow(self, tokens_Bm: Tensor, hidden_BmH: Tensor, depth: int, above_BmT: Tensor | None) -> Tensor:
        """Run draft tokens of one depth (0 for children of the root) behind the T - m draft tokens that were run
        before.

        above_BmT: which of the T each sees; None where a single one sees them all."""
        if depth == 0:
            self._rotations = self.cache.rotations_apart(self.num_speculative_tokens, self._longest)
        new, total = (1, depth + 1) if above_BmT is None else above_BmT.shape[1:]
        self.cache.stage(new, longest=self._longest, skip=total - new)
        self._depths = (*self._depths[: total - new], *[depth] * new)
        mask = None if above_BmT is None else self.cache.tree_mask(above_BmT, self._depths)
        return self.head.layer(tokens_Bm, hidden_BmH, self._rotations[depth], self.cache.write, mask)
