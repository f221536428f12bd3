"""What drafters with a head share: chains, static trees, and the cache of a head's own layers.

`draft_chain`, `draft_tree` and `draft_best` take the logits of all depths at once, for heads whose distribution depends on the depth alone.
`grow_tree` drafts level by level, for heads whose distribution depends on the tokens before. A `CachedDrafter` runs and appends a
round's new tokens; what its draft writes behind them is never kept: the next round overwrites it.

Shapes: B rows, b some of these rows, K drafted tokens, N nodes, n nodes of one level (or new tokens), m of them with children (or
entries that are run), T nodes with children (or entries behind the cached ones), M nodes up to the last of these, C children of a
node, X the width of what a node is drafted from, W draft vocab, S slots, D head size, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.cache import BUCKET, KVCache, build_mask, llama_layer_shapes, place_mask, with_room
from draftsmith.decoder.captured import make_draft
from draftsmith.decoder.draft import (
    DecodeState,
    Draft,
    LengthRule,
    NewTokens,
    Prompts,
    StatelessDrafter,
    chain_above,
    listed,
    numbers,
)
from draftsmith.decoder.graphs import Graphs
from draftsmith.decoder.growth import Level, chain_token_by_token, child_uniforms, growth, start_beam
from draftsmith.decoder.sampling import DRAFT, draw, draw_children, probs
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.base import DraftHead


def draft_chain(
    state: DecodeState, logits_BKW: Tensor, head: DraftHead, *, greedy: bool, rule: LengthRule | None = None
) -> Draft:
    """Return a chain of K tokens: drawn under the target's sampling settings, or (greedy) the most likely ones; of fewer by a rule."""
    drafted_B = state.limit_B.clamp(0, logits_BKW.shape[1])
    if rule is not None:
        drafted_B = torch.minimum(drafted_B, rule.length(logits_BKW))
        logits_BKW = logits_BKW[:, : int(drafted_B.max())]
    if greedy or state.sampling.greedy or not logits_BKW.shape[1]:
        return Draft.chain(state.root_B, head.target_ids(logits_BKW.argmax(-1)), drafted_B)
    draft_probs_BKW = probs(logits_BKW, state.sampling)
    uniform_BK = state.noise.draw(DRAFT, logits_BKW.shape[1])
    drawn_BK = draw(draft_probs_BKW.flatten(0, 1), uniform_BK.flatten()).view_as(uniform_BK)
    return Draft.chain(state.root_B, head.target_ids(drawn_BK), drafted_B, draft_probs_BKW, head.draft_vocab)


def draft_tree(state: DecodeState, logits_BKW: Tensor, head: DraftHead, whole: StaticTree, *, drawn: bool) -> Draft:
    """Return a static tree, no deeper than K, of each depth's most likely tokens.

    whole: the uncut tree; each node's random number goes by its place there, so cutting changes no draw. drawn: each node's children are drawn
    from the depth's distribution instead, without replacement.
    """
    tree = whole.cut(logits_BKW.shape[1])
    shape = tree.on(logits_BKW.device)
    if drawn and not state.sampling.greedy:
        plan = growth(tree, logits_BKW.device)
        inner_BTW = probs(logits_BKW, state.sampling)[:, shape.depth_N[plan.inner_T]]
        child_BTC = draw_children(inner_BTW, child_uniforms(state, whole, plan.inner_T))
        first, drafted = 0, []
        for level in plan.levels:
            drafted.append(child_BTC[:, first + level.parent_n, level.sibling_n])
            first += level.above
        tokens_BN = head.target_ids(torch.cat(drafted, 1))
        draft = Draft.static(state.root_B, tokens_BN, tree, state.limit_B)
        return replace(draft, draft_probs_BMW=inner_BTW[:, plan.probs_M], vocab_W=head.draft_vocab)
    best_BKR = logits_BKW.topk(min(tree.ranks, logits_BKW.shape[-1]), -1).indices
    chosen_BN = best_BKR[:, shape.depth_N[1:] - 1, shape.rank_N[1:]]
    return Draft.static(state.root_B, head.target_ids(chosen_BN), tree, state.limit_B)


