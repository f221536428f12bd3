"""Hydra: heads like Medusa's that also see the tokens drafted before theirs; with a prefix layer, Hydra++.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), sections 3 and 4.

Shapes: B batch rows, L tokens, n new tokens and m nodes of one decoding call, R needed rows (flat b*L+t), H target hidden, V target vocab;
C the width of what a head reads, (i + 2) * H for head i.

Row t has the target's post-final-norm state y_t (or what the prefix layer makes of the states up to it) and the token
x_{t+1} that the target itself gives. Head i reads [y_t, e(x_{t+1}), e(x_{t+2}), .., e(x_{t+1+i})], e being the target's
input embedding, and predicts x_{t+2+i}: in training these tokens are the text's, in drafting the root and the draft so far.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens
from draftsmith.decoder.growth import Level
from draftsmith.decoder.sampling import DROP, kept
from draftsmith.errors import UserError
from draftsmith.heads.base import (
    Drafts,
    HeadOutput,
    StepOutput,
    Trains,
    shift_left,
)
from draftsmith.heads.drafters import CachedDrafter, grow_tree
from draftsmith.heads.hydra import HydraOptions
from draftsmith.heads.layers.decoder_layer import CacheUpdate, PlainLayer, Rotary
from draftsmith.heads.layers.from_target import derive_layer_config, embedding_scale, sizes
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.layers.training_pass import LayerInput, TrainingPass
from draftsmith.heads.medusa.head import ResBlock
from draftsmith.heads.plan import Plan, plan_queries
from draftsmith.heads.scaled import ScaledHead
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.target import Target, TargetHead


class Projection(nn.Linear):
    """A head's own way to logits: weight [V, H], None where the target's is used, and bias [V] or None."""

    def __init__(self, vocab_size: int, hidden_size: int, *, shared: bool, bias: bool) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias)
        if bias:
            nn.init.zeros_(self.bias)
        if shared:
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Draw nothing: the weight is filled in."""

    def of(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """[..., H] -> [..., V]."""
        if self.weight is not None:
            return self(state)
        logits = target_head.logits(state)
        return logits if self.bias is None else logits + self.bias


class PrefixLayer(nn.Module):
    """Hydra++'s prefix layer: a Llama model of one layer without embeddings, over the target's last states. Parameters: `layers.0.*`
    and `norm.weight`.

    The state of position t sees those of its own document up to t, which the target has all computed: nothing that is drafted
    passes through here.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([PlainLayer(config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Rotary(config)

    @torch.no_grad()
    def start(self, size: float) -> None:
        """Let a new layer give its states back, but for their norm: the layer adds nothing at first, and its outputs
        have the root mean square `size`, that of the target's states."""
        for last in (self._layer.self_attn.o_proj, self._layer.mlp.down_proj):
            nn.init.zeros_(last.weight)
        nn.init.constant_(self.norm.weight, size)

    def rows(self, batch: TrainBatch, plan: RowPlan, window: int | None = None) -> Tensor:
        """Return the outputs [R, H] of the query rows, each having seen its document up to itself, or the last `window` tokens of it."""
        last_TH = batch.last.flatten(0, 1).to(self._layer.self_attn.q_proj.weight.dtype)
        given = LayerInput(*self._layer.layer_input(last_TH))
        passing = TrainingPass(self._layer, (), self.rotary_emb, batch.position, plan, 1, window)
        passing.context_keys(given)
        return self.norm(passing.first(given.select(plan.rows)))

    def step(
        self, last_BnH: Tensor, rotation: tuple[Tensor, Tensor], update: CacheUpdate, mask: Tensor | None
    ) -> Tensor:
        """Return the outputs [B, n, H] of new states; see `EagleLayer.decode`."""
        last_BnH = last_BnH.to(self._layer.self_attn.q_proj.weight.dtype)
        return self.norm(self._layer.decode(*self._layer.layer_input(last_BnH), rotation, update, mask))

    @property
    def _layer(self) -> PlainLayer:
        layer = self.layers[0]
        assert isinstance(layer, PlainLayer)
        return layer


class Dropper:
    """Dropout for rows of training documents, drawn from their seeds: the same however documents are packed.

    keys_R, counter_R: seed and position of each row. number: the head's, whose draws are its own.
    """

    def __init__(self, rate: float, keys_R: Tensor, counter_R: Tensor, number: int) -> None:
        self.rate, self.keys_R, self.counter_R, self.number, self.used = rate, keys_R, counter_R, number, 0

    def __call__(self, x: Tensor) -> Tensor:
        """[R, width] -> the same, dropped and scaled; no two calls draw the same."""
        width = x.shape[-1]
        keys_R, counter_R = self.keys_R.to(x.device), self.counter_R.to(x.device)
        stay = kept(keys_R, counter_R, (self.number << 8) + DROP, self.used, width, self.rate)
        self.used += width + -width % 4
        return x.masked_fill(~stay, 0.0) / (1 - self.rate)


class HydraHead(ScaledHead):
    """Hydra's heads. Parameters are named as in the published files as far as their order allows:
    `hydra_mlp.{i}.{j}.{linear,res_connection}.{weight,bias}`, `hydra_lm_head.{i}.{weight,bias}`,
    `prefix_embedding_layer.{layers.0.*,norm.weight}`.

    The target's input embedding [V, H] is shared and frozen. config: of the prefix layer, None without one. Weights start in
    fp32.
    """

    method: ClassVar[str] = "hydra"
    options_class = HydraOptions
    needs_layers = False

    def __init__(self, options: HydraOptions, config: LlamaConfig | None, target: Target, *_: object) -> None:
        super().__init__(target_head=target.head)
        V, H = target.head.weight.shape
        self.options, self.config = options, config
        self.drafts = Drafts(options.num_heads)
        self.trains = Trains(options.num_heads, measured_on_target=("embedding_scale",))
        self.hidden_size, self.vocab_size = H, V
        self.embed_tokens = nn.Embedding.from_pretrained(target.embedding.detach(), freeze=True)
        self.prefix_embedding_layer = None if config is None else PrefixLayer(config)
        later = min(options.num_layers - 1, 1) if options.tie_blocks else options.num_layers - 1
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList([ResBlock((i + 2) * H, H), *(ResBlock(H, H) for _ in range(later))])
            for i in range(options.num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(
            Projection(V, H, shared=options.original_lm_head, bias=options.lm_head_bias)
            for _ in range(options.num_heads)
        )

    @property
    def least_window(self) -> int | None:
        """The token whose state the prefix layer reads."""
        return None if self.prefix_embedding_layer is None else 1

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: a row that counts for a head counts for those before it, whose rows are all that is needed."""
        plan = super().plan(batch, num_steps)
        before = (plan.rows[0], *plan.rows)
        among = tuple(torch.searchsorted(others, rows) for others, rows in zip(before, plan.rows, strict=False))
        queries = () if self.prefix_embedding_layer is None else (plan_queries(batch, plan.rows[0]),)
        return replace(plan, queries=queries, among=among)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_i, V] of the first `num_steps` heads (all of them, if there are fewer)."""
        plan, dropped = self.planned(batch, num_steps), self.training and self.options.dropout > 0
        if self.prefix_embedding_layer is None:
            path_RC = batch.last.flatten(0, 1)[plan.rows[0]].to(self.dtype)
        else:
            path_RC = self.prefix_embedding_layer.rows(batch, plan.queries[0], self.window)
        steps = []
        seeds, position = batch.seeds.flatten(), batch.position.flatten()
        for i, (rows, still) in enumerate(zip(plan.rows, plan.among, strict=True)):
            path_RC = self.extend(path_RC[still], shift_left(batch.ids, 1 + i, 0).flatten()[rows])
            drop = Dropper(self.options.dropout, seeds[rows], position[rows], i) if dropped else None
            steps.append(StepOutput(i, rows, self.state(i, path_RC, drop), self.projection(i)))
        return HeadOutput(tuple(steps))

    def extend(self, path: Tensor, tokens: Tensor) -> Tensor:
        """What head i - 1 read [..., C] and the next token [...] -> what head i reads [..., C + H]; head 0's is made of a
        state and the root."""
        return torch.cat([path, self.embed_tokens(tokens).to(path.dtype) * self.embedding_scale], -1)

    def logits(self, head: int, path: Tensor) -> Tensor:
        """What head number `head` reads [..., C] -> draft logits [..., V]."""
        return self.projection(head)(self.state(head, path))

    def state(self, head: int, path: Tensor, drop: Dropper | None = None) -> Tensor:
        """What head number `head` reads [..., C] -> what its projection reads, [..., H]. drop: dropout in training."""
        blocks = self.blocks(head)
        for j in range(self.options.num_layers):  # of tied blocks the last one again and again
            block = blocks[min(j, len(blocks) - 1)]
            path = block(path if drop is None else drop(path))
        return path if drop is None else drop(path)

    def projection(self, head: int) -> Callable[[Tensor], Tensor]:
        """Return what makes logits [..., V] of the state of head number `head`."""
        projection = self.hydra_lm_head[head]
        assert isinstance(projection, Projection)
        return partial(projection.of, target_head=self.target_head)

    def blocks(self, head: int) -> list[ResBlock]:
        """Return the blocks of a head that have weights of their own."""
        return [block for block in self.hydra_mlp[head].children() if isinstance(block, ResBlock)]

    @property
    def dtype(self) -> torch.dtype:
        """That of the trained weights; the target's embedding may have another."""
        return self.blocks(0)[0].linear.weight.dtype


class HydraDrafter(CachedDrafter):
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head given the path to them, or (drawn) of tokens sampled from it without replacement.

    The heads keep nothing between two rounds. The prefix layer's cache is of states that the target has computed, so no draft
    ever enters it.
    """

    head: HydraHead

    @property
    def layered(self) -> PrefixLayer | None:
        """The prefix layer, if there is one."""
        return self.head.prefix_embedding_layer

    def run(self, new_tokens: NewTokens) -> Tensor:
        cache, prefix = self.cache, self.layered
        assert prefix is not None
        return prefix.step(new_tokens.last_BnD, cache.rotation(), cache.write, cache.chain_mask())

    def make(self, state: DecodeState) -> Draft:
        """Run the new states, then draft at most as many tokens as a row may still emit."""
        depth, new_tokens = min(self.num_speculative_tokens, state.tokens_left), state.new_tokens
        layered = self.cache is not None
        path_BC = self.read_last(state) if layered else new_tokens.at_last(new_tokens.last_BnD).to(self.head.dtype)
        if self.tree is None:
            return self._chain(state, path_BC, depth)
        path_BC = self.head.extend(path_BC, state.root_B)
        return grow_tree(state, path_BC, self.head, self.tree, depth, self.head.logits, self._extend, drawn=self.drawn)

    def _chain(self, state: DecodeState, path_BC: Tensor, depth: int) -> Draft:
        def next_logits(k: int, tokens_B: Tensor) -> Tensor:
            nonlocal path_BC
            path_BC = self.head.extend(path_BC, tokens_B)
            return self.head.logits(k, path_BC)

        return self.chain(state, depth, next_logits)

    def _extend(self, step: int, level: Level, path_BmC: Tensor, tokens_Bm: Tensor) -> Tensor:
        return self.head.extend(path_BmC[:, level.parent_n[level.inner_m]], tokens_Bm)


def build(options: HydraOptions, target: Target, draft_vocab: Tensor | None) -> HydraHead:
    """Return untrained fp32 heads for `target`, their projections those of the target. Raises UserError where the target
    has no embeddings of the width of its states, or the sizes of the prefix layer do not fit together."""
    assert draft_vocab is None, "Hydra predicts the whole vocabulary"
    if target.embedding.shape[1] != target.hidden_size:
        raise UserError(
            f"The target {target.path} has input embeddings of width {target.embedding.shape[1]}, but {target.hidden_size} "
            "hidden units: Hydra reads both side by side and needs the same; choose another target."
        )
    config, scale = derive_layer_config(options, target) if options.prefix_attention else None, embedding_scale(target)
    with torch.device(target.device):
        head = HydraHead(options, config, target)
        head.embedding_scale = scale
        if head.prefix_embedding_layer is not None:
            head.prefix_embedding_layer.start(float(sizes(target)[0]))
        for projection in head.hydra_lm_head:
            assert isinstance(projection, Projection)
            if projection.weight is not None:
                projection.weight = nn.Parameter(target.head.weight.detach().float() * target.head.scale)
                if projection.bias is not None and target.head.bias is not None:
                    projection.bias.data.copy_(target.head.bias * target.head.scale)
    return head


load = HydraHead.load
