"""How drafters propose whose laws of all depths are there at once: a token's law depends on its depth alone.

Shapes: B rows, K drafted tokens, N nodes, W draft vocab.
"""

import torch
from torch import Tensor

from draftsmith.eval.draft import DecodeState, Draft
from draftsmith.eval.growth import child_uniforms, growth
from draftsmith.eval.noise import DRAFT, uniforms
from draftsmith.eval.sampling import draw, draw_children, law
from draftsmith.eval.trees import StaticTree
from draftsmith.heads.base import DraftHead


def draft_chain(state: DecodeState, logits_BKW: Tensor, head: DraftHead, *, greedy: bool) -> Draft:
    """Return a chain of K tokens, drawn under the target's sampling settings, or (greedy) the most likely of each law."""
    count_B = state.limit_B.clamp(0, logits_BKW.shape[1])
    if greedy or state.sampling.greedy:
        return Draft.chain(state.root_B, head.target_ids(logits_BKW.argmax(-1)), count_B)
    laws_BKW = law(logits_BKW, state.sampling)
    uniform_BK = uniforms(state.keys_B, state.length_B, DRAFT, logits_BKW.shape[1])
    drawn_BK = draw(laws_BKW.flatten(0, 1), uniform_BK.flatten()).view_as(uniform_BK)
    return Draft.chain(state.root_B, head.target_ids(drawn_BK), count_B, laws_BKW, head.draft_vocab)


def draft_tree(state: DecodeState, logits_BKW: Tensor, head: DraftHead, whole: StaticTree, *, drawn: bool) -> Draft:
    """Return a static tree, no deeper than K: each depth's most likely tokens, or (drawn) those drawn from its law anew for
    each node, without replacement.

    whole: the tree however deep this round drafts, which the random numbers go by.
    """
    tree = whole.cut(logits_BKW.shape[1])
    if drawn and not state.sampling.greedy:
        return _drawn(state, law(logits_BKW, state.sampling), head, whole, tree)
    shape = tree.on(logits_BKW.device)
    best_BKR = logits_BKW.topk(min(tree.ranks, logits_BKW.shape[-1]), -1).indices
    chosen_BN = best_BKR[:, shape.depth_N[1:] - 1, shape.rank_N[1:]]
    return Draft.static(state.root_B, head.target_ids(chosen_BN), tree, state.limit_B)


def _drawn(state: DecodeState, laws_BKW: Tensor, head: DraftHead, whole: StaticTree, tree: StaticTree) -> Draft:
    plan, shape = growth(tree, laws_BKW.device), tree.on(laws_BKW.device)
    inner_BTW = laws_BKW[:, shape.depth_N[plan.inner_T]]
    child_BTC = draw_children(inner_BTW, child_uniforms(state, whole, plan.inner_T))
    first, drafted = 0, []
    for level in plan.levels:
        drafted.append(child_BTC[:, first + level.parent_n, level.sibling_n])
        first += level.above
    tokens_BN = head.target_ids(torch.cat(drafted, 1))
    draft = Draft.static(state.root_B, tokens_BN, tree, state.limit_B)
    return draft.drawn_from(inner_BTW[:, plan.law_M], head.draft_vocab)
