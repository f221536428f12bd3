"""Acceptance probabilities of packed rows, against one position at a time."""

import itertools
from dataclasses import replace

import pytest
import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling, probs
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.simulate.acceptance import Acceptance, _text_probabilities, acceptance, token_ranks
from draftsmith.heads.base import HeadOutput, StepOutput
from draftsmith.target.target import TargetHead
from tests.eval.simulate.test_acceptance import make_batch

W7, STEPS = 7, 3
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [-1], [0] * 3 + [1] * 9])
SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.7),
    Sampling(1.0),
    Sampling(0.6, top_k=3),
    Sampling(2.0, top_p=0.8, repetition_penalty=0.6),
]


def penalized(logits: torch.Tensor, batch: TrainBatch, at: int, sampling: Sampling) -> torch.Tensor:
    """The logits at a flat position after the repetition penalty on what its document holds so far."""
    ids, document = batch.ids.flatten(), batch.document.flatten()
    row = at // batch.ids.shape[1]
    logits = logits.clone()
    before = range(row * batch.ids.shape[1], at + 1)
    for token in {int(ids[i]) for i in before if document[i] == document[at]}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


def chances(logits: torch.Tensor, batch: TrainBatch, at: int, sampling: Sampling) -> torch.Tensor:
    """The target's distribution of the token after a flat position."""
    logits = penalized(logits, batch, at, sampling)
    return torch.eye(len(logits))[logits.argmax()] if sampling.greedy else probs(logits, sampling)


def packed_case(sampling: Sampling, seed: int = 0) -> tuple[TrainBatch, TargetHead]:
    """Two rows of two documents whose tokens the target has chosen with these settings."""
    generator = torch.Generator().manual_seed(seed)
    head = TargetHead(torch.eye(W7))
    last = 1.5 * torch.randn(2, 12, W7, generator=generator)
    batch = TrainBatch(
        ids=torch.randint(W7, (2, 12), generator=generator),
        mask=torch.ones(2, 12).bool(),
        document=DOCUMENTS,
        position=torch.arange(12).expand(2, -1),
        aux=torch.zeros(2, 12, 4),
        last=last,
        top1=last.argmax(-1),
        logsumexp=last.logsumexp(-1),
    )
    flat, document = batch.ids.view(-1), DOCUMENTS.flatten()
    for at in range(23):
        if document[at] == document[at + 1] >= 0 and at != 11:
            p = chances(last.flatten(0, 1)[at], batch, at, sampling)
            flat[at + 1] = int(torch.multinomial(p, 1, generator=generator))
    return batch, head


def rows_of(step: int) -> torch.Tensor:
    """The flat rows whose draft of that step lies in their own document."""
    document = DOCUMENTS.flatten()
    inside = [t for t in range(24) if t // 12 == (t + 2 + step) // 12 and document[t] >= 0]
    return torch.tensor([t for t in inside if document[t] == document[t + 2 + step]])


def drafts_of(width: int, seed: int = 1) -> HeadOutput:
    generator = torch.Generator().manual_seed(seed)
    logits = [2 * torch.randn(len(rows_of(k)), width, generator=generator) for k in range(STEPS)]
    return HeadOutput(tuple(StepOutput(k, rows_of(k), logits[k]) for k in range(STEPS)))


def check(found: Acceptance, expected: dict[tuple[int, int], float]) -> None:
    """Compare with {(flat row, step): probability}; everything else must be NaN."""
    c = found.c_BLK.flatten(0, 1)
    assert c.dtype == torch.float64
    assert {(t, k) for t, k in itertools.product(range(24), range(STEPS)) if not c[t, k].isnan()} == expected.keys()
    for (t, k), value in expected.items():
        assert float(c[t, k]) == pytest.approx(value, abs=1e-5), (t, k)


@pytest.mark.parametrize("vocab", [None, [0, 2, 3, 6]], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_chains_of_packed_rows(sampling: Sampling, greedy_drafts: bool, vocab: list[int] | None) -> None:
    batch, head = packed_case(sampling)
    ids = batch.ids.flatten()
    tokens = vocab or list(range(W7))
    output = drafts_of(len(tokens))
    stops = torch.zeros(len(rows_of(2)), dtype=torch.bool).index_fill_(0, torch.tensor([1, 3]), True)
    odds, one = torch.where(stops, -torch.inf, torch.inf), torch.tensor(1.0)
    output = HeadOutput((*output.steps[:2], replace(output.steps[2], confidence=odds, temperature=one)))
    expected = {}
    for step in output.steps:
        for r, t in enumerate(step.rows.tolist()):
            token = int(ids[t + 2 + step.offset])
            q = torch.zeros(W7)
            if sampling.greedy or greedy_drafts:
                q[tokens[int(step.logits[r].argmax())]] = 1
                expected[t, step.offset] = float(q[token])
            else:
                q[tokens] = probs(step.logits[r], sampling)
                at = t + 1 + step.offset
                p = chances(batch.last.flatten(0, 1)[at], batch, at, sampling)
                expected[t, step.offset] = min(1.0, float(q[token] / p[token]))
            if step.offset == 2 and stops[r]:
                del expected[t, step.offset]
    draft_vocab = None if vocab is None else torch.tensor(vocab)
    rule = LengthRule((1e-9,) * 3)
    found = acceptance(output, batch, head, draft_vocab, sampling, greedy_drafts=greedy_drafts, rule=rule)
    assert found.off_text == 0
    check(found, expected)
    assert len({round(value, 3) for value in expected.values()}) > (1 if sampling.greedy or greedy_drafts else 5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.7)], ids=str)
