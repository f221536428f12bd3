"""Draft with Hydra's heads: each head reads the path of draft tokens that leads to it.

The heads keep nothing between two rounds. The prefix layer of Hydra++ has a KV cache of committed tokens, to which
every proposal appends the new ones.

Shapes: B rows, m nodes of one level with children, K drafted tokens, H target hidden, V target vocab; C the width of
what a head reads.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decode.draft import DecodeState, Draft, NewTokens, Prompts, numbers
from draftsmith.eval.decode.growth import child_uniforms, growth
from draftsmith.eval.decode.noise import DRAFT, uniforms
from draftsmith.eval.decode.sampling import draw, draw_children, probs
from draftsmith.eval.decode.trees import StaticTree
from draftsmith.heads.hydra.head import HydraHead
from draftsmith.heads.hydra.prefix_layer import PrefixCache
from draftsmith.heads.static_drafts import StaticDrafter


class HydraDrafter(StaticDrafter):
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head given the path to them, or (drawn) of tokens sampled from it without replacement."""

    name = "hydra"
    head: HydraHead

    def __init__(self, head: HydraHead, num_speculative_tokens: int, **shape: Any) -> None:
        super().__init__(head, num_speculative_tokens, **shape)
        self._cache: PrefixCache | None = None

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the prefix layer's cache, if there is one."""
        prefix = self.head.prefix_embedding_layer
        self._cache = None if prefix is None else PrefixCache(prefix, rows, capacity, self.num_speculative_tokens + 1)

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Run new prompts through the prefix layer; the next proposal runs their last state again, to draft from it."""
        if self._cache is not None and prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self._cache.read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        if self._cache is not None:
            self._cache.select(rows)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Run the new states, then draft at most as many tokens as a row may still emit."""
        depth = self.num_speculative_tokens if self.tree is None else self.tree.depth
        depth = min(depth, state.tokens_left)
        path_BC = self.head.extend(self._state(state), state.root_B)
        return self._chain(state, path_BC, depth) if self.tree is None else self._tree(state, path_BC, self.tree, depth)

    def _state(self, state: DecodeState) -> Tensor:
        """Return [B, H]: what the heads read of the text before the root."""
        if self._cache is None:
            return _last(state.new_tokens).to(self.head.dtype)
        return self._cache.read(state.new_tokens, state.length_B, state.longest_before)

    def _chain(self, state: DecodeState, path_BC: Tensor, depth: int) -> Draft:
        greedy = self.greedy_drafts or state.sampling.greedy
        uniform_BK = None if greedy else uniforms(state.keys_B, state.length_B, DRAFT, depth)
        tokens: list[Tensor] = []
        draft_probs: list[Tensor] = []
        for k in range(depth):
            path_BC = self.head.extend(path_BC, tokens[-1]) if k else path_BC
            logits_BV = self.head.logits(k, path_BC)
            if uniform_BK is None:
                tokens.append(logits_BV.argmax(-1))
            else:
                draft_probs.append(probs(logits_BV, state.sampling))
                tokens.append(draw(draft_probs[-1], uniform_BK[:, k]))
        count_B = state.limit_B.clamp(0, depth)
        return Draft.chain(
            state.root_B, torch.stack(tokens, 1), count_B, torch.stack(draft_probs, 1) if draft_probs else None
        )

    def _tree(self, state: DecodeState, path_BC: Tensor, whole: StaticTree, depth: int) -> Draft:
        """Draft level by level down to `depth`; only nodes with children are run."""
        tree = whole.cut(depth)
        plan = growth(tree, path_BC.device)
        drawn = self.drawn and not state.sampling.greedy
        path_BmC, done = path_BC[:, None], 0
        tokens: list[Tensor] = []
        draft_probs: list[Tensor] = []
        for step, level in enumerate(plan.levels):
            logits_BmV = self.head.logits(step, path_BmC)
            if drawn:
                draft_probs.append(probs(logits_BmV, state.sampling))
                uniform_BmC = child_uniforms(state, whole, plan.inner_T[done : done + level.above])
                choice_Bn = draw_children(draft_probs[-1], uniform_BmC)[:, level.parent_n, level.sibling_n]
            else:
                best_BmR = logits_BmV.topk(min(plan.ranks, logits_BmV.shape[-1]), -1).indices
                choice_Bn = best_BmR[:, level.parent_n, level.rank_n]
            tokens.append(choice_Bn)
            done += level.above
            path_BmC = self.head.extend(path_BmC[:, level.parent_n[level.inner_m]], choice_Bn[:, level.inner_m])
        draft = Draft.static(state.root_B, torch.cat(tokens, 1), tree, state.limit_B)
        return draft.drawn_from(torch.cat(draft_probs, 1)[:, plan.probs_M], None) if drawn else draft


def _last(new_tokens: NewTokens) -> Tensor:
    """Return [B, H]: the target's state of each row's last token but the root."""
    rows = numbers(0, len(new_tokens.count_B), new_tokens.count_B.device)
    return new_tokens.last_BnD[rows, (new_tokens.count_B - 1).clamp(min=0)]
