"""Packed documents as padded rows, against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.batch import plan_documents


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 40),
)
def test_every_document_is_in_one_pass_of_few_tokens(rows: list[list[int]], padding: int, most: int) -> None:
    length = max(map(sum, rows)) + padding
    document, expected = torch.full((len(rows), length), -1), []
    for b, lengths in enumerate(rows):
        for number, count in enumerate(lengths):
            start = sum(lengths[:number])
            document[b, start : start + count] = number
            expected.append([*range(b * length + start, b * length + start + count)])
    found = []
    for one in plan_documents(document, most):
        (M, n), real = one.positions_Mn.shape, one.places_R.tolist()
        assert M * n <= most or M == 1
        assert one.positions_R.tolist() == [one.positions_Mn.flatten()[place] for place in real]
        for m, positions in enumerate(one.positions_Mn.tolist()):
            own = [place - m * n for place in real if place // n == m]
            assert own == [*range(len(own))]
            assert positions[len(own) :] == [positions[0]] * (n - len(own))
            found.append(positions[: len(own)])
    assert sorted(found) == sorted(expected)