def test_tokens_that_are_not_the_targets_own_choice_are_counted(sampling: Sampling) -> None:
    batch, head = packed_case(sampling)
    for row, column in ((0, 4), (1, 8)):
        batch.ids[row, column] = (batch.ids[row, column] + 1) % W7
    positions = rows_of(0) + 1
    choices = [chances(batch.last.flatten(0, 1)[at], batch, at, sampling).argmax() for at in positions]
    wrong = sum(int(token) != int(batch.ids.flatten()[at + 1]) for token, at in zip(choices, positions, strict=True))
    assert wrong >= 2
    assert acceptance(drafts_of(W7), batch, head, None, sampling).off_text == wrong
    tree = StaticTree.of("line", [[0], [0, 0]])
    assert acceptance(drafts_of(W7), batch, head, None, sampling, tree=tree).off_text == wrong


@pytest.mark.parametrize("vocab", [None, [0, 2, 3, 6]], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_trees_follow_the_text(sampling: Sampling, vocab: list[int] | None) -> None:
    batch, head = packed_case(sampling)
    ids = batch.ids.flatten()
    tokens = torch.tensor(vocab or list(range(W7)))
    output = drafts_of(len(tokens))
    for step in output.steps:  # drafts that the text follows more often than by chance
        step.logits.add_(1.5 * (tokens == ids[step.rows + 2 + step.offset][:, None]))
    tree = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 2], [1, 1], [2, 0], [0, 2, 0], [1, 1, 1], [2, 0, 1]])
    expected, depths = {}, []
    for t in rows_of(0).tolist():
        path: tuple[int, ...] = ()
        for step in output.steps:
            if (r := (step.rows == t).nonzero()).numel():
                order = tokens[step.logits[int(r)].argsort(descending=True)].tolist()
                token = int(ids[t + 2 + step.offset])
                path = (*path, order.index(token) if token in order else 99)
                expected[t, step.offset] = float(path in tree.choices)
        depths.append(sum(value for (row, _), value in expected.items() if row == t))
    assert {0, 1, 2} <= {int(depth) for depth in depths}
    check(acceptance(output, batch, head, None if vocab is None else tokens, sampling, tree=tree), expected)
    draft_vocab = None if vocab is None else tokens
    found = {most: token_ranks(output, batch, draft_vocab, most).flatten(0, 1) for most in (3, 99)}
    for most, t, k in itertools.product(found, range(24), range(STEPS)):
        step = output.steps[k]
        if (r := (step.rows == t).nonzero()).numel():
            order = tokens[step.logits[int(r)].argsort(descending=True)].tolist()[:most]
            token = int(ids[t + 2 + k])
            assert int(found[most][t, k]) == (order.index(token) if token in order else most)
        else:
            assert int(found[most][t, k]) == -1


