"""Domino: a block filled in at once, whose logits a GRU over the tokens before corrects from left to right.

"Domino" (arXiv 2605.29707); trained by SpecForge and Automodel, served by SGLang's DFLASH.

Shapes: R_k rows of step k, R all rows, B rows and K tokens of a draft, H hidden, G width of the GRU, E rank, W draft vocab; "..." is [R]
or [B].

Blocks, slots and layers are those of DFlash (heads/block/base.py), and step k predicts x_{t+2+k}. The GRU reads the target's embeddings of
x_{t+1}, .., x_{t+1+k}, the block's tokens up to the one before: in training the text's, in drafting those just drafted. With its state s
the slot's logits become base + W2 silu(W1 [h; s]), but for the first `pure_draft_prefix_len` tokens, which keep the base. W2 starts at
zero, so that the first drafts are DFlash's.

Training pulls the base to the target too, at first alone, see `LossSpec.besides`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.base import StepOutput
from draftsmith.heads.block.base import BlockDrafter, BlockHead, tokens_before
from draftsmith.heads.domino import DominoOptions


class PrefixGru(nn.Module):
    """torch's GRU, one layer without biases. Not `nn.GRU`, whose weak references to its weights keep these from moving between devices."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens' embeddings [R, K, H] and the state before them [1, R, G], None for zeros -> all states [R, K, G], and the last."""
        weights = (self.weight_ih_l0, self.weight_hh_l0)
        state = x.new_zeros(1, len(x), weights[1].shape[1]) if state is None else state
        # Without dropout `train` changes nothing but what cuDNN keeps for the gradient.
        out, last = torch.gru(x.transpose(0, 1), state, weights, False, 1, 0.0, torch.is_grad_enabled(), False, False)
        return out.transpose(0, 1), last


class DominoHead(BlockHead):
    """The Domino drafter. prefix_gru and embed_proj are named as in the published files."""

    method: ClassVar[str] = "domino"
    options_class = DominoOptions
    options: DominoOptions

    def __init__(self, options: DominoOptions, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        self.first_slot = options.block_size - options.drafted
        super().__init__(options, config, *others)
        H, G, E = config.hidden_size, options.gru_hidden_dim, options.emb_dim
        self.prefix_gru = PrefixGru(H, G)
        last = nn.Linear(E, self.width, bias=False)
        nn.init.zeros_(last.weight)
        self.embed_proj = nn.Sequential(nn.Linear(H + G, E, bias=False), nn.SiLU(), last)
        self.trains = replace(self.trains, outputs=frozenset({"base"}), no_muon=("prefix_gru", "embed_proj"))

    @property
    def engine_tokens(self) -> int:
        """What SGLang drafts with a whole block: a token less than it has slots, whichever tokens these predict."""
        return self.options.block_size - 1

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> logits with and without the correction."""
        first = rows[0]
        prefix, _ = self.prefix_gru(self._embed(torch.stack(tokens_before(batch, [first] * len(rows)), 1)))
        steps = []
        for k, (at, own) in enumerate(zip(rows, states, strict=True)):
            correction = self.correction(k, own, prefix[torch.searchsorted(first, at), k])
            steps.append(StepOutput(k, at, (own, correction), self._corrected, besides=self._plain))
        return steps

    def correction(self, step: int, states: Tensor, prefix: Tensor) -> Tensor:
        """States [..., H] of the slot that drafts at a step and of the GRU [..., G] -> what `embed_proj` corrects the logits with, [..., E]."""
        inner = self.embed_proj[:2](torch.cat([states, prefix.to(states.dtype)], -1))
        # Without biases nothing becomes no correction. A step of its own kind would need a projection of its own, see `Trains.blocks`.
        return inner if step >= self.options.pure_draft_prefix_len else inner * 0

    def _corrected(self, states: Tensor, correction: Tensor) -> Tensor:
        return self.logits(states) + self.embed_proj[2](correction)

    def _plain(self, states: Tensor, correction: Tensor) -> list[Tensor]:
        return [self.logits(states)]


class DominoDrafter(BlockDrafter):
    """Drafts a chain from left to right, each token by the logits that those before it correct."""

    head: DominoHead

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain."""
        head, depth = self.head, states_BKH.shape[1]
        base_BKW = head.logits(states_BKH)
        prefix: list[Tensor | None] = [None]

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            out_B1G, prefix[0] = head.prefix_gru(head._embed(before_B[:, None]), prefix[0])
            return base_BKW[:, k] + head.embed_proj[2](head.correction(k, states_BKH[:, k], out_B1G[:, 0]))

        return self.chain(state, depth, next_logits)


build, load = DominoHead.build, DominoHead.load
