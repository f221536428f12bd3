"""verify's law, by hundreds of thousands of rounds without a model, and mutants that the tests must catch."""

import pytest
import torch
from torch import Tensor

from draftsmith.eval.draft import Draft
from draftsmith.eval.noise import DRAFT, row_key, uniforms
from draftsmith.eval.sampling import Sampling, draw, law
from draftsmith.eval.verify import Noise, Verdict, verify

ROUNDS, V, K = 200_000, 12, 3
SETTINGS = [Sampling(1.0), Sampling(1.3, top_k=5), Sampling(0.6, top_p=0.7)]


class Toy:
    """A target and a drafter whose laws depend on the last token only, with a draft vocab of 8 of 12 tokens."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target_VV = 1.5 * torch.randn(V, V, generator=generator)
        self.vocab_W = torch.tensor([0, 1, 3, 4, 6, 8, 9, 11])
        self.draft_VW = 0.6 * self.target_VV[:, self.vocab_W] + torch.randn(V, 8, generator=generator)

    def propose(self, root_B: Tensor, keys_B: Tensor, counter_B: Tensor, sampling: Sampling) -> Draft:
        last_B, tokens, laws = root_B, [], []
        uniform_BK = uniforms(keys_B, counter_B, DRAFT, K)
        for k in range(K):
            laws.append(law(self.draft_VW[last_B], sampling))
            last_B = self.vocab_W[draw(laws[-1], uniform_BK[:, k])]
            tokens.append(last_B)
        return Draft.chain(root_B, torch.stack(tokens, 1), None, torch.stack(laws, 1), self.vocab_W)

    def logits(self, draft: Draft) -> Tensor:
        return self.target_VV[draft.tokens_BN]

    def joint(self, root: int, sampling: Sampling) -> Tensor:
        """The target's law of the next two tokens, [V, V]."""
        p_VV = law(self.target_VV, sampling)
        return p_VV[root][:, None] * p_VV


def emitted_pairs(toy: Toy, sampling: Sampling, check: "type[Rule]", rounds: int = ROUNDS) -> Tensor:
    """Run rounds until every row has two tokens; return their joint histogram, [V, V]."""
    keys_B = torch.arange(rounds) * 7919 + row_key(1, "law")
    root_B = torch.full((rounds,), 2)
    draft = toy.propose(root_B, keys_B, torch.zeros_like(keys_B), sampling)
    verdict = check.verify(draft, toy.logits(draft), sampling, Noise(keys_B, torch.zeros_like(keys_B)))
    first_B = torch.where(verdict.accepted_B > 0, draft.tokens_BN[:, 1], verdict.next_B)
    # A second round from the first token, for rows whose first round emitted just one.
    again = toy.propose(first_B, keys_B, torch.ones_like(keys_B), sampling)
    second = check.verify(again, toy.logits(again), sampling, Noise(keys_B, torch.ones_like(keys_B)))
    fresh_B = torch.where(second.accepted_B > 0, again.tokens_BN[:, 1], second.next_B)
    in_first_B = torch.where(verdict.accepted_B > 1, draft.tokens_BN[:, 2], verdict.next_B)
    second_B = torch.where(verdict.accepted_B > 0, in_first_B, fresh_B)
    return torch.bincount(first_B * V + second_B, minlength=V * V).view(V, V) / rounds


class Rule:
    """The shipped rule."""

    verify = staticmethod(verify)


def distance(toy: Toy, sampling: Sampling, rule: type[Rule]) -> float:
    """Total variation between the emitted pairs and the target's law."""
    return float((emitted_pairs(toy, sampling, rule) - toy.joint(2, sampling)).abs().sum() / 2)


# 144 cells and 200k rounds leave a total variation of about 0.4 * sqrt(144 / 200k) = 0.011 by chance.
LIMIT = 0.016


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sampled_chain_has_the_targets_law(sampling: Sampling) -> None:
    assert distance(Toy(), sampling, Rule) < LIMIT


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_deterministic_chain_has_the_targets_law(sampling: Sampling) -> None:
    toy = Toy(3)

    class Greedy(Toy):
        def propose(self, root_B: Tensor, keys_B: Tensor, counter_B: Tensor, sampling: Sampling) -> Draft:
            last_B, tokens = root_B, []
            for _ in range(K):
                last_B = toy.vocab_W[toy.draft_VW[last_B].argmax(-1)]
                tokens.append(last_B)
            return Draft.chain(root_B, torch.stack(tokens, 1))

    assert distance(Greedy(3), sampling, Rule) < LIMIT


