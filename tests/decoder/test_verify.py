"""The edges of `verify`; its distribution is tested in test_verify_distributions.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoder import verify as verifier
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.sampling import DRAFT, EMIT, Noise, Sampling, draw, draw_children, probs, uniforms
from draftsmith.decoder.verify import NotFinite, Typical, Verdict
from draftsmith.errors import UserError

pytestmark = pytest.mark.full

V, ROOT, PROMPT = 5, 2, 4
SHAPES = {"chain": (-1, 0, 1), "tree": (-1, 0, 0, 0, 1, 1, 2)}


class Toy:
    """A target and a drafter whose distributions depend on the last token only, with a draft vocab of 4 of 5 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.target_VV = torch.randn(V, V, generator=generator)
        self.vocab_W = torch.tensor([0, 1, 3, 4])
        self.draft_VW = 0.6 * self.target_VV[:, self.vocab_W] + torch.randn(V, 4, generator=generator)

    def propose(self, shape: str, root_B: Tensor, noise: Noise, sampling: Sampling, drawn: bool) -> Draft:
        """Draw each node's children, or take its most likely ones; some rows draft less than others."""
        parents = SHAPES[shape]
        tokens, draft_probs = [root_B, *[root_B] * (len(parents) - 1)], []
        uniform_BN = noise.draw(DRAFT, len(parents))
        for node in range(len(parents)):
            draft_probs.append(probs(self.draft_VW[tokens[node]], sampling))
            if below := [child for child, parent in enumerate(parents) if parent == node]:
                best_BC = draft_probs[-1].argsort(dim=-1, descending=True, stable=True)
                chosen_BC = draw_children(draft_probs[-1], uniform_BN[:, below]) if drawn else best_BC
                for place, child in enumerate(below):
                    tokens[child] = self.vocab_W[chosen_BC[:, place]]
        parents_BN = torch.tensor(parents).expand(len(root_B), -1)
        nodes_B = len(parents) - noise.keys_B % 3
        tokens_BN = torch.stack(tokens, 1).where(torch.arange(len(parents)) < nodes_B[:, None], 0)
        draft = Draft(tokens_BN, parents_BN, nodes_B)
        return replace(draft, draft_probs_BMW=torch.stack(draft_probs, 1), vocab_W=self.vocab_W) if drawn else draft


# --- Edges ----------------------------------------------------------------------------------------------------------


def no_noise(rows: int) -> Noise:
    return Noise(torch.arange(rows) * 7919, torch.zeros(rows, dtype=torch.long))


def verify(draft: Draft, *arguments: Any) -> Verdict:
    """Verify, and raise what was found."""
    verdict = verifier.verify(draft, *arguments)
    verifier.refuse(verdict.fault_B.tolist(), draft.tokens_BN.shape[1])
    return verdict


def facts(verdict: Verdict) -> list[object]:
    return [
        [[n for n in p if n >= 0] for p in verdict.path_BD.tolist()],
        verdict.accepted_B.tolist(),
        verdict.next_B.tolist(),
    ]


def test_a_greedy_tree_that_repeats_a_token_is_followed_where_it_goes_deeper() -> None:
    # root -> {3, 3}, and only the second 3 goes on as the target does.
    tokens, parents = torch.tensor([[5, 3, 3, 1, 4]]), torch.tensor([[-1, 0, 0, 1, 2]])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 4, 4, 0, 2]]), 10).float()
    verdict = verify(Draft(tokens, parents, torch.tensor([5])), logits, Sampling(), no_noise(1))
    assert facts(verdict) == [[[0, 2, 4]], [2], [2]]


def test_the_target_alone_draws_with_the_first_number_of_its_position() -> None:
    """What a text depends on: its key and the position, nothing of the draft."""
    keys, position, logits = torch.arange(50) * 31, torch.arange(50) + 7, torch.randn(50, 1, V)
    alone = Draft.chain(torch.zeros(50, dtype=torch.long), torch.zeros(50, 0, dtype=torch.long))
    expected = draw(probs(logits[:, 0], Sampling(1.0)), uniforms(keys, position, EMIT, 1)[:, 0])
    assert torch.equal(verify(alone, logits, Sampling(1.0), Noise(keys, position)).next_B, expected)
    # A drafter of chains that may draft nothing hands over no distribution.
    drawn = replace(alone, draft_probs_BMW=torch.zeros(50, 0, 4), vocab_W=torch.tensor([0, 1, 3, 4]))
    assert torch.equal(verify(drawn, logits, Sampling(1.0), Noise(keys, position)).next_B, expected)


def test_tokens_outside_the_draft_vocabulary_are_skipped() -> None:
    """The second of two children in a tree, and the second token of a chain; no residual is taken for them."""
    vocab, draft_probs = torch.tensor([1, 2]), torch.tensor([1e-6, 1.0]).expand(300, 2, -1)
    logits = torch.tensor([3.0, -20.0, -20.0, 3.0]).expand(300, 3, -1)
    for parents in ((-1, 0, 0), (-1, 0, 1)):
        tokens = torch.tensor([2, 3, 0]).expand(300, -1)
        draft = Draft(tokens, torch.tensor(parents).expand(300, -1), torch.full((300,), 3), draft_probs, vocab)
        verdict = verify(draft, logits, Sampling(1.0), no_noise(300))
        assert int(verdict.accepted_B.sum()) == 0
        # The target's distribution, not what a residual would leave of it.
        assert float((verdict.next_B == 0).float().mean()) == pytest.approx(0.5, abs=0.1)


