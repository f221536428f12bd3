"""How Medusa's heads propose: all of them read the target's state at the last token, so there is nothing to run
between two drafted tokens and nothing to keep between two rounds.

Shapes: B rows, K drafted tokens (heads used), N nodes, H target hidden, V target vocab.
"""

import torch
from torch import Tensor

from draftsmith.eval.draft import DecodeState, Draft, Prompts
from draftsmith.eval.growth import child_uniforms, growth
from draftsmith.eval.noise import DRAFT, uniforms
from draftsmith.eval.sampling import draw, draw_children, law
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.medusa import MedusaHead


class MedusaDrafter:
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head, or (drawn) of tokens sampled from it without replacement.

    num_speculative_tokens: heads used. tree: at most that deep. greedy_drafts: a chain of argmaxes at every
    temperature (as vLLM drafts).
    """

    name = "medusa"
    layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        head: MedusaHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        assert tree is not None or not drawn
        assert 1 <= num_speculative_tokens <= head.options.num_heads
        assert tree is None or tree.depth <= num_speculative_tokens
        self.head = head.eval()
        self.num_speculative_tokens = num_speculative_tokens
        self.tree, self.drawn = tree, drawn
        self.max_nodes = 1 + (num_speculative_tokens if tree is None else len(tree.choices))
        self.greedy_drafts = greedy_drafts

    def start(self, rows: int, capacity: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: Prompts) -> None:
        """Nothing to read."""

    def select(self, rows: Tensor) -> None:
        """Nothing to keep."""

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Draft no deeper than any row may still emit."""
        depth = self.num_speculative_tokens if self.tree is None else self.tree.depth
        depth = min(depth, state.room)
        rows = torch.arange(len(state.root_B), device=state.root_B.device)
        last_BH = state.fresh.last_BnD[rows, (state.fresh.count_B - 1).clamp(min=0)]
        logits_BKV = torch.stack([self.head.logits(k, last_BH) for k in range(depth)], 1)
        if self.tree is not None:
            return self._tree(state, logits_BKV, self.tree.cut(depth))
        count_B = state.limit_B.clamp(0, depth)
        if self.greedy_drafts or state.sampling.greedy:
            return Draft.chain(state.root_B, logits_BKV.argmax(-1), count_B)
        laws_BKV = law(logits_BKV, state.sampling)
        uniform_BK = uniforms(state.keys_B, state.length_B, DRAFT, depth)
        drafted_BK = draw(laws_BKV.flatten(0, 1), uniform_BK.flatten()).view_as(uniform_BK)
        return Draft.chain(state.root_B, drafted_BK, count_B, laws_BKV)

    def _tree(self, state: DecodeState, logits_BKV: Tensor, tree: StaticTree) -> Draft:
        shape = tree.on(logits_BKV.device)
        if self.drawn and not state.sampling.greedy:
            return self._drawn(state, law(logits_BKV, state.sampling), tree)
        best_BKR = logits_BKV.topk(min(tree.ranks, logits_BKV.shape[-1]), -1).indices
        drafted_BN = best_BKR[:, shape.depth_N[1:] - 1, shape.rank_N[1:]]
        return Draft.static(state.root_B, drafted_BN, tree, state.limit_B)

    def _drawn(self, state: DecodeState, laws_BKV: Tensor, tree: StaticTree) -> Draft:
        """Draw each node's children anew from the law of their depth."""
        plan, shape = growth(tree, laws_BKV.device), tree.on(laws_BKV.device)
        inner_BTV = laws_BKV[:, shape.depth_N[plan.inner_T]]
        child_BTC = draw_children(inner_BTV, child_uniforms(state, self.tree or tree, plan.inner_T))
        first, drafted = 0, []
        for level in plan.levels:
            drafted.append(child_BTC[:, first + level.parent_n, level.sibling_n])
            first += level.above
        draft = Draft.static(state.root_B, torch.cat(drafted, 1), tree, state.limit_B)
        return draft.drawn_from(inner_BTV[:, plan.law_M], None)
