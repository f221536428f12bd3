"""The base of block drafters: a few decoder layers that fill in a whole block of tokens in one pass.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026); served by vLLM's `qwen3_dflash.py`.

Shapes: B batch rows, L tokens, n tokens of one decoding call, R query rows (flat b*L+t), S slots of a block, H hidden
(draft and target alike), A aux layers, W draft vocab, N query heads, G key/value heads, P = N/G, D head size; "..." is
[B, n] or [R, S].

Row t has the root x_{t+1} at position a = t + 1. Its block is [x_a, MASK, .., MASK] at the positions a..a+S-1; every
slot sees the whole block (a causal one: what is before it, and itself), and the text before the root through the target's aux
streams of the positions up to t: they are fused once, and give each layer keys and values with nothing else in between. The target's own embeddings and output
projection are used, frozen. A layer is Qwen3's, with norms of queries and keys.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens
from draftsmith.decoder.sampling import SAMPLE, uniforms
from draftsmith.errors import UserError
from draftsmith.heads.base import (
    DraftHead,
    Drafts,
    HeadOutput,
    Reads,
    StepOutput,
    Trains,
    iterate_supervised_rows,
    layer_ids_of,
    shift_left,
)
from draftsmith.heads.block import BlockOptions
from draftsmith.heads.drafters import CachedDrafter
from draftsmith.heads.layers.decoder_layer import CacheUpdate, NormedAttention, PlainLayer, Rotary, rotate
from draftsmith.heads.layers.from_target import derive_layer_config, start_norm
from draftsmith.heads.layers.row_plan import RowPlan, plan_rows
from draftsmith.heads.layers.ttt_attention import ttt_attention
from draftsmith.heads.plan import Plan, plan_queries
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.target import Target, steady_positions
from draftsmith.target.tokens import choose_mask_token

_CHUNK_BLOCKS = 512
"""Blocks that are filled in together outside of training."""


class BlockHead(DraftHead):
    """A head that drafts blocks. Parameters carry the names of the published DFlash files.

    Subclasses define their options, the first slot that drafts (`first_slot`) and what the slots' states become (`outputs`).
    The target's input embedding [V, H] is shared and frozen. draft_vocab: [W] sorted target ids, or None for all. Weights
    start in fp32.
    """

    options_class: ClassVar[type[BlockOptions]]
    first_slot: int
    causal: ClassVar[bool] = False
    """Whether a slot sees no slot behind it."""
    whole: ClassVar[bool] = True
    """Whether a draft of any length fills in a whole block. False: a block as long as the draft."""

    def __init__(
        self,
        options: BlockOptions,
        config: LlamaConfig,
        target: Target,
        layer_ids: Sequence[int],
        draft_vocab: Tensor | None,
    ) -> None:
        super().__init__(draft_vocab, target.head)
        H, eps, embedding = config.hidden_size, config.rms_norm_eps, target.embedding
        assert embedding.shape == (config.vocab_size, H)
        assert options.mask_token_id is not None, "the mask token is chosen before"
        self.options, self.config, drafted = options, config, options.block_size - self.first_slot
        self.reads = Reads(tuple(layer_ids), context_length=steady_positions(config))
        self.drafts, self.trains = Drafts(drafted), Trains(drafted, blocks=True)
        self.width = config.vocab_size if draft_vocab is None else len(draft_vocab)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach(), freeze=True)
        self.fc = nn.Linear(len(layer_ids) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, eps=eps)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(options.num_layers))
        self.norm = RMSNorm(H, eps=eps)
        self.rotary_emb = Rotary(config)

    @classmethod
    def build(cls, options: BlockOptions, target: Target, draft_vocab: Tensor | None) -> Self:
        """Return an untrained fp32 head for `target`, its final norm the target's.

        draft_vocab: [W] sorted unique target ids, or None for all. Raises UserError for layers that the target does not have, a
        mask token outside its vocabulary, what `check` refuses, and dimensions that do not fit together.
        """
        layer_ids = layer_ids_of(options, target)
        target.check_layer_ids(layer_ids)
        cls.check(options, target, target.vocab_size if draft_vocab is None else len(draft_vocab))
        vocab = None if draft_vocab is None else draft_vocab.to(target.device, torch.int64)
        assert vocab is None or bool((vocab.diff() > 0).all()), "the draft vocabulary is sorted and unique"
        options = replace(options, mask_token_id=choose_mask_token(options.mask_token_id, target))
        with torch.device(target.device):
            head = cls(options, derive_layer_config(options, target), target, layer_ids, vocab)
        start_norm(head.norm, target)
        return head

    @classmethod
    def check(cls, options: Any, target: Target, drafted: int) -> None:
        """Raise UserError for options that do not fit the target, or the number of tokens that are drafted among."""
        if options.block_size > target.context_length:
            raise UserError(
                f"head.block_size is {options.block_size}, but the target {target.path} reads no more than {target.context_length} tokens: make "
                "the block shorter."
            )

    def make_layer(self) -> PlainLayer:
        """Return a new decoder layer."""
        return PlainLayer(self.config, NormedAttention(self.config))

    @property
    def least_window(self) -> int:
        """A whole block, and a token before it."""
        return self.options.block_size + 1

    def slots(self, tokens: int) -> int:
        """Return the slots of a block that drafts so many tokens."""
        return self.options.block_size if self.whole else self.first_slot + tokens

    @abstractmethod
    def outputs(self, states: Sequence[Tensor], rows: Sequence[Tensor], batch: TrainBatch) -> list[StepOutput]:
        """The states [R_k, H] of the slot that drafts at each step, and its rows [R_k] -> the steps' outputs."""

    def supervised(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Yield the rows of docs/algorithms.md, rule 1 for each step; in training those of a sample of the documents'
        tokens."""
        masks = iterate_supervised_rows(batch)
        first_BL = next(masks)
        chosen_BL = sample_rows(batch, first_BL, self.options.anchors) if self.training else first_BL
        yield chosen_BL
        for mask_BL in masks:
            yield mask_BL & chosen_BL

    @property
    def engine_tokens(self) -> int | None:
        """The length of the trained block where a head fills in whole ones: engines fill in a shorter one for fewer tokens, which it has
        never seen."""
        return self.trains.steps if self.whole else None

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: the blocks of the rows of step 0, in training all at once."""
        plan = super().plan(batch, num_steps)
        first = plan.rows[0]
        pieces = [first] if self.training else first.split(_CHUNK_BLOCKS)
        among = tuple(torch.searchsorted(first, rows) for rows in plan.rows)
        return replace(plan, queries=tuple(plan_queries(batch, rows) for rows in pieces), among=among)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_k, W] of the first `num_steps` steps (all of them, if there are fewer)."""
        plan, context = self.planned(batch, num_steps), self._context_keys(batch)
        filled_RSH = self.filled(batch, plan, context, num_steps)
        return HeadOutput(tuple(self.outputs(self.slot_states(filled_RSH, plan.among), plan.rows, batch)))

    def filled(
        self,
        batch: TrainBatch,
        plan: Plan,
        context: Sequence[tuple[Tensor, Tensor]],
        num_steps: int,
        known: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the blocks of the rows of step 0, before the final norm [R, S, H]. known: rows [R] -> how many of their slots hold the
        text's tokens [R], at least 1; None: each block's first one."""
        slots = self.slots(self.clamp_draft_length(num_steps))
        return torch.cat([self._fill(batch, queries, context, slots, known) for queries in plan.queries])

    def slot_states(self, blocks_RSH: Tensor, among: Sequence[Tensor]) -> list[Tensor]:
        """Blocks before the final norm [R, S, H], and which of them have a slot at each step [R_k] -> what `outputs` takes."""
        return [self.norm(blocks_RSH[at, self.first_slot + step]) for step, at in enumerate(among)]

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux streams [..., A*H] -> what the layers make the context's keys and values of, [..., H]."""
        return self.hidden_norm(self.fc(aux.to(self.fc.weight.dtype)))

    def block_tokens(self, root: Tensor, slots: int) -> Tensor:
        """Roots [B] -> their blocks [B, S]: the root and masks."""
        assert self.options.mask_token_id is not None
        return F.pad(root[:, None], (0, slots - 1), value=self.options.mask_token_id)

    def logits(self, states: Tensor) -> Tensor:
        """States behind the final norm [..., H] -> logits [..., W] by the target's projection."""
        return self.target_head.logits(states, self.draft_vocab)

    def read(self, aux: Tensor, rotation: tuple[Tensor, Tensor], update: CacheUpdate) -> None:
        """Store the keys and values of text that the target has read: aux streams [B, n, A*H], cosines and sines [B, n, D]
        of its positions."""
        fused = self.fuse(aux)
        for number, layer in enumerate(self._layers()):
            k, v = layer.self_attn.key_value(fused)
            update(number, rotate(k, *rotation).transpose(1, 2), v.transpose(1, 2))

    def fill(self, tokens: Tensor, rotation: tuple[Tensor, Tensor], update: CacheUpdate, mask: Tensor | None) -> Tensor:
        """One decoding call: blocks [B, S] and cosines and sines [B, S, D] of their positions -> states behind the final
        norm, [B, S, H]. mask: bool [B, 1, S, slots], True where a slot may look, None for everywhere."""
        x = self._embed(tokens)
        for number, layer in enumerate(self._layers()):
            x = layer.decode(*layer.layer_input(x), rotation, update, mask, number)
        return self.norm(x)

    def _context_keys(self, batch: TrainBatch) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's rotated keys and values of the text, [B, L, G, D]."""
        fused_BLH = self.fuse(batch.aux)
        rotation = self.rotary_emb(fused_BLH, batch.position)
        pairs = [layer.self_attn.key_value(fused_BLH) for layer in self._layers()]
        return [(rotate(k, *rotation), v) for k, v in pairs]

    def _fill(
        self,
        batch: TrainBatch,
        plan: RowPlan,
        context: Sequence[tuple[Tensor, Tensor]],
        slots: int,
        known: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the states [R, S, H] of the blocks of the query rows, before the final norm. known: see `filled`."""
        S, rows = slots, plan.rows
        root_R, *others = tokens_before(batch, [rows] * (1 if known is None else S))
        tokens_RS = self.block_tokens(root_R, S)
        if known is not None:
            text_RS = torch.stack([root_R, *others], 1)
            shown_RS = torch.arange(S, device=rows.device) < known(rows)[:, None]
            tokens_RS = torch.where(shown_RS, text_RS, tokens_RS)
        x_RSH = self._embed(tokens_RS)
        position_RS = batch.position.flatten()[rows][:, None] + torch.arange(1, S + 1, device=rows.device)
        rotation = self.rotary_emb(x_RSH, position_RS)
        for layer, (k_BLGD, v_BLGD) in zip(self._layers(), context, strict=True):
            attention, (y_RSH, residual_RSH) = layer.self_attn, layer.layer_input(x_RSH)
            q_RSND = rotate(attention.query(y_RSH), *rotation)
            k_RSGD, v_RSGD = attention.key_value(y_RSH)
            own_k, own_v = (x.transpose(0, 1) for x in (rotate(k_RSGD, *rotation), v_RSGD))
            attend = partial(ttt_attention, k_BLGD=k_BLGD, v_BLGD=v_BLGD)
            x_RSH = layer.layer_output(self._attend(attend, q_RSND, own_k, own_v, plan), residual_RSH)
        return x_RSH

    def _attend(
        self, attend: Callable[..., Tensor], q_RSND: Tensor, k_SRGD: Tensor, v_SRGD: Tensor, plan: RowPlan
    ) -> Tensor:
        """Return the attention [R, S, N, D] of the slots, whose keys and values are given; `attend` knows the text's."""
        S, G, scale = q_RSND.shape[1], self.config.num_key_value_heads, self.config.head_dim**-0.5
        if self.window is None and not self.causal:
            # Each slot is a further query head of its row, and the block's keys are the row's own.
            heads = q_RSND.unflatten(2, (G, -1)).transpose(1, 2).flatten(1, 3)
            out = attend(heads, own_k=(k_SRGD,), own_v=(v_SRGD,), plan=plan, scale=scale)
            return out.unflatten(1, (G, S, -1)).transpose(1, 2).flatten(2, 3)
        slots = []
        for i in range(S):
            seen = slice(i + 1 if self.causal else S)
            # Slot i is i + 1 positions behind the row, and sees so many tokens less of the text.
            text = plan if self.window is None else plan.within(self.window - 1 - i)
            slots.append(attend(q_RSND[:, i], own_k=(k_SRGD[seen],), own_v=(v_SRGD[seen],), plan=text, scale=scale))
        return torch.stack(slots, 1)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens).to(self.fc.weight.dtype)

    def _layers(self) -> Iterator[PlainLayer]:
        for layer in self.layers:
            assert isinstance(layer, PlainLayer)
            yield layer


