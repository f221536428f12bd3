"""Every way of verifying a draft leaves the target's distribution unchanged: the rule by enumeration, `verify` against the rule."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.decoder import verify as verifier
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.sampling import ACCEPT, EMIT, Noise, Sampling, draw_children, probs
from draftsmith.decoder.verify import verify
from tests.decoder.plain_rule import (
    Coin,
    Uniforms,
    Weights,
    normalised,
    outcomes,
    plain_probs,
    verify_plainly,
)
from tests.pretended_gpu.cuda import pretended_gpu

SETTINGS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.3, top_k=3),
    Sampling(0.8, top_p=0.75),
    Sampling(1.1, min_p=0.3),
    Sampling(0.9, repetition_penalty=1.6),
    Sampling(0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=0.7),
]

# --- The rule, enumerated -------------------------------------------------------------------------------------------

V, PROMPT = 4, (1, 2)
BUSH: dict[tuple[int, ...], int] = {(): 3, (0,): 2, (1,): 1, (0, 1): 1}
"""How many children a node has; a node is the path of child numbers that leads to it."""
CHAIN = {(): 1, (0,): 1, (0, 0): 1}


@cache
def toy_probs(who: str, text: tuple[int, ...], sampling: Sampling) -> Weights:
    """The distribution of the token after `text`, under the target or the draft (which takes no notice of a penalty)."""
    logits = 1.5 * np.random.default_rng(crc32(repr(text).encode())).normal(size=V)
    if who == "draft":
        logits = 0.5 * logits + np.random.default_rng(crc32(repr(("draft", text)).encode())).normal(size=V)
    return plain_probs(logits.tolist(), sampling, set(text) if who == "target" else set())


@dataclass
class Growing:
    """A draft whose nodes are made when the rule asks for them: what nobody looks at makes no difference."""

    shape: dict[tuple[int, ...], int]
    sampling: Sampling
    coin: Coin | None  # None: a node's children are its most likely tokens
    places: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    texts: list[tuple[int, ...]] = field(default_factory=lambda: [PROMPT])

    def children(self, node: int) -> list[int]:
        q, count = toy_probs("draft", self.texts[node], self.sampling), self.shape.get(self.places[node], 0)
        tokens = sorted(range(V), key=lambda token: -q[token])[:count]
        if self.coin is not None:
            tokens = []
            for _ in range(count):
                # With no mass left some token is named all the same.
                tokens.append(self.coin.draw(("draft", 0), q) if any(q) else V - 1)
                q = normalised([0.0 if token == tokens[-1] else x for token, x in enumerate(q)])
        first = len(self.texts)
        self.places += [(*self.places[node], i) for i in range(count)]
        self.texts += [(*self.texts[node], token) for token in tokens]
        return list(range(first, first + count))

    def token(self, node: int) -> int:
        return self.texts[node][-1]

    def probs(self, node: int) -> Weights | None:
        return None if self.coin is None else toy_probs("draft", self.texts[node], self.sampling)


def emitted_probs(shape: dict[tuple[int, ...], int], sampling: Sampling, drawn: bool) -> np.ndarray:
    """The joint distribution [V, V, V] of the next three tokens: of one round, and of the target where the round emits fewer (so
    that by induction it is the distribution of any number of rounds)."""

    def play(coin: Coin) -> tuple[int, ...]:
        draft = Growing(shape, sampling, coin if drawn else None)
        path, token = verify_plainly(draft, lambda path: toy_probs("target", draft.texts[path[-1]], sampling), coin)
        return (*draft.texts[path[-1]][len(PROMPT) :], token)

    found = np.zeros((V,) * 3)
    for tokens, chance in outcomes(play):
        for more in product(range(V), repeat=max(0, 3 - len(tokens))):
            whole = (*tokens, *more)[:3]
            found[whole] += chance * chance_of(whole, len(tokens), sampling)
    return found


def chance_of(tokens: tuple[int, ...], start: int, sampling: Sampling) -> float:
    """The target's probability of tokens[start:] given those before."""
    return float(
        np.prod([toy_probs("target", PROMPT + tokens[:i], sampling)[tokens[i]] for i in range(start, len(tokens))])
    )


def target_probs(sampling: Sampling) -> np.ndarray:
    """The joint distribution [V, V, V] of the target's next three tokens."""
    return np.array([chance_of(x, 0, sampling) for x in product(range(V), repeat=3)]).reshape((V,) * 3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.8), *SETTINGS], ids=str)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "most likely"])