@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_tuned_target_accepts_the_overlap(sampling: Sampling, greedy_drafts: bool) -> None:
    batch, head = packed_case(sampling)
    output = drafts_of(W7)
    positions = torch.arange(24)[DOCUMENTS.flatten() >= 0]
    tuned = 2 * torch.randn(len(positions), W7, generator=torch.Generator().manual_seed(2))
    output = HeadOutput(output.steps, StepOutput(-1, positions, tuned))
    expected = {}
    for step in output.steps:
        for r, t in enumerate(step.rows.tolist()):
            at = t + 1 + step.offset
            p = chances(tuned[positions.tolist().index(at)], batch, at, sampling)
            q = step.logits[r]
            q = torch.eye(W7)[q.argmax()] if sampling.greedy or greedy_drafts else probs(q, sampling)
            expected[t, step.offset] = float(torch.minimum(p, q).sum())
    found = acceptance(output, batch, head, None, sampling, greedy_drafts=greedy_drafts)
    assert found.off_text == 0
    check(found, expected)


@pytest.mark.parametrize(
    ("dtype", "penalty", "margin"),
    [(torch.float32, 1.0, 0.01), (torch.float32, 2.0, 0.02), (torch.float32, 0.5, 0.02), (torch.bfloat16, 1.0, 0.5)],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_a_token_at_the_edge_of_the_settings_keeps_its_share(
    temperature: float, dtype: torch.dtype, penalty: float, margin: float
) -> None:
    """Decoding rounds differently: within the margin a token that falls out of the top two has what it had inside."""
    head = TargetHead(torch.eye(4, dtype=dtype))
    sampling = Sampling(temperature, top_k=2, repetition_penalty=penalty)
    draft = torch.tensor([[3.0, 0.0, 1.0, 0.0], [1.0, 3.0, 0.0, 0.0]])
    output = HeadOutput((StepOutput(0, torch.tensor([0, 1]), draft),))

    def found(gap: float) -> Acceptance:
        # The text's token 2 is the third most likely one, by `gap`, its last the likeliest; none was there before.
        last = torch.tensor([[0.0, 0, 0, 0], [4.0, 3.0, 3.0 - gap, 0], [4.0, 3.0, -9.0, 0], [0.0, 0, 0, 0]]).to(dtype)
        batch = make_batch([3, 3, 2, 0], [0, 1, 1, 1], [0] * 4, last, head)
        return acceptance(output, batch, head, None, sampling)

    inside = found(0.75 * margin)
    weights = (torch.tensor([4.0, 3.0, 3.0 - 0.75 * margin]) / temperature).exp()
    share = weights[2] / (weights[0] + weights[1])
    q = (draft[0, [0, 2]] / temperature).softmax(-1)[1]
    assert inside.off_text == 1
    p, beside = (x.softmax(-1)[0] for x in (torch.tensor([4.0, 3.0]) / temperature, draft[1, :2] / temperature))
    assert float(inside.c_BLK[0, 1, 0]) == pytest.approx(float(beside / p), rel=1e-5)
    assert float(inside.c_BLK[0, 0, 0]) == pytest.approx(float(q / share), rel=1e-5)
    with pytest.raises(UserError, match="probability 0"):
        found(1.5 * margin)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.9), Sampling(1.0, min_p=0.1), Sampling(0.7, top_p=0.95)])
def test_rounding_of_other_tokens_does_not_refuse_a_text(sampling: Sampling) -> None:
    """Of top-p the mass before a token is at the edge, of min-p the likeliest token, however far the next kept one is."""
    head = TargetHead(torch.eye(4))

    def refused(second: float) -> bool:
        last = torch.tensor([[0.0] * 4, [0.0] * 4, [4.0, second, -9.0, -9.0], [0.0] * 4])
        batch = make_batch([3, 3, 2, 1], [0, 1, 1, 1], [0] * 4, last, head)
        try:
            _text_probabilities(batch, head, torch.tensor([2]), sampling)
        except UserError:
            return True
        return False

    places = [refused(4.0 - gap / 1000) for gap in range(0, 6000, 2)]
    edge = places.index(True)
    kept = next(i for i in range(3000) if probs(torch.tensor([[4.0, 4.0 - i / 500, -9.0, -9.0]]), sampling)[0, 1] <= 0)
    assert all(places[edge:])
    assert (edge - kept) / 500 == pytest.approx(0.01, abs=0.003), "the margin of float32, in the token's own logit"