class BlockDrafter(CachedDrafter):
    """Fills in a block per round, of which at most `num_speculative_tokens` are proposed; subclasses draft from the states of its
    slots. fill: in a round, tokens of a block [B, S] -> their states behind the final norm [B, S, H]."""

    fill: Callable[[Tensor], Tensor]

    def most_entries(self) -> int:
        """Return the size of a block."""
        return self.head.slots(self.num_speculative_tokens)

    def run(self, new_tokens: NewTokens) -> None:
        self.head.read(new_tokens.aux_BnF, self.cache.rotation(), self.cache.write)

    def make(self, state: DecodeState) -> Draft:
        """Append the new tokens, fill in a block, and propose at most as many of its tokens as a row may still emit."""
        head, cache, size, rows = self.head, self.cache, self.head.slots(self.num_speculative_tokens), len(state.root_B)
        self.read(state.new_tokens, state.length_B, state.longest_before)
        single = cache.stage(size, longest=state.longest).single
        if head.causal:
            mask = cache.chain_mask()
        elif single and cache.window is None:
            mask = None  # a single row's block sees every slot in use
        else:
            mask = cache.tree_mask(state.root_B.new_ones((rows, size, size), dtype=torch.bool), range(size))
        self.fill = partial(head.fill, rotation=cache.rotation(), update=cache.write, mask=mask)
        states_BSH = self.fill(head.block_tokens(state.root_B, size))
        return self.draft_block(state, states_BSH, min(self.num_speculative_tokens, state.tokens_left))

    def draft_block(self, state: DecodeState, states_BSH: Tensor, depth: int) -> Draft:
        """Turn the states [B, S, H] of whole blocks into drafts of so many tokens."""
        return self.draft(state, states_BSH[:, self.head.first_slot : self.head.first_slot + depth])

    def draft(self, state: DecodeState, states_BKH: Tensor) -> Draft:
        """Turn the states [B, K, H] of the slots that draft into a draft of K tokens."""
        raise NotImplementedError


Head = TypeVar("Head", bound=BlockHead)


def tokens_before(batch: TrainBatch, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return of rows [R_k] of each step the text's token [R_k] before the one that is drafted, that of step 0 the root."""
    return [shift_left(batch.ids, 1 + k, 0).flatten()[at] for k, at in enumerate(rows)]


def sample_rows(batch: TrainBatch, rows_BL: Tensor, count: int) -> Tensor:
    """Return [B, L] bool: `count` of each document's marked rows (all of them, if there are fewer), drawn by the seed of
    the document and the position of the row alone."""
    plan = plan_rows(batch.document, rows_BL)
    seeds_R, position_R = (x.flatten()[plan.rows] for x in (batch.seeds, batch.position))
    rank_R = plan.ranks(uniforms(seeds_R, position_R, SAMPLE, 1)[:, 0])
    return torch.zeros_like(rows_BL).flatten().index_fill(0, plan.rows[rank_R < count], True).view_as(rows_BL)
