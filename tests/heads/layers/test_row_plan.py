"""The plan of a training pass against plain loops over documents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.heads.layers.row_plan import BUCKET, RowPlan, plan_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Document numbers of one to three packed rows, and which of their tokens are query rows."""
    rows = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3))
    length = max(map(sum, rows)) + draw(st.integers(0, 3))
    documents = torch.full((len(rows), length), -1)
    for b, lengths in enumerate(rows):
        text = [number for number, count in enumerate(lengths) for _ in range(count)]
        documents[b, : len(text)] = torch.tensor(text)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    return documents, (torch.rand(documents.shape, generator=generator) < share) & (documents >= 0)


def documents_of(documents: Tensor, needed: Tensor) -> list[tuple[list[int], list[int]]]:
    """The flat tokens and the flat query rows of each document, in order."""
    found = []
    for b, row in enumerate(documents.tolist()):
        for number in sorted({*row} - {-1}):
            tokens = [b * len(row) + t for t, one in enumerate(row) if one == number]
            found.append((tokens, [at for at in tokens if needed.flatten()[at]]))
    return found


@settings(max_examples=60, deadline=None)
@given(batches())
def test_rows_documents_and_spans(batch: tuple[Tensor, Tensor]) -> None:
    plan = plan_rows(*batch)
    found = documents_of(*batch)
    assert plan.rows.tolist() == [at for _, rows in found for at in rows]
    assert plan.rows.dtype == torch.int64
    names = [{int(plan.documents.flatten()[at]) for at in tokens} for tokens, _ in found]
    assert all(len(name) == 1 for name in names)
    assert len(set().union(*names)) == len(found), "no two documents share a number"
    assert plan.spans == tuple((tokens[0], rows[-1] - tokens[0] + 1) for tokens, rows in found if rows)
    assert plan.window is None


@settings(max_examples=60, deadline=None)
@given(batches())
def test_groups_hold_every_document_up_to_its_last_row(batch: tuple[Tensor, Tensor]) -> None:
    plan, past = plan_rows(*batch), batch[0].numel()
    place = {at: i for i, at in enumerate(plan.rows.tolist())}
    lines = []
    for group in plan.groups:
        sizes = set()
        assert group.tokens_nm.shape == group.queries_nm.shape
        for tokens, queries in zip(group.tokens_nm.tolist(), group.queries_nm.tolist(), strict=True):
            own = [at for at in tokens if at != past]
            assert tokens == own + [past] * (len(tokens) - len(own))
            assert queries == [place.get(at, len(place)) for at in tokens]
            assert own == list(range(own[0], own[0] + len(own)))
            lines.append((own[0], len(own)))
            sizes.add(len(own))
        assert max(sizes) == group.tokens_nm.shape[1]
        assert len({-(-size // BUCKET) for size in sizes}) == 1
    assert sorted(lines) == list(plan.spans)
    assert len(plan.groups) == len({-(-length // BUCKET) for _, length in plan.spans})


@settings(max_examples=60, deadline=None)
@given(batches())
def test_packed_documents_lie_end_to_end(batch: tuple[Tensor, Tensor]) -> None:
    plan = plan_rows(*batch).pack()
    assert plan.context.rows.tolist() == plan_rows(*batch).context.rows.tolist()
    tokens = [at for first, length in plan.spans for at in range(first, first + length)]
    assert plan.context.rows.tolist() == tokens
    assert plan.context.spans == plan.spans
    if not plan.spans:
        return
    packed, whole = plan.packed, plan.context.packed
    assert packed is not None
    assert whole is not None
    assert whole.place_R.tolist() == list(range(len(tokens)))
    assert packed.tokens_T.tolist() == tokens
    assert [tokens[place] for place in packed.place_R.tolist()] == plan.rows.tolist()
    lengths = [length for _, length in plan.spans]
    assert packed.starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packed.starts.dtype == torch.int32
    assert packed.longest == max(lengths)


def test_a_window_is_set_and_nothing_else() -> None:
    plan = plan_rows(torch.tensor([[0, 0, 1, -1]]), torch.tensor([[True, False, True, False]]))
    narrow = plan.within(3)
    assert narrow == RowPlan(plan.rows, plan.documents, plan.spans, 3)
    assert narrow.within(3) is narrow
    assert narrow.within(None).window is None


def test_a_row_in_the_padding_is_refused() -> None:
    with pytest.raises(AssertionError, match="padding"):
        plan_rows(torch.tensor([[0, -1]]), torch.tensor([[True, True]]))
