"""Verify a draft: decide which of its tokens the target accepts, as a pure function of tensors.

One rule for every draft: at a node, decide which child holds the target's token and follow it; where none does, emit a
token of the target's own. Where children were chosen deterministically, draw t ~ p and follow the child that holds t.
Where they were drawn from a distribution, accept a token x ~ q with probability min(1, p(x) / q(x)) (Leviathan et al.
2023, Chen et al. 2023), or several, drawn without replacement, by the same rule in turn, with the p and q that the
rejections before have left (Jeon et al., "Recursive Speculative Decoding", 2024). Both leave the target's distribution
unchanged. Typical acceptance (Cai et al., "Medusa", 2024, section 2.3.1) does not.

Shapes: B rows, N nodes, K drafted tokens of a chain, C children of a node, D nodes of a path, s tokens seen, V target
vocab, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decoder.draft import Draft, numbers
from draftsmith.decoder.sampling import ACCEPT, EMIT, Noise, Sampling, draw, penalize, probs, top1, weaken, without
from draftsmith.errors import UserError


class NotFinite(UserError):  # noqa: N818 - it names a finding
    """Target logits at a node of the draft hold NaN or infinity, or nothing but -inf. row, node: which one."""

    def __init__(self, row: int, node: int) -> None:
        super().__init__(
            f"The target's logits at node {node} of row {row} are not finite: run it in a wider dtype, or check its weights."
        )
        self.row, self.node = row, node


@dataclass(frozen=True)
class Verdict:
    """The tokens that a round emits: the accepted ones, then one of the target's own.

    path_BD: nodes from the root (node 0) down the accepted path, padded with -1.
    accepted_B: number of accepted draft tokens. next_B: the correction or bonus token. fault_B: what `refuse` reads.
    """

    path_BD: Tensor
    accepted_B: Tensor
    next_B: Tensor
    fault_B: Tensor


@dataclass(frozen=True)
class Typical:
    """Typical acceptance, which is LOSSY: a drafted token x stays if p(x) > min(epsilon, delta * exp(-H(p))), and a
    round's own token is the most likely one. At temperature 0 it is the same as the exact rule."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"Typical acceptance: {name} is {getattr(self, name)}: it must be from 0 to 1.")


class Drafted(NamedTuple):
    """A token in a draft distribution: its column and its probability q; known: whether the draft vocabulary holds it
    (if not, q is 0 and the column means nothing)."""

    column: Tensor
    q: Tensor
    known: Tensor


def look_up(probs: Tensor, token: Tensor, vocab_W: Tensor | None) -> Drafted:
    """Look up tokens [...] in draft distributions `probs` [..., W]."""
    if vocab_W is None:
        column, known = token, torch.ones_like(token, dtype=torch.bool)
    else:
        column = torch.searchsorted(vocab_W, token.contiguous()).clamp(max=len(vocab_W) - 1)
        known = vocab_W[column] == token
    q = probs.gather(-1, column[..., None])[..., 0]
    return Drafted(column, q.masked_fill(~known, 0), known)


def is_broken(drafted: Drafted, first: bool) -> Tensor:
    """Return where the probability of a drafted token is impossible: NaN, infinite, or 0 for the first child of a node.
    Later children may have 0: they were drawn when no mass was left, and are skipped."""
    possible = drafted.q > 0 if first else drafted.q >= 0
    return drafted.known & ~(possible & (drafted.q < torch.inf))


def refuse(faults: Sequence[int], nodes: int) -> None:
    """Raise what `verify` found in a draft of so many nodes; faults: the rows' `Verdict.fault_B`, on the host by now.

    0 is none; node - nodes, which is negative, the first node at which the target's logits are not finite (NotFinite); else the
    depth of the first token whose draft distribution is broken (UserError). Decoding on would be silently wrong: every comparison
    with NaN is false, and the residual would be NaN too.
    """
    for row, fault in enumerate(faults):
        if fault < 0:
            raise NotFinite(row, nodes + fault)
    if depths := [fault for fault in faults if fault]:
        raise UserError(
            f"The draft head's distribution of the token at depth {min(depths)} is no distribution (NaN, infinite, or 0 "
            "for the token it drafted): its weights are damaged or it overflows; draft in float32, or train it again."
        )


def _none(flags: Tensor) -> bool:
    """Return whether nothing is left to do for any row; never on a GPU, where asking takes a wait and the work changes nothing."""
    return flags.device.type == "cpu" and not bool(flags.any())