@pytest.mark.parametrize("shape", [BUSH, CHAIN], ids=["bush", "chain"])
def test_the_rule_is_exact(shape: dict[tuple[int, ...], int], drawn: bool, sampling: Sampling) -> None:
    """Over all drafts and all decisions, to 1e-12."""
    found = emitted_probs(shape, sampling, drawn)
    assert abs(found - target_probs(sampling)).max() < 1e-12


# --- verify against the rule ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Noise):
    """Noise with known numbers: [B, N] for accepting and for emitting."""

    accept_BN: Tensor = field(default_factory=lambda: torch.zeros(0))
    emit_BN: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, accept_BN: Tensor, emit_BN: Tensor) -> "Given":
        zeros_B = torch.zeros(len(accept_BN), dtype=torch.long)
        return cls(zeros_B, zeros_B, accept_BN=accept_BN, emit_BN=emit_BN)

    def draw(self, stream: int, count: int) -> Tensor:
        return {ACCEPT: self.accept_BN, EMIT: self.emit_BN}[stream][:, :count]


@dataclass(frozen=True)
class Case:
    """Drafts with everything that verifying them needs."""

    draft: Draft
    logits: Tensor
    seen: Tensor
    noise: Given


NODES, WIDE, COLUMNS = 9, 7, torch.tensor([0, 1, 3, 4, 6])
KINDS = ("drawn tree", "drawn chain", "deterministic tree", "deterministic chain")


