"""Random numbers in Python and in tensor operations (their distribution is tested in test_sampling.py)."""

import pytest
import torch

from draftsmith.decoder.noise import _many, row_key, uniforms


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_few_numbers_are_those_of_the_tensor_operations(count: int) -> None:
    keys = torch.tensor([row_key(0, "a"), row_key(1, "b"), 0, -1, 2**63 - 1, -(2**63)])
    counters = torch.tensor([0, 5, 2**40, 17, 3, 9])
    for stream in range(3):
        few, many = uniforms(keys, counters, stream, count), _many(keys, counters, stream, count)
        assert few.shape == (6, count)
        assert few.dtype == many.dtype
        assert torch.equal(few, many)
