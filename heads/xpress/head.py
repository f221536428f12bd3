"""XPress: a block filled in at once, whose logits a small network over slots and tokens refines from left to right.

"XPress" (arXiv 2608.02438); trained by speculators, served by vLLM's `qwen3_xpress.py`.

Shapes: R_k rows of step k, R those of step 0, B rows and K tokens of a draft, S slots, J the first of them, H hidden, r rank, W draft
vocab; "..." is [R] or [B].

Blocks, slots and layers are those of DFlash (heads/block/base.py): slot k + 1 predicts x_{t+2+k}. Slot j's input is
a_j = W_in [D_h h_j; D_g mean(h); E[token before j]], with the mean over all slots of the block. Each of its r channels c becomes
x_j = a_j + sum_{i <= j} L_c[j, i] a_i, a feed-forward part is added, and the logits become base + W2 x. L is read below and on its
diagonal alone. W2 starts at zero, so that the first drafts are DFlash's. The root counts as its own token before, as in vLLM; speculators
trains with the text's.

No slot reads a token behind it, so a draft is made from left to right: what Jacobi passes over the whole block settle at, the n-th
pass at n tokens at least. A mean over a shorter block would be another for every slot, so a draft of any length fills in a whole one.
Training reads the text's tokens, and besides in some rounds the head's own guesses, see `LossSpec.besides`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.base import StepOutput
from draftsmith.heads.block.base import BlockDrafter, BlockHead, tokens_before
from draftsmith.heads.losses.head_loss import PIECE
from draftsmith.heads.xpress import XPressOptions


class Mixer(nn.Module):
    """Slots of a block -> each with a part of those up to it, by channel. L: [r, S, S], of which what is above the diagonal is not read."""

    def __init__(self, rank: int, slots: int) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, slots, slots))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Slots [..., J, r] from the block's first on -> those from number `first` on, mixed."""
        J = x.shape[-2]
        mixed = torch.einsum("rji,...ir->...jr", self.L[:, :J, :J].tril()[:, first:].to(x.dtype), x)
        return x[..., first:, :] + mixed


class RefinerHead(nn.Module):
    """What refines a block. Parameters are named as in the published files; w2 starts at zero."""

    def __init__(self, config: LlamaConfig, options: XPressOptions, draft_vocab_size: int) -> None:
        super().__init__()
        H, r = config.hidden_size, options.xpress_rank
        self.w1 = nn.Embedding(config.vocab_size, r)
        self.down_h = nn.Linear(H, r, bias=False)
        self.down_g = nn.Linear(H, r, bias=False)
        self.in_proj = nn.Linear(3 * r, r, bias=False)
        self.mix = Mixer(r, options.block_size)
        self.mlp = LlamaMLP(
            LlamaConfig(hidden_size=r, intermediate_size=options.xpress_mlp_hidden, num_attention_heads=1)
        )
        self.w2 = nn.Linear(r, draft_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.w2.weight)

    def features(self, blocks: Tensor) -> Tensor:
        """States of whole blocks [..., S, H] -> what of them no token changes, [..., S, 2r]."""
        of_block = self.down_g(blocks.mean(-2, keepdim=True))
        own = self.down_h(blocks)
        return torch.cat([own, of_block.expand_as(own)], -1)

    def inputs(self, features: Tensor, before: Tensor) -> Tensor:
        """Features of slots [..., J, 2r] and the tokens before them [..., J] -> what is mixed, [..., J, r]."""
        return self.in_proj(torch.cat([features, self.w1(before).to(features.dtype)], -1))

    def mixed(self, inputs: Tensor, first: int = 0) -> Tensor:
        """Inputs of a block's first slots [..., J, r] -> what `w2` makes corrections of, for those from number `first` on."""
        x = self.mix(inputs, first)
        return x + self.mlp(x)

    def forward(self, features: Tensor, before: Tensor) -> Tensor:
        """Features of whole blocks [..., S, 2r] and the tokens before their first slots [..., J] -> what `w2` makes corrections of, for
        the slots behind the root, [..., J - 1, r]."""
        return self.mixed(self.inputs(features[..., : before.shape[-1], :], before), 1)