def random_case(kind: str, rows: int, sampling: Sampling, seed: int, nodes: int = NODES) -> Case:
    """Trees of random shapes, or chains, of random lengths; drawn ones have draft distributions over COLUMNS."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * torch.randn(rows, nodes, WIDE, generator=generator)
    parents = torch.arange(-1, nodes - 1).repeat(rows, 1)
    if "tree" in kind:
        # Mostly from the first nodes, so that there are many siblings.
        parents[:, 1:] = (rand(rows, nodes - 1).pow(2) * torch.arange(1, nodes)).long()
    sibling = torch.stack([(parents[:, :n] == parents[:, n : n + 1]).sum(1) for n in range(nodes)], 1)
    row, above = torch.arange(rows)[:, None], parents.clamp(min=0)
    draft_logits = 0.6 * logits[..., COLUMNS] + torch.randn(rows, nodes, len(COLUMNS), generator=generator)
    draft_probs = probs(draft_logits, replace(sampling, temperature=sampling.temperature or 1.0))
    drawn = draw_children(draft_probs, rand(rows, nodes, nodes))
    best = draft_logits.argsort(-1, descending=True)
    tokens = COLUMNS[drawn if "drawn" in kind else best][
        row, above, sibling.clamp(max=nodes - 1 if "drawn" in kind else 4)
    ]
    tokens[:, 0] = torch.randint(WIDE, (rows,), generator=generator)
    count = torch.randint(1, nodes + 1, (rows,), generator=generator)
    tokens[torch.arange(nodes) >= count[:, None]] = 0
    seen = (rand(rows, WIDE) < 0.3).scatter(1, tokens[:, :1], True)
    with_probs = (draft_probs, COLUMNS) if "drawn" in kind else (None, None)
    return Case(
        Draft(tokens, parents, count, *with_probs), logits, seen, Given.of(rand(rows, nodes), rand(rows, nodes))
    )


@dataclass(frozen=True)
class Row:
    """One row of a case as the plain rule reads it."""

    tokens: list[int]
    parents: list[int]
    draft_probs: list[Weights] | None
    logits: list[Weights]
    seen: frozenset[int]
    sampling: Sampling

    @classmethod
    def of(cls, case: Case, b: int, sampling: Sampling) -> "Row":
        draft, count = case.draft, int(case.draft.nodes_B[b])
        draft_probs = None
        if draft.draft_probs_BMW is not None and not sampling.greedy:
            assert draft.vocab_W is not None
            wide = torch.zeros(draft.draft_probs_BMW.shape[1], WIDE, dtype=torch.float64)
            draft_probs = wide.index_copy(1, draft.vocab_W, draft.draft_probs_BMW[b].double()).tolist()
        seen = frozenset(case.seen[b].nonzero()[:, 0].tolist())
        return cls(
            draft.tokens_BN[b, :count].tolist(),
            draft.parents_BN[b, :count].tolist(),
            draft_probs,
            case.logits[b].double().tolist(),
            seen,
            sampling,
        )

    def children(self, node: int) -> list[int]:
        return [n for n, parent in enumerate(self.parents) if n > 0 and parent == node]

    def token(self, node: int) -> int:
        return self.tokens[node]

    def probs(self, node: int) -> Weights | None:
        return None if self.draft_probs is None else self.draft_probs[node]

    def p_after(self, path: list[int]) -> Weights:
        return plain_probs(self.logits[path[-1]], self.sampling, self.seen | {self.tokens[n] for n in path})

    def play(self, coin: Coin) -> tuple[list[int], int]:
        return verify_plainly(self, self.p_after, coin)


def decisions(case: Case, sampling: Sampling) -> list[tuple[list[int], int]]:
    """What `verify` decides, in the form of the plain rule."""
    verdict = verify(case.draft, case.logits, sampling, case.noise, seen_BV=case.seen)
    paths = [[n for n in path if n >= 0] for path in verdict.path_BD.tolist()]
    assert verdict.accepted_B.tolist() == [len(path) - 1 for path in paths]
    return list(zip(paths, verdict.next_B.tolist(), strict=True))


def disagreements(case: Case, sampling: Sampling) -> tuple[int, int, set[int]]:
    """Rows where `verify` and the rule decide differently, rows too close to call, and lengths of accepted paths."""
    different, close, lengths = 0, 0, set()
    for b, found in enumerate(decisions(case, sampling)):
        coin = Uniforms({"accept": case.noise.accept_BN[b].tolist(), "emit": case.noise.emit_BN[b].tolist()})
        expected = Row.of(case, b, sampling).play(coin)
        if coin.margin < 1e-5:
            close += 1
        else:
            different += found != expected
            lengths.add(len(expected[0]))
    return different, close, lengths


ROWS = 250


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.8), *SETTINGS], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_decision_is_that_of_the_rule(kind: str, sampling: Sampling) -> None:
    case = random_case(kind, ROWS, sampling, seed=crc32(f"{kind} {sampling}".encode()))
    different, close, lengths = disagreements(case, sampling)
    assert different == 0
    assert close < 0.02 * ROWS
    assert {1, 2, 3} <= lengths


@pytest.mark.parametrize("sampling", [Sampling(repetition_penalty=1.8), SETTINGS[0], SETTINGS[6]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_on_the_cpu(kind: str, sampling: Sampling) -> None:
    case = random_case(kind, 40, sampling, seed=11)
    here, draft = decisions(case, sampling), case.draft
    with pretended_gpu():
        far = torch.device("cuda")
        draft_probs = None if draft.draft_probs_BMW is None else draft.draft_probs_BMW.to(far)
        vocab = None if draft.vocab_W is None else draft.vocab_W.to(far)
        moved = Draft(draft.tokens_BN.to(far), draft.parents_BN.to(far), draft.nodes_B.to(far), draft_probs, vocab)
        noise = Given.of(case.noise.accept_BN.to(far), case.noise.emit_BN.to(far))
        assert decisions(Case(moved, case.logits.to(far), case.seen.to(far), noise), sampling) == here


# --- Mutants of verify ----------------------------------------------------------------------------------------------


def _all_disagreements() -> int:
    return sum(
        disagreements(random_case(kind, ROWS, sampling, seed=3), sampling)[0]
        for kind, sampling in product(KINDS, (Sampling(), Sampling(0.7)))
    )


def _q_of(columns: Tensor | None, q: Tensor, like: Tensor) -> Tensor:
    return q if columns is None else torch.zeros_like(like).index_copy_(1, columns, q)


def _torch_mutants() -> Iterator[tuple[str, Any, str, Any]]:
    right_residual, right_without = verifier.residual, verifier.without

    def not_renormalised(p: Tensor, q: Tensor, vocab: Tensor | None) -> Tensor:
        return (p - _q_of(vocab, q, p)).clamp(min=0)

    def removed_first(p: Tensor, q: Tensor, column: Tensor, vocab: Tensor | None) -> tuple[Tensor, Tensor]:
        rest = right_without(q, column)
        return right_residual(p, rest, vocab), rest

    def q_unchanged(p: Tensor, q: Tensor, column: Tensor, vocab: Tensor | None) -> tuple[Tensor, Tensor]:
        return right_residual(p, q, vocab), q

    def everything(draft: Draft) -> Tensor:
        return torch.ones_like(draft.tokens_BN, dtype=torch.bool)

    yield "residual not renormalised", verifier, "residual", not_renormalised
    yield "sibling removed before the residual", verifier, "reject", removed_first
    yield "q left unchanged", verifier, "reject", q_unchanged
    yield "padding accepted", Draft, "valid_BN", property(everything)


@pytest.mark.parametrize("name", [mutant[0] for mutant in _torch_mutants()])
def test_a_wrong_step_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, owner, attribute, wrong = next(mutant for mutant in _torch_mutants() if mutant[0] == name)
    monkeypatch.setattr(owner, attribute, wrong)
    assert _all_disagreements() > 3