class BonusIgnoresTemperature(Rule):
    """The bonus is drawn from the raw softmax."""

    @staticmethod
    def verify(draft: Draft, logits: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
        verdict = verify(draft, logits, sampling, noise)
        everything = draw(law(logits[:, -1], Sampling(1.0)), noise.draw(2, 1)[:, 0])
        full_B = verdict.accepted_B == K
        return Verdict(verdict.path_BD, verdict.accepted_B, torch.where(full_B, everything, verdict.next_B))


class ResidualIsTheTargetsLaw(Rule):
    """A rejection samples p instead of norm((p - q)+)."""

    @staticmethod
    def verify(draft: Draft, logits: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
        verdict = verify(draft, logits, sampling, noise)
        row = torch.arange(len(verdict.next_B))
        p_BV = law(logits[row, verdict.accepted_B], sampling)
        return Verdict(verdict.path_BD, verdict.accepted_B, draw(p_BV, noise.draw(2, 1)[:, 0]))


class ResidualNotRenormalised(Rule):
    """The residual's missing mass falls on the last token."""

    @staticmethod
    def verify(draft: Draft, logits: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
        verdict = verify(draft, logits, sampling, noise)
        assert draft.laws_BKW is not None
        assert draft.vocab_W is not None
        row = torch.arange(len(verdict.next_B))
        p_BV = law(logits[row, verdict.accepted_B], sampling)
        q_BW = draft.laws_BKW[row, verdict.accepted_B.clamp(max=K - 1)]
        residual_BV = p_BV.scatter_add(1, draft.vocab_W.expand(len(row), -1), -q_BW).clamp(min=0)
        residual_BV[:, -1] += 1 - residual_BV.sum(1)
        wrong_B = draw(residual_BV, noise.draw(2, 1)[:, 0])
        return Verdict(
            verdict.path_BD, verdict.accepted_B, torch.where(verdict.accepted_B < K, wrong_B, verdict.next_B)
        )


class AcceptIgnoresDraftLaw(Rule):
    """Takes q to be 1 everywhere: accepts with probability p(x), and leaves an empty residual."""

    @staticmethod
    def verify(draft: Draft, logits: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
        assert draft.laws_BKW is not None
        one = torch.ones_like(draft.laws_BKW)
        return verify(
            Draft(draft.tokens_BN, draft.parents_BN, draft.count_B, one, draft.vocab_W), logits, sampling, noise
        )


@pytest.mark.parametrize(
    ("mutant", "sampling"),
    [
        (BonusIgnoresTemperature, Sampling(0.5)),
        (ResidualIsTheTargetsLaw, Sampling(1.0)),
        (ResidualNotRenormalised, Sampling(1.0)),
        (AcceptIgnoresDraftLaw, Sampling(1.0)),
    ],
)
def test_mutants_are_caught(mutant: type[Rule], sampling: Sampling) -> None:
    if mutant is BonusIgnoresTemperature:
        # Pairs end before the bonus of a chain of 3: look at the token after a fully accepted chain instead.
        assert bonus_distance(mutant, sampling) > 5 * LIMIT
        assert bonus_distance(Rule, sampling) < LIMIT
    else:
        assert distance(Toy(), sampling, mutant) > 2 * LIMIT


def bonus_distance(rule: type[Rule], sampling: Sampling) -> float:
    """Total variation of the bonus token's law, for chains whose drafts are always accepted (q = p)."""
    toy = Toy()
    toy.vocab_W = torch.arange(V)
    toy.draft_VW = toy.target_VV
    keys_B = torch.arange(ROUNDS) * 104729
    zero_B = torch.zeros_like(keys_B)
    draft = toy.propose(torch.full((ROUNDS,), 2), keys_B, zero_B, sampling)
    verdict = rule.verify(draft, toy.logits(draft), sampling, Noise(keys_B, zero_B))
    full_B = verdict.accepted_B == K
    assert full_B.float().mean() > 0.99
    last_B, next_B = draft.tokens_BN[full_B, -1], verdict.next_B[full_B]
    pairs_VV = torch.bincount(last_B * V + next_B, minlength=V * V).view(V, V) / full_B.sum()
    expected_VV = (torch.bincount(last_B, minlength=V) / full_B.sum())[:, None] * law(toy.target_VV, sampling)
    return float((pairs_VV - expected_VV).abs().sum() / 2)


def test_greedy_tree_takes_the_longest_matching_path() -> None:
    # root 5 -> {7, 3}, 3 -> {1, 4}, 4 -> {9}; the target continues 5 with 3, 3 with 4, 4 with 2.
    tokens = torch.tensor([[5, 7, 3, 1, 4, 9]])
    parents = torch.tensor([[-1, 0, 0, 2, 2, 4]])
    logits = torch.zeros(1, 6, 10)
    for node, token in enumerate([3, 0, 4, 0, 2, 0]):
        logits[0, node, token] = 1
    noise = Noise(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    verdict = verify(Draft(tokens, parents, torch.tensor([6])), logits, Sampling(), noise)
    assert verdict.path_BD[0, :3].tolist() == [0, 2, 4]
    assert verdict.accepted_B.tolist() == [2]
    assert verdict.next_B.tolist() == [2]


def test_padding_nodes_are_never_accepted() -> None:
    """Token 0 on a padding node is not a draft, even where the target wants token 0."""
    draft = Draft.chain(torch.tensor([4, 4]), torch.zeros(2, 3, dtype=torch.long), torch.tensor([0, 2]))
    logits = torch.zeros(2, 4, 6)
    logits[..., 0] = 5
    noise = Noise(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    assert verify(draft, logits, Sampling(), noise).accepted_B.tolist() == [0, 2]
    laws = torch.full((2, 3, 6), 1e-9)
    laws[..., 0] = 1.0
    sampled = Draft(draft.tokens_BN, draft.parents_BN, draft.count_B, laws)
    logits[..., 0] = 50
    assert verify(sampled, logits, Sampling(1.0), noise).accepted_B.tolist() == [0, 2]