def test_a_draft_that_equals_the_target_leaves_no_residual_and_then_the_distribution_stays() -> None:
    p = probs(torch.randn(20, V), Sampling(1.0))
    torch.testing.assert_close(verifier.residual(p, p, None), p, rtol=0, atol=0)
    torch.testing.assert_close(verifier.residual(p, 1.001 * p, torch.arange(V)), p, rtol=0, atol=0)
    left = verifier.residual(p, p.roll(1, 1), None)
    torch.testing.assert_close(left.sum(1), torch.ones(20))


BAD = [torch.nan, torch.inf, -1.0, 0.0]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_distribution_that_is_none_is_refused_with_its_depth(shape: str, bad: float) -> None:
    toy, noise, sampling = Toy(), no_noise(400), Sampling(1.0)
    draft = toy.propose(shape, torch.full((400,), ROOT), noise, sampling, drawn=True)
    logits = toy.target_VV[draft.tokens_BN]
    assert draft.draft_probs_BMW is not None
    drafted = torch.searchsorted(toy.vocab_W, draft.tokens_BN)
    for depth, parent in ((1, 0), (2, 1)):
        child = list(SHAPES[shape]).index(parent)
        draft_probs = draft.draft_probs_BMW.clone()
        draft_probs[:, parent].scatter_(1, drafted[:, child : child + 1].clamp(max=3), bad)
        with pytest.raises(UserError, match=f"distribution of the token at depth {depth} is no distribution"):
            verify(replace(draft, draft_probs_BMW=draft_probs), logits, sampling, noise)
    # Nobody reads the distribution at temperature 0, nor that of nodes which are padding.
    verify(replace(draft, draft_probs_BMW=draft_probs), logits, Sampling(), noise)
    verify(replace(draft, draft_probs_BMW=draft_probs, nodes_B=torch.full((400,), 2)), logits, sampling, noise)


@pytest.mark.parametrize("shape", SHAPES)
def test_nan_beside_the_drafted_token_is_refused_where_it_would_reach_the_text(shape: str) -> None:
    toy, noise, sampling = Toy(), no_noise(400), Sampling(1.0)
    draft = toy.propose(shape, torch.full((400,), ROOT), noise, sampling, drawn=True)
    assert draft.draft_probs_BMW is not None
    draft_probs = draft.draft_probs_BMW.clone()
    other = (torch.searchsorted(toy.vocab_W, draft.tokens_BN[:, 1:2].contiguous()) + 1) % 4
    draft_probs[:, 0].scatter_(1, other, torch.nan)
    with pytest.raises(UserError, match="depth 1 is no distribution"):
        verify(replace(draft, draft_probs_BMW=draft_probs), toy.target_VV[draft.tokens_BN], sampling, noise)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("typical", [None, Typical()], ids=["exact", "typical"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_that_are_not_finite_are_named(shape: str, typical: Typical | None, sampling: Sampling) -> None:
    toy, noise = Toy(), no_noise(3)
    draft = toy.propose(shape, torch.full((3,), ROOT), noise, Sampling(1.0), drawn=False)
    draft = replace(draft, nodes_B=torch.tensor([2, 3, 1]))
    good = toy.target_VV[draft.tokens_BN]
    for bad in (torch.nan, torch.inf):
        logits = good.clone()
        logits[1, 2, 3] = logits[2, 0, 0] = bad
        with pytest.raises(NotFinite, match="node 2 of row 1") as caught:
            verify(draft, logits, sampling, noise, typical)
        assert (caught.value.row, caught.value.node) == (1, 2)
    logits = good.clone()
    logits[2, 0] = -torch.inf
    with pytest.raises(NotFinite, match="node 0 of row 2"):
        verify(draft, logits, sampling, noise, typical)
    # A token that can never be is fine, and so is anything on padding.
    logits = good.clone()
    logits[:, :, 3] = -torch.inf
    expected = facts(verify(draft, logits, sampling, noise, typical))
    logits[0, 2:], logits[2, 1:] = torch.nan, torch.nan
    assert facts(verify(draft, logits, sampling, noise, typical)) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_typical_acceptance_reads_penalized_logits(shape: str) -> None:
    toy, noise, rule = Toy(), no_noise(300), Typical(0.3, 0.9)
    sampling = Sampling(0.8, repetition_penalty=3.0)
    draft = toy.propose(shape, torch.full((300,), ROOT), noise, sampling, drawn=False)
    logits = 2 * torch.randn(300, draft.tokens_BN.shape[1], V, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(300, V, dtype=torch.bool).index_fill_(1, torch.tensor([PROMPT, ROOT]), True)
    found = facts(verify(draft, logits, sampling, noise, rule, seen))
    penalized = verifier.penalize_nodes(draft, logits, seen, 3.0)
    assert found == facts(verify(draft, penalized, Sampling(0.8), noise, rule))
    assert found != facts(verify(draft, logits, Sampling(0.8), noise, rule))
