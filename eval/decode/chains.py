"""Draft a chain token by token.

Shapes: B rows, K drafted tokens, W draft vocab.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.eval.decode.draft import DecodeState, Draft
from draftsmith.eval.decode.noise import DRAFT, uniforms
from draftsmith.eval.decode.sampling import draw, probs


def chain_token_by_token(
    state: DecodeState,
    length: int,
    next_logits: Callable[[int, Tensor], Tensor],
    *,
    greedy: bool = False,
    vocab_W: Tensor | None = None,
) -> Draft:
    """Return a chain of `length` tokens, each drawn under the target's sampling settings, or the most likely one: at
    temperature 0, and everywhere where `greedy` is set (as vLLM drafts).

    next_logits(k, tokens_B): the logits [B, W] of the k-th drafted token, given the token before it (for k = 0 the
    root); called once for each k, in order. vocab_W: the target ids of their columns, None where these are the target's
    own.
    """
    greedy = greedy or state.sampling.greedy
    uniform_BK = None if greedy else uniforms(state.keys_B, state.length_B, DRAFT, length)
    tokens, draft_probs = [state.root_B], []
    for k in range(length):
        logits_BW = next_logits(k, tokens[-1])
        if uniform_BK is None:
            choice_B = logits_BW.argmax(-1)
        else:
            draft_probs.append(probs(logits_BW, state.sampling))
            choice_B = draw(draft_probs[-1], uniform_BK[:, k])
        tokens.append(choice_B if vocab_W is None else vocab_W[choice_B])
    tokens_BK, count_B = torch.stack(tokens[1:], 1), state.limit_B.clamp(0, length)
    if not draft_probs:
        return Draft.chain(state.root_B, tokens_BK, count_B)
    return Draft.chain(state.root_B, tokens_BK, count_B, torch.stack(draft_probs, 1), vocab_W)
