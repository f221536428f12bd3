"""DFlash: the slots of a block behind its first are filled in all at once, each with a token of its own place.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026); served by vLLM's `qwen3_dflash.py` and
llama.cpp's draft-dflash.

Shapes: R_k rows of step k, B rows and K tokens of a draft, H hidden, W draft vocab. Slot k + 1 of row t's block is at the position of x_{t+2+k}, which it
predicts; slot 0 holds the root and predicts nothing. Blocks and layers are those of heads/block/base.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.base import StepOutput
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.block.base import BlockDrafter, BlockHead
from draftsmith.heads.dflash import DFlashOptions


class DFlashHead(BlockHead):
    """The DFlash drafter: a block of S slots drafts S - 1 tokens, none of which knows the others."""

    method: ClassVar[str] = "dflash"
    options_class: ClassVar[type[BlockOptions]] = DFlashOptions
    first_slot = 1

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> its logits."""
        return [StepOutput(k, at, x, self.logits) for k, (at, x) in enumerate(zip(rows, states, strict=True))]


class DFlashDrafter(BlockDrafter):
    """Drafts a chain, token k drawn from slot k under the target's sampling settings, or a static tree of the most
    likely tokens of each slot, or (drawn) of tokens sampled from it without replacement."""

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain or a tree."""
        return self.draft_all(state, self.head.logits(states_BKH))


build, load = DFlashHead.build, DFlashHead.load
