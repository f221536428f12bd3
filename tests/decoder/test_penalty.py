"""The repetition penalty: what counts as seen in a draft and in a text, and exact acceptance of penalized text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

import numpy as np
import pytest
import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.sampling import Sampling, penalize
from draftsmith.decoder.trees import StaticTree
from draftsmith.decoder.verify import penalize_nodes
from draftsmith.errors import UserError
from draftsmith.eval.simulate import acceptance as simulator
from draftsmith.eval.simulate.acceptance import (
    acceptance,
    find_answers,
    seen_in_text,
    simulate,
)
from draftsmith.heads.base import HeadOutput, StepOutput
from draftsmith.target.target import TargetHead
from tests.decoder.plain_rule import Coin, Weights, outcomes, plain_probs, verify_plainly
from tests.pretended_gpu.cuda import pretended_gpu

V, EOS, LIMIT, PROMPT = 5, 4, 5, (1, 0)
SETTINGS = [Sampling(1.0, repetition_penalty=1.7), Sampling(0.8, top_p=0.95, min_p=0.05, repetition_penalty=0.6)]


def test_a_node_has_seen_what_was_committed_and_its_path() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (20, 6), generator=generator)
    parents = torch.tensor([-1, 0, 0, 1, 1, 3]).expand(20, -1)
    committed = (torch.rand(20, 9, generator=generator) < 0.2).scatter(1, tokens[:, :1], True)
    logits = torch.randn(20, 6, 9, generator=generator)
    before = logits.clone()
    found = penalize_nodes(Draft(tokens, parents, torch.full((20,), 6)), logits, committed, 1.5)
    assert torch.equal(logits, before)
    for b, row in enumerate(tokens.tolist()):
        for node, path in enumerate([[], [1], [2], [1, 3], [1, 4], [1, 3, 5]]):
            seen = set(committed[b].nonzero()[:, 0].tolist()) | {row[n] for n in path}
            for token, x in enumerate(logits[b, node].tolist()):
                expected = x if token not in seen else x * 1.5 if x < 0 else x / 1.5
                assert float(found[b, node, token]) == pytest.approx(expected, rel=1e-6)
    # A root alone needs no token of its own.
    alone = Draft.chain(torch.full((20,), -5), torch.zeros(20, 0, dtype=torch.long))
    once = penalize_nodes(alone, logits[:, :1], committed, 1.5)
    assert torch.equal(once[:, 0], penalize(logits[:, 0], committed, 1.5))


def test_a_text_has_seen_its_own_document_up_to_the_place() -> None:
    ids = torch.tensor([[1, 2, 2, 5, 6, 7, 0], [4, 4, 3, 1, 1, 8, 2]])
    document = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 1, 1, 1, 2, 2]])
    found = seen_in_text(packed(ids, document, torch.zeros(2, 7, 9)), torch.tensor([0, 2, 3, 5, 7, 8, 11, 13]), 9)
    expected = [{1}, {1, 2}, {5}, {5, 6, 7}, {4}, {4}, {3, 1}, {8, 2}]
    assert [set(row.nonzero()[:, 0].tolist()) for row in found] == expected
    with pretended_gpu():
        far = torch.device("cuda")
        moved = packed(ids.to(far), document.to(far), torch.zeros(2, 7, 9, device=far))
        assert torch.equal(seen_in_text(moved, torch.tensor([0, 2, 3, 5, 7, 8, 11, 13], device=far), 9).cpu(), found)


def packed(
    ids: torch.Tensor, document: torch.Tensor, last: torch.Tensor, mask: torch.Tensor | None = None
) -> TrainBatch:
    """A batch whose states are the target's logits themselves."""
    return TrainBatch(
        ids,
        torch.zeros_like(ids, dtype=torch.bool) if mask is None else mask,
        document,
        torch.zeros_like(ids),
        torch.zeros(*ids.shape, 1),
        last,
        last.argmax(-1),
        last.logsumexp(-1),
    )


# --- A toy whose distributions depend on the whole text ----------------------------------------------------------------------


