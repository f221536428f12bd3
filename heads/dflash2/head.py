"""DFlash2: DFlash with two parts more, a convolution around each sublayer and a choice among each slot's likeliest tokens.

Chen et al., "DFlash2" (2026, inco.ai/blog/dflash2); served by vLLM's `qwen3_dflash2.py` and llama.cpp's draft-dflash.

Shapes: R rows, B rows and K tokens of a draft, H hidden, S slots, T taps, g channels of a group, V target vocab, W draft vocab, r
rank, C candidates; "..." is [R, S] or [B, S].

Blocks, slots and layers are those of DFlash (heads/block/base.py). A convolution mixes a slot with the T - 1 before it, which
never leave the block, by kernels that the sublayer's normed input decides. As both it and the attention see the whole block, a
shorter one fills its slots otherwise: a draft of K tokens is a block of K + 1 slots, and every K has a pass of its own.

The selector scores the C likeliest tokens b of a slot behind the token a: U(b) + <A[a] * P h, B[b]>, with the slot's logits U and
state h. In training a is the text's token, in drafting the one just drafted. What is drafted is drawn among the C alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.growth import start_beam
from draftsmith.errors import UserError
from draftsmith.heads.base import StepOutput
from draftsmith.heads.block.base import BlockDrafter, BlockHead, tokens_before
from draftsmith.heads.dflash2 import DFlash2Options
from draftsmith.heads.layers.decoder_layer import NormedAttention, PlainLayer
from draftsmith.heads.selector import Selector
from draftsmith.target.target import Target


class GroupedConv(nn.Module):
    """A pair of convolutions along the slots, before and behind a sublayer. Parameters are named as in the published files, and start
    as no convolution: each slot is itself.

    base_kernel: [2, T, H].
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, normed: Tensor, side: int) -> Tensor:
        """Mix x [..., H] along the slots, before (side 0) or behind (1) the sublayer, whose normed input [..., H] decides how.

        The kernels [..., T, H] are never made: each tap is base * x + delta * x, with a group's delta for all its channels.
        """
        base = self.base_kernel[side].unflatten(-1, (-1, self.group)).to(x.dtype)
        weight = self.kernel_projection.weight.unflatten(0, (2, -1))[side]
        delta = F.linear(normed, weight).unflatten(-1, (self.taps, -1, 1)).to(x.dtype)
        mixed: Tensor = _Mix.apply(x.unflatten(-1, (-1, self.group)), base, delta)  # type: ignore[no-untyped-call]
        return mixed.flatten(-2)


class _Mix(torch.autograd.Function):
    """The sum over taps of (base + delta) * the slot so far before, whose backward pass needs these three alone.

    x: [..., S, G, g] for G groups. base: [T, G, g]. delta: [..., S, T, G, 1].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
        ctx.save_for_backward(x, base, delta)
        mixed = torch.addcmul(base[0] * x, delta[..., 0, :, :], x)
        for tap in range(1, min(len(base), x.shape[-3])):
            before = x[..., :-tap, :, :]
            mixed[..., tap:, :, :] += torch.addcmul(base[tap] * before, delta[..., tap:, tap, :, :], before)
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (behind,), (x, base, delta) = gradients, ctx.saved_tensors
        x_grad, base_grad, delta_grad = behind, torch.zeros_like(base), torch.zeros_like(delta)
        for tap in range(min(len(base), x.shape[-3])):
            end = x.shape[-3] - tap
            here, before = behind[..., tap:, :, :], x[..., :end, :, :]
            own = torch.addcmul(base[tap] * here, delta[..., tap:, tap, :, :], here)
            if tap:
                x_grad[..., :end, :, :] += own
            else:
                x_grad = own
            product = here * before
            torch.sum(product.flatten(0, -3), 0, out=base_grad[tap])
            torch.sum(product, -1, keepdim=True, out=delta_grad[..., tap:, tap, :, :])
        return x_grad, base_grad, delta_grad


class ConvLayer(PlainLayer):
    """A layer of a block with convolutions around its attention and its feed-forward part."""

    def __init__(self, config: LlamaConfig, options: DFlash2Options) -> None:
        super().__init__(config, NormedAttention(config))
        shape = (config.hidden_size, options.conv_kernel_size, options.conv_group_size)
        self.attention_conv, self.mlp_conv = GroupedConv(*shape), GroupedConv(*shape)

    def layer_input(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `PlainLayer.layer_input`."""
        normed = self.input_layernorm(hidden)
        return self.attention_conv(normed, normed, 0), hidden

    def layer_output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """As `EagleLayer.layer_output`."""
        out = self.self_attn.o_proj(attended.flatten(-2))
        hidden = residual + self.attention_conv(out, self.input_layernorm(residual), 1)
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.mlp_conv(self.mlp(self.mlp_conv(normed, normed, 0)), normed, 1)


