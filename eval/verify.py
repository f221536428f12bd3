"""Which drafted tokens the target accepts, as a pure function of tensors.

Rules: Leviathan et al. 2023 and Chen et al. 2023 for sampled chains; for deterministic children the
equivalent "draw t ~ p, descend if a child holds t". Both leave the target's law unchanged. Typical acceptance
(Cai et al., "Medusa", 2024, section 2.3.1) does not.
Shapes: B rows, N nodes, D depth levels, V target vocab, W draft vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.draft import Draft
from draftsmith.eval.noise import ACCEPT, EMIT, uniforms
from draftsmith.eval.sampling import Sampling, draw, law


@dataclass(frozen=True)
class Verdict:
    """What a round emits: the accepted tokens, then one token of the target's own.

    path_BD: nodes from the root (node 0) down the accepted path, padded with -1.
    accepted_B: number of accepted draft tokens. next_B: the correction or bonus token.
    """

    path_BD: Tensor
    accepted_B: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class Noise:
    """Which random numbers a round uses: one key per row, and a counter that no later round repeats."""

    keys_B: Tensor
    counter_B: Tensor

    def draw(self, stream: int, count: int) -> Tensor:
        """Return [B, count] uniforms of one stream."""
        return uniforms(self.keys_B, self.counter_B, stream, count)


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


def verify(
    draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise, typical: Typical | None = None
) -> Verdict:
    """Verify a draft against the target's logits at every node (the law of the token after the node).

    typical: accept by this rule instead of the lossless one.
    """
    if typical is not None and not sampling.greedy:
        return _typical(draft, logits_BNV, sampling, typical)
    if draft.laws_BKW is None or sampling.greedy:
        return _descend(draft, logits_BNV, sampling, noise)
    assert draft.is_chain, "drafts with laws are chains"
    return _chain(draft, logits_BNV, sampling, noise)


def _descend(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
    """Choose the target's token at the current node; go to the child that holds it, or stop and emit it."""
    rows, nodes = draft.tokens_BN.shape
    row = torch.arange(rows, device=logits_BNV.device)
    if sampling.greedy:
        choice_BN = logits_BNV.argmax(-1)
    else:
        p_BNV = law(logits_BNV, sampling)
        uniform_BN = noise.draw(EMIT, nodes)
        choice_BN = draw(p_BNV.flatten(0, 1), uniform_BN.flatten()).view(rows, nodes)
    node = torch.arange(nodes, device=logits_BNV.device)
    valid_BN = node < draft.count_B[:, None]
    if draft.is_chain:
        match_BK = (choice_BN[:, :-1] == draft.tokens_BN[:, 1:]) & valid_BN[:, 1:]
        accepted_B = match_BK.int().cumprod(1).sum(1)
        return Verdict(torch.where(node <= accepted_B[:, None], node, -1), accepted_B, choice_BN[row, accepted_B])
    current_B = torch.zeros_like(row)
    path = [current_B]
    alive_B = torch.ones_like(row, dtype=torch.bool)
    for _ in range(nodes - 1):
        match_BN = valid_BN & (draft.parents_BN == current_B[:, None])
        match_BN &= draft.tokens_BN == choice_BN[row, current_B][:, None]
        alive_B = alive_B & match_BN.any(1)
        if not alive_B.any():
            break
        current_B = torch.where(alive_B, match_BN.int().argmax(1), current_B)
        path.append(torch.where(alive_B, current_B, -1))
    path_BD = torch.stack(path, 1)
    return Verdict(path_BD, (path_BD >= 0).sum(1) - 1, choice_BN[row, current_B])


