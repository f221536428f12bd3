"""Chains that a rule ends leave the target's distribution unchanged, by enumeration of every random number that decides; a rule that
looks at the token does not."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, LengthRule, NewTokens
from draftsmith.decoder.growth import chain_token_by_token
from draftsmith.decoder.sampling import ACCEPT, DRAFT, EMIT, Sampling
from draftsmith.decoder.verify import verify
from draftsmith.heads.drafters import draft_chain

# Multiples of 1/4, so that a few equally likely uniforms give every outcome its exact probability.
P = torch.tensor([[2, 1, 1], [1, 1, 2], [1, 2, 1]]) / 4
"""The target's distribution of the token after each token."""
Q = torch.tensor([[1, 2, 1], [1, 3, 0], [2, 1, 1]]) / 4
"""The draft's, that of the first token behind token 0."""
RULE = LengthRule((0.1, 0.3))


def every_uniform() -> dict[int, Tensor]:
    """The streams' uniforms, a row for each of all outcomes: two draft tokens, two acceptances, and the target's own token."""
    fourths, twelfths = ([(i + 0.5) / n for i in range(n)] for n in (4, 12))
    rows = torch.tensor([*product(fourths, fourths, twelfths, twelfths, fourths)], dtype=torch.float64)
    return {DRAFT: rows[:, :2], ACCEPT: torch.cat([rows[:, :1], rows[:, 2:4]], 1), EMIT: rows[:, 4:].expand(-1, 3)}


def state_of(uniforms: dict[int, Tensor]) -> DecodeState:
    """The last token of every row's text is token 0, and there is room for three more."""
    zeros_B = torch.zeros(len(uniforms[EMIT]), dtype=torch.long)
    nothing = NewTokens(zeros_B[:, None], torch.zeros(len(zeros_B), 1, 0), torch.zeros(len(zeros_B), 1, 0), zeros_B + 1)
    state = DecodeState(zeros_B, zeros_B + 5, zeros_B + 3, zeros_B, nothing, Sampling(1.0))
    state.__dict__["noise"] = SimpleNamespace(draw=lambda stream, count: uniforms[stream][:, :count])
    return state


def by_tokens_before(state: DecodeState, rule: LengthRule | None) -> Draft:
    """As heads draft whose distributions depend on the tokens before."""
    return chain_token_by_token(state, 2, lambda k, tokens_B: Q[tokens_B].log(), rule=rule)


def at_once(state: DecodeState, rule: LengthRule | None) -> Draft:
    """As heads draft whose distributions depend on the place alone."""
    head: Any = SimpleNamespace(target_ids=lambda tokens: tokens, draft_vocab=None)
    return draft_chain(state, Q[:2].log().expand(len(state.root_B), -1, -1), head, greedy=False, rule=rule)


def of_three_tokens(state: DecodeState, draft: Draft) -> Tensor:
    """Return [3, 3, 3] the distribution of the next three tokens: those of the round, then the target's."""
    verdict = verify(draft, P[draft.tokens_BN].log(), state.sampling, state.noise)
    outcomes = torch.cat([draft.tokens_BN, verdict.accepted_B[:, None], verdict.next_B[:, None]], 1)
    found = torch.zeros(3, 3, 3, dtype=torch.float64)
    for (*tokens, accepted, own), count in zip(
        *(x.tolist() for x in outcomes.unique(dim=0, return_counts=True)), strict=True
    ):
        emitted = [*tokens[1 : 1 + accepted], own]
        for rest in product(range(3), repeat=3 - len(emitted)):
            text, chance = [*emitted, *rest], count / len(outcomes)
            for before, token in zip(text[len(emitted) - 1 :], rest, strict=False):
                chance *= float(P[before, token])
            found[tuple(text)] += chance
    return found


EXACT = torch.einsum("a,ab,bc->abc", P[0].double(), P.double(), P.double())


@pytest.mark.parametrize("propose", [by_tokens_before, at_once])
def test_chains_that_end_early_leave_the_targets_distribution(propose: Any) -> None:
    state = state_of(every_uniform())
    draft = propose(state, RULE if propose is by_tokens_before else replace(RULE, floors=(0.1, 0.4)))
    if propose is by_tokens_before:  # behind token 1 two are drafted, as 0.5 x 0.75 is enough and 0.5 x 0.5 is not
        assert torch.equal(draft.nodes_B, 2 + (draft.tokens_BN[:, 1] == 1).long())
    torch.testing.assert_close(of_three_tokens(state, draft), EXACT)


def test_a_rule_that_looks_at_the_token_changes_the_distribution() -> None:
    """A draft that ends before a token because that token itself is unlikely, as `draft-p-min` would if drafts were sampled."""
    state = state_of(every_uniform())
    draft = by_tokens_before(state, None)
    own_BK = cast(Tensor, draft.draft_probs_BMW).gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
    draft = replace(draft, nodes_B=1 + (own_BK.cumprod(1) >= torch.tensor(RULE.floors)).long().cumprod(1).sum(1))
    assert 1 < float(draft.nodes_B.float().mean()) < 3
    assert float((of_three_tokens(state, draft) - EXACT).abs().max()) > 0.01


def test_a_draft_of_no_tokens_is_the_target_alone() -> None:
    state = state_of(every_uniform())
    for propose in (by_tokens_before, at_once):
        draft = propose(state, LengthRule((0.6, 0.0)))
        assert (draft.tokens_BN.shape[1], draft.draft_probs_BMW) == (1, None)
        torch.testing.assert_close(of_three_tokens(state, draft), EXACT)