class DFlash2Head(BlockHead):
    """The DFlash2 drafter: a block of S slots drafts S - 1 tokens, each chosen among its slot's likeliest by the one before."""

    method: ClassVar[str] = "dflash2"
    options_class = DFlash2Options
    first_slot = 1
    whole = False
    options: DFlash2Options

    def __init__(self, options: DFlash2Options, config: LlamaConfig, *others: Any) -> None:
        """others: as of `BlockHead`."""
        super().__init__(options, config, *others)
        H, r = config.hidden_size, options.selector_rank
        self.candidate_selector = Selector(options.selector_top_k, config.vocab_size, self.width, H, r)
        self.window = options.sliding_window
        self.drafts = replace(self.drafts, own_pass=True)
        # A codebook has the shape of an embedding, and a kernel that of a stack of vectors.
        small = ("codebook", "base_kernel", "kernel_projection", "hidden_projection")
        outputs = frozenset({"selector"})
        self.trains = replace(self.trains, outputs=outputs, no_muon=small, no_decay=("base_kernel",))

    @classmethod
    def check(cls, options: DFlash2Options, target: Target, drafted: int) -> None:
        """As `BlockHead.check`, with groups that do not divide the target's width, and more candidates than the head can draft."""
        super().check(options, target, drafted)
        if target.hidden_size % options.conv_group_size:
            raise UserError(
                f"head.conv_group_size is {options.conv_group_size}, which does not divide the width of the target {target.path}, "
                f"{target.hidden_size}: choose a divisor."
            )
        if options.selector_top_k > drafted:
            raise UserError(
                f"head.selector_top_k is {options.selector_top_k}, but the head drafts among {drafted} tokens: choose no more than these."
            )

    def make_layer(self) -> PlainLayer:
        return ConvLayer(self.config, self.options)

    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] and rows [R_k] of each step -> logits, and what chooses among the likeliest."""
        every = self.candidate_selector.queries(torch.cat([*states]), torch.cat(tokens_before(batch, rows)))
        sources = zip(states, every.split([len(at) for at in rows]), strict=True)
        return [
            StepOutput(k, at, source, self._plain, selector=self.candidate_selector)
            for k, (at, source) in enumerate(zip(rows, sources, strict=True))
        ]

    def _plain(self, states: Tensor, query: Tensor) -> Tensor:
        return self.logits(states)


class DFlash2Drafter(BlockDrafter):
    """Drafts a chain from left to right, each token chosen, or drawn, among its slot's candidates, or a tree that grows where these are
    likely, every node's children by its own token."""

    head: DFlash2Head

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states of the slots that draft into a chain or a tree."""
        head, logits_BKW, depth = self.head, self.head.logits(states_BKH), states_BKH.shape[1]
        if self.tree is not None:
            beam = start_beam(self.tree, state.root_B, state.limit_B, run=False)
            for k in range(depth):
                beam = head.candidate_selector.extend(beam, logits_BKW[:, k], states_BKH[:, k], head.target_ids)
            return beam.draft()

        def next_logits(k: int, before_B: Tensor) -> Tensor:
            query_Br = head.candidate_selector.queries(states_BKH[:, k], before_B)
            return head.candidate_selector.chosen(logits_BKW[:, k], states_BKH[:, k], query_Br)

        return self.chain(state, depth, next_logits)


build, load = DFlash2Head.build, DFlash2Head.load