@cache
def logits_after(who: str, text: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(2.0 * np.random.default_rng([0, crc32(repr((who, text)).encode())]).normal(size=V))


def p_after(text: tuple[int, ...], sampling: Sampling) -> Weights:
    return plain_probs(logits_after("target", text), sampling, set(text))


def q_after(root: int, text: tuple[int, ...], sampling: Sampling) -> Weights:
    """A drafter's distribution may depend on where its round began, not only on the text so far."""
    return plain_probs(
        logits_after(f"draft {root}", text), Sampling(sampling.temperature, 0, sampling.top_p, sampling.min_p)
    )


def answers(text: tuple[int, ...], sampling: Sampling) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way that the target can go on from `text` to the end, with its probability."""
    if text[-1] == EOS or len(text) == len(PROMPT) + LIMIT:
        yield text, 1.0
        return
    for token, chance in enumerate(p_after(text, sampling)):
        if chance > 0:
            yield from ((whole, chance * rest) for whole, rest in answers((*text, token), sampling))


@dataclass
class ChainDraft:
    """Up to `length` tokens, drawn or the most likely ones, made as the rule asks for them."""

    text: tuple[int, ...]
    length: int
    sampling: Sampling
    coin: Coin | None
    tokens: list[int] = field(default_factory=list)

    def children(self, node: int) -> list[int]:
        if node == self.length:
            return []
        q = q_after(len(self.text), (*self.text, *self.tokens), self.sampling)
        self.tokens.append(q.index(max(q)) if self.coin is None else self.coin.draw(("draft", node), q))
        return [node + 1]

    def token(self, node: int) -> int:
        return self.tokens[node - 1]

    def probs(self, node: int) -> Weights | None:
        if self.coin is None:
            return None
        return q_after(len(self.text), (*self.text, *self.tokens[:node]), self.sampling)


@cache
def expected(text: tuple[int, ...], num_drafts: int, sampling: Sampling, drawn: bool) -> np.ndarray:
    """[rounds, accepted_K, reached_K] that decoding still takes after `text`, by following every draft and every decision."""
    left, counts = len(PROMPT) + LIMIT - len(text), np.zeros(1 + 2 * num_drafts)
    if text[-1] == EOS or left == 0:
        return counts

    def play(coin: Coin) -> tuple[int, tuple[int, ...]]:
        draft = ChainDraft(text, min(num_drafts, left), sampling, coin if drawn else None)
        path, token = verify_plainly(draft, lambda path: p_after((*text, *draft.tokens[: path[-1]]), sampling), coin)
        emitted = (*draft.tokens[: path[-1]], token)[:left]
        emitted = emitted[: emitted.index(EOS) + 1] if EOS in emitted else emitted
        return min(path[-1], len(emitted)), emitted

    counts[0] = 1
    for (accepted, emitted), chance in outcomes(play):
        counts[1 : 1 + accepted] += chance
        # What is emitted beyond the accepted drafts stands where the next draft was.
        counts[1 + num_drafts :][: len(emitted)] += chance
        counts += chance * expected(text + emitted, num_drafts, sampling, drawn)
    return counts


def forced(texts: list[tuple[int, ...]], num_drafts: int) -> tuple[HeadOutput, TrainBatch]:
    """What one pass over the texts gives: each in a row of its own, with a document of something else before it."""
    foreign, length = (2, 2, 3), 3 + len(PROMPT) + LIMIT
    ids = torch.tensor([[*foreign, *t, *[0] * (length - 3 - len(t))] for t in texts])
    place = torch.arange(length)
    end = torch.tensor([3 + len(t) for t in texts])[:, None]
    document = torch.where(place < 3, 0, 1).expand(len(texts), -1).masked_fill(place >= end, -1)
    mask = (place >= 3 + len(PROMPT)) & (place < end)
    target = torch.zeros(len(texts), length, V)
    for b, text in enumerate(texts):
        for n in range(1, len(text)):
            target[b, 2 + n] = torch.tensor(logits_after("target", text[:n]))
    steps = []
    for k in range(num_drafts):
        # Row t drafts x_{t+2+k}; its root x_{t+1} is a token of the answer.
        wanted = mask.roll(-1, 1) & mask.roll(-2 - k, 1) & (place < length - 2 - k)
        logits = [logits_after(f"draft {t - 1}", texts[b][: t - 1 + k]) for b, t in wanted.nonzero().tolist()]
        steps.append(StepOutput(k, wanted.flatten().nonzero()[:, 0], torch.tensor(logits).view(-1, V)))
    return HeadOutput(tuple(steps)), packed(ids, document, target, mask)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "most likely"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(repetition_penalty=2.0), *SETTINGS], ids=str)
def test_acceptance_is_exact_also_of_penalized_text(
    sampling: Sampling, drawn: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over every text, against every draft and decision of decoding; in pieces of 7 rows."""
    monkeypatch.setattr(simulator, "_CHUNK_ROWS", 7)
    start = (*PROMPT, 2)
    found = list(answers(start, sampling))
    output, batch = forced([text for text, _ in found], num_drafts)
    result = acceptance(output, batch, TargetHead(torch.eye(V)), None, sampling, greedy_drafts=not drawn)
    assert result.off_text == 0
    tallies = simulate(result.c_BLK, find_answers(batch), num_drafts)
    simulated = sum(
        chance * np.array([tally.rounds, *tally.accepted_K, *tally.reached_K])
        for tally, (_, chance) in zip(tallies, found, strict=True)
    )
    assert sum(chance for _, chance in found) == pytest.approx(1, abs=1e-12)
    drafted = drawn and not sampling.greedy
    assert simulated == pytest.approx(expected(start, num_drafts, sampling, drafted), abs=1e-5)
    plain = Sampling(sampling.temperature, 0, sampling.top_p, sampling.min_p)
    same = simulated[0] == pytest.approx(expected(start, num_drafts, plain, drafted)[0], abs=1e-3)
    assert same == (sampling == plain), "the penalty makes a difference here"


def test_greedy_text_is_compared_with_the_penalized_choice() -> None:
    sampling, start = Sampling(repetition_penalty=2.0), (*PROMPT, 2)
    ((penalized, _),), ((plain, _),) = answers(start, sampling), answers(start, Sampling())
    assert penalized != plain
    output, batch = forced([penalized, plain], 2)
    head, tree = TargetHead(torch.eye(V)), StaticTree.of("pair", [[0], [1], [0, 0]])
    off = sum(p_after(plain[:n], sampling)[plain[n]] == 0 for n in range(len(start), len(plain)))
    assert off > 0
    assert acceptance(output, batch, head, None, sampling).off_text == off
    assert acceptance(output, batch, head, None, sampling, tree=tree).off_text == off
    assert acceptance(*forced([penalized], 2), head, None, Sampling()).off_text > 0


def test_text_made_without_the_penalty_is_refused() -> None:
    """Its repeated token falls out of the top 1 once it is penalized."""
    text, sampling = (*PROMPT, 2, 2, 2), Sampling(1.0, top_k=1, repetition_penalty=2.0)
    output, batch = forced([text], 1)
    batch.last[:] = torch.tensor([0.0, 0.0, 4.0, 3.0, 0.0])
    head = TargetHead(torch.eye(V))
    assert acceptance(output, batch, head, None, Sampling(1.0, top_k=1)).off_text == 0
    with pytest.raises(UserError, match="repetition_penalty=2"):
        acceptance(output, batch, head, None, sampling)