def grow_tree(
    state: DecodeState,
    root_BX: Tensor,
    head: DraftHead,
    whole: StaticTree,
    depth: int,
    logits: Callable[[int, Tensor], Tensor],
    run: Callable[[int, Level, Tensor, Tensor], Tensor],
    *,
    drawn: bool,
) -> Draft:
    """Return a static tree, drafted level by level; only nodes with children are run.

    root_BX: what the first level is drafted from. whole: the tree, which is cut to `depth`, as in `draft_tree`. logits(step, x_BmX):
    [B, m, W] of the nodes' children. run(step, level, x_BmX, tokens_Bm): the same for the children that have children themselves,
    whose tokens are given.
    """
    tree = whole.cut(depth)
    plan = growth(tree, root_BX.device)
    drawn = drawn and not state.sampling.greedy
    x_BmX, done = root_BX[:, None], 0
    tokens: list[Tensor] = []
    draft_probs: list[Tensor] = []
    for step, level in enumerate(plan.levels):
        logits_BmW = logits(step, x_BmX)
        if drawn:
            draft_probs.append(probs(logits_BmW, state.sampling))
            uniform_BmC = child_uniforms(state, whole, plan.inner_T[done : done + level.above])
            choice_Bn = draw_children(draft_probs[-1], uniform_BmC)[:, level.parent_n, level.sibling_n]
        else:
            best_BmR = logits_BmW.topk(min(plan.ranks, logits_BmW.shape[-1]), -1).indices
            choice_Bn = best_BmR[:, level.parent_n, level.rank_n]
        tokens.append(head.target_ids(choice_Bn))
        done += level.above
        if len(level.inner_m):
            x_BmX = run(step, level, x_BmX, tokens[-1][:, level.inner_m])
    draft = Draft.static(state.root_B, torch.cat(tokens, 1), tree, state.limit_B)
    if not drawn:
        return draft
    return replace(draft, draft_probs_BMW=torch.cat(draft_probs, 1)[:, plan.probs_M], vocab_W=head.draft_vocab)


