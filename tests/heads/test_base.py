"""Which rows count: a table at every turn boundary and step; what every method trains on them."""

import pytest
import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import DraftHead, count_rows, shift_left, supervised_rows
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.gpu.support import OPTIONS, make_target


def batch_of(masks: list[str], documents: list[str]) -> TrainBatch:
    """masks: 1 = token to learn. documents: a digit per token, '.' = padding."""
    mask = torch.tensor([[c == "1" for c in row] for row in masks])
    document = torch.tensor([[-1 if c == "." else int(c) for c in row] for row in documents])
    (B, L), none = mask.shape, torch.zeros(0)
    return TrainBatch(torch.zeros(B, L), mask, document, none, none, none, none, none)


# One row of text per case; under it, the rows that count at offsets 0, 1, 2, 3 ('x').
TABLE = {
    # A prompt of 3, an answer of 4: row 2 holds the root (the prefill's token), rows 2..4 predict.
    "one answer": ("0001111", "0000000", ["..xxx..", "..xx...", "..x....", "......."]),
    "answer then prompt": ("0011100", "0000000", [".xx....", ".x.....", ".......", "......."]),
    "answer of one token": ("0010000", "0000000", [".......", ".......", ".......", "......."]),
    "answer of two tokens": ("0011000", "0000000", [".x.....", ".......", ".......", "......."]),
    "two answers, gap of one": ("01110111", "00000000", ["xx..xx..", "x...x...", "........", "........"]),
    # The first token of a document is never the root of a row: nothing before it could draft.
    "answer from the first token": ("11111", "00000", ["xxx..", "xx...", "x....", "....."]),
    "document ends inside a run of ones": ("0111111", "0000111", ["xx..x..", "x......", ".......", "......."]),
    "padding inside a run of ones": ("0111111", "0000...", ["xx.....", "x......", ".......", "......."]),
    "same document number after another": ("111111", "001100", ["......", "......", "......", "......"]),
    "padding only": ("1111", "....", ["....", "....", "....", "...."]),
    "too short": ("11", "00", ["..", "..", "..", ".."]),
}


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("case", TABLE)
def test_supervised_rows(case, offset):
    mask, document, expected = TABLE[case]
    found = supervised_rows(batch_of([mask], [document]), offset)[0]
    assert "".join("x" if row else "." for row in found) == expected[offset]


def trained_once(method: str, *, masked: bool) -> tuple[DraftHead, Target, list[int]]:
    """A head of the method after a backward pass, its target, and the rows of each step."""
    target = make_target("cpu")
    torch.manual_seed(0)
    head = find_method(method).build(OPTIONS[method], target, None).train()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:  # weights that start at zero would leave those before them without a gradient
                parameter.add_(0.02 * torch.randn_like(parameter))
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    batch.mask.logical_and_(torch.tensor(not masked))
    output = head(batch, head.trains.steps)
    head_loss(output, batch, target.head, None, LossSpec()).loss_sum.backward()
    assert all(step.logits.shape == (len(step.rows), target.vocab_size) for step in output.steps)
    return head, target, [len(step.rows) for step in output.steps]


@pytest.mark.full
@pytest.mark.parametrize("method", OPTIONS)
def test_training_reaches_every_weight_of_the_head_and_none_of_the_target(method):
    head, target, _ = trained_once(method, masked=False)
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters() if p.requires_grad)
    assert "embed_tokens.weight" not in {name for name, p in head.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in target.model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("method", OPTIONS)
def test_a_batch_without_supervised_rows_gives_empty_steps_and_gradients_of_zero(method):
    head, _, rows = trained_once(method, masked=True)
    assert not any(rows)
    assert all(p.grad is not None and not bool(p.grad.any()) for p in head.parameters() if p.requires_grad)


def test_rows_of_a_batch_do_not_see_each_other_and_are_counted_together():
    batch = batch_of(["0011", "1111"], ["0000", "0000"])
    assert supervised_rows(batch, 0).tolist() == [[False, True, False, False], [True, True, False, False]]
    assert count_rows(batch).item() == 3


def test_agrees_with_the_definition_on_random_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mask = torch.rand(2, 16, generator=generator) < 0.8
        starts = torch.rand(2, 16, generator=generator) < 0.15
        document = starts.cumsum(1)
        document[:, 14:] = -1
        batch = TrainBatch(torch.zeros(2, 16), mask, document, *[torch.zeros(0)] * 5)
        for offset in range(5):
            found = supervised_rows(batch, offset)
            for b in range(2):
                for t in range(16):
                    reach = range(t + 1, t + 3 + offset)
                    right = document[b, t] >= 0 and all(
                        j < 16 and mask[b, j] and document[b, j] == document[b, t] for j in reach
                    )
                    assert bool(found[b, t]) == right


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 9])
def test_shift_left_never_wraps(steps):
    x = torch.tensor([[1, 2, 3, 4]])
    assert shift_left(x, steps, 7).tolist() == [([1, 2, 3, 4][steps:] + [7] * 4)[:4]]