class XPressHead(BlockHead):
    """The XPress drafter: a block of S slots drafts S - 1 tokens, each by logits that those before it correct."""

    method: ClassVar[str] = "xpress"
    options_class = XPressOptions
    first_slot = 1
    options: XPressOptions

    def __init__(self, options: XPressOptions, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        super().__init__(options, config, *others)
        self.xpress_head = RefinerHead(config, options, self.width)
        self.trains = replace(self.trains, outputs=frozenset({"base", "rounds"}), no_muon=("xpress_head",))

    def slot_states(self, blocks_RSH: Tensor, among: Sequence[Tensor]) -> list[Tensor]:
        """As `BlockHead.slot_states`: the blocks, whole."""
        return [self.norm(blocks_RSH)]

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states of whole blocks [R, S, H], alone, and the rows [R_k] of each step -> refined logits, and those trained besides."""
        (blocks_RSH,), first, refine = states, rows[0], self.xpress_head
        text_RJ = torch.stack(tokens_before(batch, [first] * len(rows)), 1)
        features = refine.features(blocks_RSH)
        read = [behind_root(text_RJ)]
        if self.training:
            guesses = self.guesses(blocks_RSH[:, 1 : 1 + len(rows)], features, text_RJ[:, :1], self.options.free_rounds)
            read += [behind_root(torch.cat([text_RJ[:, :1], guess_RK[:, :-1]], 1)) for guess_RK in guesses]
        latents = [refine(features, before_RJ) for before_RJ in read]
        steps = []
        for k, at in enumerate(rows):
            own = torch.searchsorted(first, at)
            sources = (blocks_RSH[own, 1 + k], *(x_RKr[own, k] for x_RKr in latents))
            besides = self._besides if self.training else None
            steps.append(StepOutput(k, at, sources, self._refined, besides=besides, rounds=len(read) - 1))
        return steps

    @torch.no_grad()
    def guesses(self, states_RKH: Tensor, features: Tensor, root_R1: Tensor, count: int) -> list[Tensor]:
        """Return the likeliest tokens [R, K] of slots by their own logits, and by those refined once, twice, .. with the guesses before
        for the tokens before: `count` of these."""
        R, K = states_RKH.shape[:2]
        blocks = max(1, PIECE.get(root_R1.device.type, PIECE["cuda"]) // (K * self.width))
        found: list[list[Tensor]] = [[] for _ in range(count)]
        for piece in [slice(at, at + blocks) for at in range(0, max(R, 1), blocks)]:
            base_RKW, guess_RK = self.logits(states_RKH[piece]), None
            for into in found:
                logits_RKW = base_RKW
                if guess_RK is not None:
                    before_RJ = behind_root(torch.cat([root_R1[piece], guess_RK[:, :-1]], 1))
                    logits_RKW = base_RKW + self.xpress_head.w2(self.xpress_head(features[piece], before_RJ))
                guess_RK = self.target_ids(logits_RKW.argmax(-1))
                into.append(guess_RK)
        return [torch.cat(pieces) for pieces in found]

    def _refined(self, states: Tensor, latent: Tensor, *rounds: Tensor) -> Tensor:
        return self.logits(states) + self.xpress_head.w2(latent)

    def _besides(self, states: Tensor, latent: Tensor, *rounds: Tensor) -> list[Tensor]:
        base = self.logits(states)
        return [base, *(base + self.xpress_head.w2(x) for x in rounds)]


def behind_root(tokens: Tensor) -> Tensor:
    """Roots and the tokens behind them [..., K] -> the tokens before the first K + 1 slots: the root twice, as the one before it is not
    at hand in engines."""
    return torch.cat([tokens[..., :1], tokens], -1)


class XPressDrafter(BlockDrafter):
    """Drafts a chain from left to right, each token by the logits that those before it correct."""

    head: XPressHead

    def draft_block(self, state: DecodeState, states_BSH: Tensor, depth: int) -> Draft:
        """As `BlockDrafter.draft_block`."""
        head, refine = self.head, self.head.xpress_head
        base_BKW, features = head.logits(states_BSH[:, 1 : 1 + depth]), refine.features(states_BSH)
        inputs = [refine.inputs(features[:, :1], behind_root(state.root_B[:, None])[:, :1])]

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            inputs.append(refine.inputs(features[:, k + 1 : k + 2], before_B[:, None]))
            return base_BKW[:, k] + refine.w2(refine.mixed(torch.cat(inputs, 1), k + 1)[:, 0])

        return self.chain(state, depth, next_logits)


build, load = XPressHead.build, XPressHead.load