class HeadDrafter(StatelessDrafter):
    """The base of drafters of chains and trees. One that keeps something between rounds overrides `start`, `admit` and `select`.

    Args:
        head: the head that drafts.
        num_speculative_tokens: length of a chain, and the most that a tree is deep.
        tree: None for chains.
        drawn: a static tree's tokens are drawn without replacement instead of being the most likely ones.
        greedy_drafts: a chain of argmaxes at every temperature, as vLLM drafts.
        rule: a chain ends where it says; None for chains of one length.
    """

    name = ""
    """In results; "" stands for the name of the head's method."""
    cache: Any = None
    """The `LayerCache` of the batch at work; None for a head without layers."""
    _graphs: Graphs | None = None
    """Of the drafts of so many rows."""
    _rows = 0

    def __init__(
        self,
        head: DraftHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | DynamicTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
        rule: LengthRule | None = None,
    ) -> None:
        most = head.drafts.max_speculative_tokens
        assert not drawn or isinstance(tree, StaticTree)
        assert num_speculative_tokens >= 1
        assert most is None or num_speculative_tokens <= most
        assert tree is None or (rule is None and tree.depth <= num_speculative_tokens)
        self.head: Any = head.eval()
        self.name, self.layer_ids = self.name or head.method, head.reads.layer_ids
        self.num_speculative_tokens = num_speculative_tokens if tree is None else tree.depth
        self.tree: Any = tree
        self.max_nodes = 1 + num_speculative_tokens if tree is None else tree.max_nodes
        self.drawn, self.greedy_drafts, self.rule = drawn, greedy_drafts, rule

    def chain(
        self,
        state: DecodeState,
        depth: int,
        next_logits: Callable[[int, Tensor], Tensor],
        chance: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Draft:
        """Return a chain of so many tokens, see `chain_token_by_token`."""
        return chain_token_by_token(
            state,
            depth,
            next_logits,
            greedy=self.greedy_drafts,
            vocab_W=self.head.draft_vocab,
            rule=self.rule,
            chance=chance,
        )

    def most_entries(self) -> int:
        """Return the most entries behind the cached ones that a round writes and does not keep, less one."""
        return self.num_speculative_tokens

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch; on a GPU the graphs of the last one stay where they can."""
        if rows != self._rows or self._graphs is None:
            like = next(self.head.parameters())
            self._graphs = Graphs(
                like.device, like.dtype, "drafts", rows * self.max_nodes, captures=self.captures, exact=False
            )
        self._rows = rows

    @property
    def captures(self) -> bool:
        """Whether drafts can be CUDA graphs: not where a rule asks the device whether to go on, nor where rotary frequencies depend on
        the longest text."""
        return self.rule is None and (self.cache is None or self.cache.steady)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the new tokens, then draft at most as many tokens as a row may still emit."""
        if self._graphs is None:
            return self.make(state)
        depth = min(self.num_speculative_tokens, state.tokens_left)
        return make_draft(self._graphs, self.make, state, self.cache, depth, self.most_entries() + 1)

    def make(self, state: DecodeState) -> Draft:
        """Return the draft. It runs as a graph, see `make_draft`: what the host knows of the texts must not decide anything."""
        raise NotImplementedError

    def draft_all(self, state: DecodeState, logits_BKW: Tensor) -> Draft:
        """Return the draft of K tokens, or a tree no deeper, from the logits of all depths at once."""
        if isinstance(self.tree, DynamicTree):
            beam = start_beam(self.tree, state.root_B, state.limit_B, run=False)
            for logits_BW in logits_BKW.unbind(1):
                beam = beam.extend(logits_BW[:, None], self.head.target_ids)
            return beam.draft()
        if self.tree is not None:
            return draft_tree(state, logits_BKW, self.head, self.tree, drawn=self.drawn)
        return draft_chain(state, logits_BKW, self.head, greedy=self.greedy_drafts, rule=self.rule)


class LayerCache(KVCache):
    """Keys and values of the layers of `module`, which also has their `config` and `rotary_emb`, for the sequences of a batch.

    What they cache is what `cached_shapes` of the module says, or without it what Llama layers of `config` do.

    window: how many tokens an entry sees, itself the last of them; None for all.
    """

    def __init__(self, module: Any, rows: int, capacity: int, window: int | None = None) -> None:
        self.rotary, self.like, self.window = module.rotary_emb, module.layers[0].self_attn.o_proj.weight, window
        shapes = getattr(module, "cached_shapes", None)
        shapes = shapes or llama_layer_shapes(module.config, len(module.layers), self.like.dtype)
        self.bucket = BUCKET if self.like.is_cuda else 1
        with torch.inference_mode(False):  # so that a graph may write to it
            super().__init__(shapes, rows, with_room(capacity, rows, self.like.device), self.like.device)
            self._table = self.rotary.table(self.capacity, self.like)

    @property
    def steady(self) -> bool:
        """Whether no rotation depends on the longest text."""
        return self._table is not None

    def rotation(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, m, D] of the staged entries as a chain behind the cached ones."""
        at = self.staged
        return self._rotation(at.lengths_B, at.longest, at.count)

    def rotations_apart(self, count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines [B, 1, D] of each of the next `count` positions. longest: see `KVCache.stage`."""
        if self._table is None:  # where they depend on the longest position of a call
            return [self._rotation(self.lengths_B + k, longest + k, 1) for k in range(count)]
        cos, sin = self._rotation(self.lengths_B, longest, count)
        return list(zip(cos.split(1, 1), sin.split(1, 1), strict=True))

    def _rotation(self, base_B: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """first: where a single row begins, whose positions are then one slice."""
        if self._table is not None and len(base_B) == 1 and self.bucket == 1:
            return self._table[0][None, first : first + count], self._table[1][None, first : first + count]
        position_Bm = base_B[:, None] + numbers(0, count, base_B.device)
        if self._table is None:
            return self.rotary(self.like, position_Bm)
        return self._table[0][position_Bm], self._table[1][position_Bm]

    def chain_mask(self) -> Tensor | None:
        """Return the mask of the staged entries as a chain behind the cached ones; None where one entry sees every slot."""
        at = self.staged
        if at.count == 1 and at.single and self.window is None:
            return None
        above_BTT = chain_above(at.count, at.lengths_B.device).expand(len(at.lengths_B), -1, -1)
        return self.tree_mask(above_BTT, range(at.count))

    def tree_mask(self, above_BmT: Tensor, depths: Sequence[int]) -> Tensor:
        """Return the mask of the staged entries, bool [B, 1, m, S], where each sees the cached ones and those of `above_BmT`.

        depths: the T entries' distances from the first position behind the cached ones.
        """
        at, depth_BT = self.staged, None
        if self.window is not None:
            depth_BT = listed(tuple(depths), at.lengths_B.device).expand(len(above_BmT), -1)
        build = build_mask if at.bucket == 1 else place_mask
        return build(at.lengths_B, above_BmT, at.visible, depth_BT, self.window)


class CachedDrafter(HeadDrafter):
    """The base of drafters whose head has layers of its own; subclasses run them over new tokens (`run`)."""

    @property
    def layered(self) -> Any:
        """The module with the layers, None for a head without any."""
        return self.head

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the cache."""
        if self.layered is not None:
            slots = capacity + self.most_entries() + 1
            if self.cache is None or not self.cache.restarted(rows, slots):
                self.cache = self._graphs = None  # before the next one is allocated
                self.cache = LayerCache(self.layered, rows, slots, self.head.window)
        super().start(rows, capacity)

    def select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(rows)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Run new prompts; the next proposal runs their last token again, to draft from it."""
        if self.cache is not None and prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self.read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    def read(
        self, new_tokens: NewTokens, length_B: Tensor, longest: int, rows_b: Tensor | None = None, more: int = 0
    ) -> Any:
        """Run new tokens, the last of which make a row `length_B` long, and append them; return what `run` returns.

        longest: an upper bound of where a row's new tokens begin, exact for a single row. rows_b: the rows that are read, None
        for all. more: entries behind the new tokens that are run and not kept.
        """
        self.cache.rollback(length_B - new_tokens.count_B, rows_b)
        self.cache.stage(new_tokens.tokens_Bn.shape[1] + more, longest, rows_b)
        outputs = self.run(new_tokens)
        self.cache.append(new_tokens.count_B, rows_b)
        return outputs

    def read_last(self, state: DecodeState) -> Tensor:
        """Run and append this round's new tokens; return the output [B, H] at each row's last one."""
        out_BnH = self.read(state.new_tokens, state.length_B, state.longest_before)
        return out_BnH[:, -1] if len(out_BnH) == 1 else state.new_tokens.at_last(out_BnH)

    def run(self, new_tokens: NewTokens) -> Tensor | None:
        """Run the head's layers over new tokens [B, n], which fill the cache's staged entries; return their outputs [B, n, H],
        or None where no draft is made of these."""
        raise NotImplementedError
