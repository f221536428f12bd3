"""DFlash: the slots of a block behind its first are filled in all at once, each with a token of its own place.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026); served by vLLM's `qwen3_dflash.py` and
llama.cpp's draft-dflash.

Shapes: R_k rows of step k, R those of step 0, B rows and K tokens of a draft, S slots, H hidden, W draft vocab. Slot k + 1 of row t's block is
at the position of x_{t+2+k}, which it predicts; slot 0 holds the root and predicts nothing. Blocks and layers are those of
heads/block/base.py.

With a variable prefix ("D2SD", arXiv 2606.04446) a draft is made in two passes over the block: of the first its `variable_prefix` first tokens
are drafted, of the second, in which they stand in place of masks, the others. Training fills in a block twice too: behind its root, and
behind l of the text's tokens, 2 <= l < S, drawn by a truncated geometric distribution. The slots behind these learn with weights that
begin anew there.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.sampling import PREFIX, uniforms
from draftsmith.heads.base import DraftHead, HeadOutput, StepOutput
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.block.base import BlockDrafter, BlockHead
from draftsmith.heads.dflash import DFlashOptions


class DFlashHead(BlockHead):
    """The DFlash drafter: a block of S slots drafts S - 1 tokens, none of which knows the others but those of a prefix."""

    method: ClassVar[str] = "dflash"
    options_class: ClassVar[type[BlockOptions]] = DFlashOptions
    first_slot = 1

    def __init__(self, options: BlockOptions, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        super().__init__(options, config, *others)
        if self.prefix is not None:
            self.trains = replace(self.trains, outputs=frozenset({"prefix"}))

    @property
    def prefix(self) -> int | None:
        """How many tokens the first of two passes drafts, None where there is one."""
        return getattr(self.options, "variable_prefix", None)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """As `BlockHead.forward`."""
        if (first := self.prefix) is None or (not self.training and num_steps <= first):
            return super().forward(batch, num_steps)
        plan, context = self.planned(batch, num_steps), self._context_keys(batch)
        plain = self.slot_states(self.filled(batch, plan, context, num_steps), plan.among)
        behind = self.slot_states(self.filled(batch, plan, context, num_steps, self._known(batch)), plan.among)
        if not self.training:
            return HeadOutput(tuple(self.outputs(plain[:first] + behind[first:], plan.rows, batch)))
        known_R, steps = self._known(batch)(plan.rows[0]), []
        for k, (at, own) in enumerate(zip(plan.rows, plan.among, strict=True)):
            sources = (plain[k], behind[k], known_R[own] - 1)
            steps.append(StepOutput(k, at, sources, self._first_pass, besides=self._second_pass, rounds=None))
        return HeadOutput(tuple(steps))

    def in_engines(self) -> DraftHead:
        """The head with one pass."""
        if self.prefix is None:
            return self
        alone = copy(self)  # of the same weights
        alone.options = replace(self.options, variable_prefix=None, prefix_base=DFlashOptions.prefix_base)
        return alone

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> its logits."""
        return [StepOutput(k, at, x, self.logits) for k, (at, x) in enumerate(zip(rows, states, strict=True))]

    def _known(self, batch: TrainBatch) -> Callable[[Tensor], Tensor]:
        """Return what finds of rows [R] how many of their slots hold the text's tokens: what the first pass drafts, or in training what is
        drawn by the seed of the document and the position of the row alone."""
        assert self.prefix is not None
        first, base, slots = self.prefix, self.options.prefix_base, self.options.block_size

        def known(rows: Tensor) -> Tensor:
            if not self.training:
                return torch.full_like(rows, 1 + first)
            chance = base ** torch.arange(2, slots, device=rows.device, dtype=torch.float64)
            seeds_R, position_R = (x.flatten()[rows] for x in (batch.seeds, batch.position))
            uniform_R = uniforms(seeds_R, position_R, PREFIX, 1)[:, 0]
            return 2 + torch.searchsorted(chance.cumsum(0)[:-1] / chance.sum(), uniform_R, right=True)

        return known

    def _first_pass(self, states: Tensor, behind: Tensor, restart: Tensor) -> Tensor:
        return self.logits(states)

    def _second_pass(self, states: Tensor, behind: Tensor, restart: Tensor) -> list[Tensor]:
        return [self.logits(behind)]


class DFlashDrafter(BlockDrafter):
    """Drafts a chain, token k drawn from slot k under the target's sampling settings, or a static tree of the most
    likely tokens of each slot, or (drawn) of tokens sampled from it without replacement. Behind a prefix a chain goes on in a second pass."""

    head: DFlashHead

    def draft_block(self, state: DecodeState, states_BSH: Tensor, depth: int) -> Draft:
        """As `BlockDrafter.draft_block`."""
        head, first = self.head, self.head.prefix
        if first is None or depth <= first:
            return super().draft_block(state, states_BSH, depth)
        drafted: list[Tensor] = []
        logits_BKW = head.logits(states_BSH[:, 1 : 1 + first])

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            nonlocal logits_BKW
            drafted.append(before_B)
            if k == first:
                masks_BM = head.block_tokens(state.root_B, states_BSH.shape[1])[:, 1 + first :]
                again_BSH = self.fill(torch.cat([torch.stack(drafted, 1), masks_BM], 1))
                logits_BKW = torch.cat([logits_BKW, head.logits(again_BSH[:, 1 + first : 1 + depth])], 1)
            return logits_BKW[:, k]

        return self.chain(state, depth, next_logits)

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain or a tree."""
        return self.draft_all(state, self.head.logits(states_BKH))


build, load = DFlashHead.build, DFlashHead.load