def _chain(draft: Draft, logits_BNV: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
    """Accept x ~ q if u q(x) < p(x); at the first rejection sample norm((p - q)+), else a bonus from p."""
    assert draft.laws_BKW is not None
    rows, nodes = draft.tokens_BN.shape
    row = torch.arange(rows, device=logits_BNV.device)
    p_BNV = law(logits_BNV, sampling)
    drafted_BK = draft.tokens_BN[:, 1:]
    column_BK = drafted_BK if draft.vocab_W is None else torch.searchsorted(draft.vocab_W, drafted_BK.contiguous())
    q_BK = draft.laws_BKW.gather(2, column_BK[..., None])[..., 0]
    p_BK = p_BNV[:, :-1].gather(2, drafted_BK[..., None])[..., 0]
    accept_BK = noise.draw(ACCEPT, nodes - 1) * q_BK < p_BK
    accept_BK &= torch.arange(1, nodes, device=row.device) < draft.count_B[:, None]
    accepted_B = accept_BK.int().cumprod(1).sum(1)

    weights_BV = p_BNV[row, accepted_B]
    rejected_B = accepted_B < draft.count_B - 1
    if bool(rejected_B.any()):
        q_BW = draft.laws_BKW[row, accepted_B.clamp(max=nodes - 2)] * rejected_B[:, None]
        columns_BW = draft.vocab_W.expand(rows, -1) if draft.vocab_W is not None else None
        residual_BV = (weights_BV - q_BW if columns_BW is None else weights_BV.scatter_add(1, columns_BW, -q_BW)).clamp(
            min=0
        )
        # p == q up to rounding leaves nothing: then the rejection itself had probability ~0.
        empty_B1 = residual_BV.sum(1, keepdim=True) <= 0
        weights_BV = torch.where(empty_B1, weights_BV, residual_BV)
    next_B = draw(weights_BV, noise.draw(EMIT, 1)[:, 0])
    steps = torch.arange(nodes, device=row.device)
    path_BD = torch.where(steps <= accepted_B[:, None], steps, -1)
    return Verdict(path_BD, accepted_B, next_B)


def _typical(draft: Draft, logits_BNV: Tensor, sampling: Sampling, rule: Typical) -> Verdict:
    """Take the longest path of typical tokens, of equals the one with the largest sum of log p; then the argmax."""
    rows, nodes = draft.tokens_BN.shape
    row = torch.arange(rows, device=logits_BNV.device)
    p_BNV = law(logits_BNV, sampling)
    entropy_BN = torch.special.entr(p_BNV).sum(-1)
    threshold_BN = (rule.delta * torch.exp(-entropy_BN)).clamp(max=rule.epsilon)
    parent_BN = draft.parents_BN.clamp(min=0)
    p_BN = p_BNV[row[:, None], parent_BN, draft.tokens_BN]
    typical_BN = (p_BN > threshold_BN.gather(1, parent_BN)) & (draft.parents_BN >= 0)
    typical_BN &= torch.arange(nodes, device=row.device) < draft.count_B[:, None]
    typical_BN[:, 0] = True
    alive_BN = (typical_BN[:, None] | ~draft.ancestors_BNN).all(-1)
    depth_BN = draft.depth_BN.masked_fill(~alive_BN, -1)
    accepted_B = depth_BN.amax(1)
    log_p_BN = torch.where(typical_BN, p_BN, 1.0).log().index_fill(1, row.new_zeros(1), 0.0)
    score_BN = (log_p_BN[:, None] * draft.ancestors_BNN).sum(-1)
    best_B = score_BN.masked_fill(depth_BN != accepted_B[:, None], -torch.inf).argmax(1)
    on_path_BN = draft.ancestors_BNN[row, best_B]
    # Parents come before their children, so the nodes of a path ascend.
    order_BN = on_path_BN.int().argsort(dim=1, descending=True, stable=True)
    levels = nodes if draft.tree is None else draft.tree.depth + 1
    place_D = torch.arange(levels, device=row.device)
    path_BD = torch.where(place_D <= accepted_B[:, None], order_BN[:, :levels], -1)
    return Verdict(path_BD, accepted_B, p_BNV[row, best_B].argmax(-1))
