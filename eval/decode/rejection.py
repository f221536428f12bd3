"""Rejection sampling at one node: accept a drafted token x ~ q with probability min(1, p(x) / q(x)).

One child: Leviathan et al. 2023 and Chen et al. 2023. Several children, drawn without replacement: the same rule for
each in turn, with the p and q that the rejections before have left (Jeon et al., "Recursive Speculative Decoding",
2024).

Shapes: B rows, C children, V target vocab, W draft vocab.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decode.sampling import without


class Children(NamedTuple):
    """The children of one node per row, in the order they were drawn: node numbers (-1 pads), tokens, and the uniforms
    that decide on them; all [B, C]."""

    node_BC: Tensor
    token_BC: Tensor
    uniform_BC: Tensor


class ChildChoice(NamedTuple):
    """child_B: the accepted child, -1 for none. p_BV: the distribution of the next token where none was accepted.
    broken_B: whether the draft's distribution is broken (see `is_broken`)."""

    child_B: Tensor
    p_BV: Tensor
    broken_B: Tensor


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


def refuse_broken(depth_B: Tensor) -> None:
    """Raise UserError if a draft distribution is broken; depth_B: the depth of the first one in each row, 0 where none
    is.

    Decoding on would be silently wrong: every comparison with NaN is false, and the residual would be NaN too.
    """
    if bool((depth_B > 0).any()):
        raise UserError(
            f"The draft head's distribution of the token at depth {int(depth_B[depth_B > 0].min())} is no distribution (NaN, infinite, or 0 "
            "for the token it drafted): its weights are damaged or it overflows; draft in float32, or train it again."
        )


def residual(p_BV: Tensor, q_BW: Tensor, vocab_W: Tensor | None) -> Tensor:
    """Return norm((p - q)+), the distribution of the next token once a token x ~ q is rejected; NaN everywhere if q has
    any.

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


def accept_child(p_BV: Tensor, q_BW: Tensor, vocab_W: Tensor | None, children: Children) -> ChildChoice:
    """Accept or reject the children one by one, until one is accepted."""
    child_B = torch.full_like(p_BV[:, 0], -1, dtype=torch.long)
    broken_B = torch.zeros_like(child_B, dtype=torch.bool)
    for i in range(children.node_BC.shape[1]):
        node_B, token_B, uniform_B = (x[:, i] for x in children)
        open_B = (child_B < 0) & (node_B >= 0)
        if not bool(open_B.any()):
            break
        drafted = look_up(q_BW, token_B, vocab_W)
        broken_B |= open_B & is_broken(drafted, first=i == 0)
        open_B &= drafted.q > 0
        accepted_B = open_B & (uniform_B * drafted.q < p_BV.gather(1, token_B[:, None])[:, 0])
        child_B = torch.where(accepted_B, node_B, child_B)
        rejected_B1 = (open_B & ~accepted_B)[:, None]
        if bool(rejected_B1.any()):
            left_BV, rest_BW = reject(p_BV, q_BW, drafted.column, vocab_W)
            p_BV, q_BW = torch.where(rejected_B1, left_BV, p_BV), torch.where(rejected_B1, rest_BW, q_BW)
            broken_B |= p_BV[:, 0].isnan()
    return ChildChoice(child_B, p_BV, broken_B)
