"""Draft chains and static trees.

`draft_chain` and `draft_tree` take the logits of all depths at once, for heads whose distribution depends on the depth alone.
`grow_tree` drafts level by level, for heads whose distribution depends on the tokens before.

Shapes: B rows, K drafted tokens, N nodes, n nodes of one level, m of them with children, T nodes with children, M nodes up to the
last of these, C children of a node, X the width of what a node is drafted from, W draft vocab.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, StatelessDrafter
from draftsmith.decoder.growth import Level, child_uniforms, growth
from draftsmith.decoder.sampling import DRAFT, draw, draw_children, probs, uniforms
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.base import DraftHead


def draft_chain(state: DecodeState, logits_BKW: Tensor, head: DraftHead, *, greedy: bool) -> Draft:
    """Return a chain of K tokens: drawn under the target's sampling settings, or (greedy) the most likely ones."""
    drafted_B = state.limit_B.clamp(0, logits_BKW.shape[1])
    if greedy or state.sampling.greedy:
        return Draft.chain(state.root_B, head.target_ids(logits_BKW.argmax(-1)), drafted_B)
    draft_probs_BKW = probs(logits_BKW, state.sampling)
    uniform_BK = uniforms(state.keys_B, state.length_B, DRAFT, logits_BKW.shape[1])
    drawn_BK = draw(draft_probs_BKW.flatten(0, 1), uniform_BK.flatten()).view_as(uniform_BK)
    return Draft.chain(state.root_B, head.target_ids(drawn_BK), drafted_B, draft_probs_BKW, head.draft_vocab)


def draft_tree(state: DecodeState, logits_BKW: Tensor, head: DraftHead, whole: StaticTree, *, drawn: bool) -> Draft:
    """Return a static tree, no deeper than K, of each depth's most likely tokens.

    whole: the uncut tree; each node's random number goes by its place there, so cutting changes no draw. drawn: each node's children are drawn
    from the depth's distribution instead, without replacement.
    """
    tree = whole.cut(logits_BKW.shape[1])
    if drawn and not state.sampling.greedy:
        return _drawn(state, probs(logits_BKW, state.sampling), head, whole, tree)
    shape = tree.on(logits_BKW.device)
    best_BKR = logits_BKW.topk(min(tree.ranks, logits_BKW.shape[-1]), -1).indices
    chosen_BN = best_BKR[:, shape.depth_N[1:] - 1, shape.rank_N[1:]]
    return Draft.static(state.root_B, head.target_ids(chosen_BN), tree, state.limit_B)


def _drawn(state: DecodeState, draft_probs_BKW: Tensor, head: DraftHead, whole: StaticTree, tree: StaticTree) -> Draft:
    plan, shape = growth(tree, draft_probs_BKW.device), tree.on(draft_probs_BKW.device)
    inner_BTW = draft_probs_BKW[:, shape.depth_N[plan.inner_T]]
    child_BTC = draw_children(inner_BTW, child_uniforms(state, whole, plan.inner_T))
    first, drafted = 0, []
    for level in plan.levels:
        drafted.append(child_BTC[:, first + level.parent_n, level.sibling_n])
        first += level.above
    tokens_BN = head.target_ids(torch.cat(drafted, 1))
    draft = Draft.static(state.root_B, tokens_BN, tree, state.limit_B)
    return replace(draft, draft_probs_BMW=inner_BTW[:, plan.probs_M], vocab_W=head.draft_vocab)


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
    """

    name = ""
    """In results; "" stands for the name of the head's method."""

    def __init__(
        self,
        head: DraftHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | DynamicTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        most = head.drafts.max_speculative_tokens
        assert not drawn or isinstance(tree, StaticTree)
        assert num_speculative_tokens >= 1
        assert most is None or num_speculative_tokens <= most
        assert tree is None or tree.depth <= num_speculative_tokens
        self.head: Any = head.eval()
        self.name, self.layer_ids = self.name or head.method, head.reads.layer_ids
        self.num_speculative_tokens = num_speculative_tokens if tree is None else tree.depth
        self.tree: Any = tree
        self.max_nodes = 1 + num_speculative_tokens if tree is None else tree.max_nodes
        self.drawn, self.greedy_drafts = drawn, greedy_drafts