def accepts(uniform: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """Return where tokens x ~ q stay, by a uniform each: with probability min(1, p(x) / q(x))."""
    return uniform * q < p


def residual(p_BV: Tensor, q_BW: Tensor, vocab_W: Tensor | None) -> Tensor:
    """Return norm((p - q)+), the distribution of the next token once a token x ~ q is rejected; all NaN if q has any.

    p == q up to rounding leaves nothing; such a rejection has probability ~0, and p stays as it was.
    """
    if vocab_W is None:
        left_BV = (p_BV - q_BW).clamp(min=0)
    else:
        left_BV = p_BV.scatter_add(1, vocab_W.expand(len(p_BV), -1), -q_BW).clamp(min=0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 == 0, p_BV, left_BV / mass_B1)


def reject(p_BV: Tensor, q_BW: Tensor, column_B: Tensor, vocab_W: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return p and q after the rejection of the token in `column_B`: the residual with the q that the token was drawn
    from, and then q without the token."""
    return residual(p_BV, q_BW, vocab_W), without(q_BW, column_B)


def accept_child(
    p_BV: Tensor, q_BW: Tensor, vocab_W: Tensor | None, node_BC: Tensor, token_BC: Tensor, uniform_BC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept or reject the children of one node per row one by one, as they were drawn, until one is accepted. node_BC: -1 pads.

    Return child_B, the accepted child, -1 for none; p_BV, the distribution of the next token where none was accepted; broken_B, whether
    the draft's distribution is broken (see `is_broken`).
    """
    child_B = torch.full_like(p_BV[:, 0], -1, dtype=torch.long)
    broken_B = torch.zeros_like(child_B, dtype=torch.bool)
    for i in range(node_BC.shape[1]):
        node_B, token_B, uniform_B = (x[:, i] for x in (node_BC, token_BC, uniform_BC))
        open_B = (child_B < 0) & (node_B >= 0)
        if _none(open_B):
            break
        drafted = look_up(q_BW, token_B, vocab_W)
        broken_B |= open_B & is_broken(drafted, first=i == 0)
        open_B &= drafted.q > 0
        accepted_B = open_B & accepts(uniform_B, drafted.q, p_BV.gather(1, token_B[:, None])[:, 0])
        child_B = torch.where(accepted_B, node_B, child_B)
        rejected_B1 = (open_B & ~accepted_B)[:, None]
        if not _none(rejected_B1):
            left_BV, rest_BW = reject(p_BV, q_BW, drafted.column, vocab_W)
            p_BV, q_BW = torch.where(rejected_B1, left_BV, p_BV), torch.where(rejected_B1, rest_BW, q_BW)
            broken_B |= p_BV[:, 0].isnan()
    return child_B, p_BV, broken_B


def verify(
    draft: Draft,
    logits_BNV: Tensor,
    sampling: Sampling,
    noise: Noise,
    typical: Typical | None = None,
    seen_BV: Tensor | None = None,
) -> Verdict:
    """Verify a draft against the target's logits at every node (of the token after the node).

    typical: accept by this lossy rule instead of the lossless one. seen_BV: bool, the tokens of the text so far, the root
    included; a repetition penalty needs them, and adds those on the path to each node. Logits that are not finite at any node,
    accepted or not, and a distribution of the draft that holds NaN, infinity or 0 for its token are faults: see `refuse`.
    """
    if sampling.greedy and sampling.repetition_penalty == 1:
        largest_BN, choice_BN = top1(logits_BNV)
        return _matching(draft, choice_BN, _not_finite(draft, largest_BN))
    fault_B = _not_finite(draft, logits_BNV.amax(-1))
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None
        logits_BNV = penalize_nodes(draft, logits_BNV, seen_BV, sampling.repetition_penalty)
    if sampling.greedy:  # by either rule
        return _matching(draft, top1(logits_BNV)[1], fault_B)
    if typical is not None:
        # The longest path of typical tokens, of equals the largest sum of log p; then the most likely token.
        row = torch.arange(len(logits_BNV), device=logits_BNV.device)
        p_BNV = probs(logits_BNV, sampling)
        entropy_BN = torch.special.entr(p_BNV).sum(-1)
        threshold_BN = (typical.delta * torch.exp(-entropy_BN)).clamp(max=typical.epsilon)
        parent_BN = draft.parents_BN.clamp(min=0)
        p_BN = p_BNV[row[:, None], parent_BN, draft.tokens_BN]
        typical_BN = p_BN > threshold_BN.gather(1, parent_BN)
        log_p_BN = torch.where(typical_BN, p_BN, 1.0).log().index_fill(1, row.new_zeros(1), 0.0)
        score_BN = (log_p_BN[:, None] * draft.ancestors_BNN).sum(-1)
        path_BD, accepted_B, node_B = _deepest(draft, typical_BN, score_BN)
        return Verdict(path_BD, accepted_B, p_BNV[row, node_B].argmax(-1), fault_B)
    if not draft.is_chain:
        return _sampled_tree(draft, logits_BNV, sampling, noise, fault_B)
    if draft.draft_probs_BMW is None or draft.tokens_BN.shape[1] == 1:
        uniform_BN = noise.draw(EMIT, logits_BNV.shape[1])
        choices = draw(probs(logits_BNV, sampling).flatten(0, 1), uniform_BN.flatten())
        return _matching(draft, choices.view(uniform_BN.shape), fault_B)
    return _sampled_chain(draft, logits_BNV, sampling, noise, fault_B)


def penalize_nodes(draft: Draft, logits_BNV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Return `logits_BNV` with the penalty at every node on the tokens `seen_BV` (the root's among them) and on those
    of the path to the node, its own included.

    Few of V tokens are seen, so on a CPU only their logits are worked out: `penalize` at every node takes five times as long. A
    GPU would wait for their number.
    """
    if logits_BNV.device.type == "cpu":
        row_s, token_s = seen_BV.nonzero(as_tuple=True)
        penalized_BNV = logits_BNV.clone()
        penalized_BNV[row_s, :, token_s] = weaken(logits_BNV[row_s, :, token_s], penalty)
    else:
        penalized_BNV = penalize(logits_BNV, seen_BV[:, None], penalty)
    if draft.tokens_BN.shape[1] == 1:
        return penalized_BNV
    # The root's token stands in for those that are not on the path.
    path_BNN = torch.where(draft.ancestors_BNN, draft.tokens_BN[:, None], draft.tokens_BN[:, :1, None])
    return penalized_BNV.scatter_(2, path_BNN, weaken(logits_BNV.gather(2, path_BNN), penalty))


def _not_finite(draft: Draft, largest_BN: Tensor) -> Tensor:
    """Return [B] the faults of nodes whose largest logit is no number; NaN counts as larger than any."""
    bad_BN = draft.valid_BN & ~largest_BN.isfinite()
    return (bad_BN * numbers(-bad_BN.shape[1], 0, bad_BN.device)).amin(1)


def _matching(draft: Draft, choice_BN: Tensor, fault_B: Tensor) -> Verdict:
    """Accept nodes that hold the token which the target chose after their parent; all nodes at once.

    For greedy drafts and deterministic chains. Of equal siblings in a greedy tree, that of the longer path is accepted.
    """
    if draft.tokens_BN.shape[1] == 1:  # the target alone
        return Verdict(torch.zeros_like(choice_BN), torch.zeros_like(choice_BN[:, 0]), choice_BN[:, 0], fault_B)
    if draft.is_chain:
        match_BN = F.pad(draft.tokens_BN[:, 1:] == choice_BN[:, :-1], (1, 0))
    else:
        match_BN = draft.tokens_BN == choice_BN.gather(1, draft.parents_BN.clamp(min=0))
    path_BD, accepted_B, node_B = _deepest(draft, match_BN)
    return Verdict(path_BD, accepted_B, choice_BN.gather(1, node_B[:, None])[:, 0], fault_B)


def _sampled_chain(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, fault_B: Tensor) -> Verdict:
    """Accept x ~ q if u q(x) < p(x), at all positions at once; at the first rejection sample the residual, else p."""
    assert draft.draft_probs_BMW is not None
    rows, nodes = draft.tokens_BN.shape
    row = numbers(0, rows, logits_BNV.device)
    p_BNV = probs(logits_BNV, sampling)
    token_BK, valid_BK = draft.tokens_BN[:, 1:], draft.valid_BN[:, 1:]
    draft_probs_BKW = draft.draft_probs_BMW[:, : nodes - 1]
    drafted = look_up(draft_probs_BKW, token_BK, draft.vocab_W)
    p_BK = p_BNV[:, :-1].gather(2, token_BK[..., None])[..., 0]
    drawn_BK = valid_BK & (drafted.q > 0)
    accept_BK = drawn_BK & accepts(noise.draw(ACCEPT, nodes)[:, 1:], drafted.q, p_BK)
    path_BD, accepted_B, node_B = _deepest(draft, F.pad(accept_BK, (1, 0)))

    weights_BV = p_BNV[row, node_B]
    rejected_B = F.pad(drawn_BK, (0, 1))[row, node_B]
    depth_K = numbers(1, nodes, row.device)
    broken_BK = valid_BK & is_broken(drafted, first=True)
    if not _none(rejected_B):
        q_BW = draft_probs_BKW[row, node_B.clamp(max=nodes - 2)]
        left_BV = residual(weights_BV, q_BW, draft.vocab_W)
        weights_BV = torch.where(rejected_B[:, None], left_BV, weights_BV)
        broken_BK |= (depth_K == node_B[:, None] + 1) & weights_BV[:, :1].isnan()
    depth_B = torch.where(broken_BK, depth_K, nodes).amin(1)
    fault_B = torch.where((fault_B == 0) & (depth_B < nodes), depth_B, fault_B)
    return Verdict(path_BD, accepted_B, draw(weights_BV, noise.draw(EMIT, 1)[:, 0]), fault_B)


def _sampled_tree(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, fault_B: Tensor) -> Verdict:
    """Walk down from the root, a level of all rows at a time; only nodes on the way need their distributions."""
    rows, nodes = draft.tokens_BN.shape
    row = numbers(0, rows, logits_BNV.device)
    next_B = node_B = torch.zeros_like(row)
    walking_B = torch.ones_like(row, dtype=torch.bool)
    accept_BN, emit_BN = noise.draw(ACCEPT, nodes), noise.draw(EMIT, nodes)
    path = [node_B]
    for depth in range(1, draft.most_depth + 2):
        p_BV = probs(logits_BNV[row, node_B], sampling)
        child_BN = draft.valid_BN & (draft.parents_BN == node_B[:, None]) & walking_B[:, None]
        if draft.draft_probs_BMW is None:
            token_B = draw(p_BV, emit_BN[row, node_B])
            match_BN = child_BN & (draft.tokens_BN == token_B[:, None])
            child_B = torch.where(match_BN.any(1), match_BN.int().argmax(1), -1)
        else:
            q_BW = draft.draft_probs_BMW[row, node_B.clamp(max=draft.draft_probs_BMW.shape[1] - 1)]
            most = nodes - 1 if draft.tree is None else draft.tree.most_children[depth - 1]
            # The children of each row, in the order of their numbers, each with its own uniform.
            node_BC = child_BN.int().argsort(dim=1, descending=True, stable=True)[:, :most]
            padding_BC = numbers(0, most, child_BN.device) >= child_BN.sum(1)[:, None]
            token_BC, uniform_BC = draft.tokens_BN.gather(1, node_BC), accept_BN.gather(1, node_BC)
            children = (node_BC.masked_fill(padding_BC, -1), token_BC, uniform_BC)
            child_B, p_BV, broken_B = accept_child(p_BV, q_BW, draft.vocab_W, *children)
            token_B = draw(p_BV, emit_BN[:, 0])
            fault_B = torch.where(broken_B & (fault_B == 0), depth, fault_B)
        next_B = torch.where(walking_B, token_B, next_B)
        walking_B = child_B >= 0
        if depth > draft.most_depth or _none(walking_B):
            break
        node_B = torch.where(walking_B, child_B, node_B)
        path.append(child_B)
    path_BD = torch.stack(path, 1)
    return Verdict(path_BD, (path_BD >= 0).sum(1) - 1, next_B, fault_B)


def _deepest(draft: Draft, fine_BN: Tensor, score_BN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest path from the root of fine nodes, padding left out; of equals the one with the best score: its nodes [B, D], its
    number of draft tokens [B], and its last node [B]."""
    nodes = fine_BN.shape[1]
    node_N = numbers(0, nodes, fine_BN.device)
    fine_BN = fine_BN & draft.valid_BN
    if draft.is_chain:
        accepted_B = fine_BN[:, 1:].int().cumprod(1).sum(1)
        return torch.where(node_N <= accepted_B[:, None], node_N, -1), accepted_B, accepted_B
    fine_BN = fine_BN | (node_N == 0)
    alive_BN = (fine_BN[:, None] | ~draft.ancestors_BNN).all(-1)
    depth_BN = draft.depth_BN.masked_fill(~alive_BN, -1)
    accepted_B = depth_BN.amax(1)
    ends_BN = depth_BN == accepted_B[:, None]
    best_B = (ends_BN.int() if score_BN is None else score_BN.masked_fill(~ends_BN, -torch.inf)).argmax(1)
    on_path_BN = draft.ancestors_BNN[torch.arange(len(best_B), device=best_B.device), best_B]
    # Parents come before their children, so the nodes of a path ascend.
    order_BN = on_path_BN.int().argsort(dim=1, descending=True, stable=True)
    levels = draft.most_depth + 1
    path_BD = torch.where(node_N[:levels] <= accepted_B[:, None], order_BN[:, :levels], -1)
    return path_BD, accepted_B, best_B
