"""The batch of the tests of losses."""

import pytest

from draftsmith.data.batch import TrainBatch
from draftsmith.target.target import Target
from tests.batches import documents_of, pack


@pytest.fixture(scope="module")
def batch(target: Target) -> TrainBatch:
    return pack(target, documents_of(target), ())
