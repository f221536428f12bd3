"""Where torch sees no GPU these tests run on a pretended one (tests/pretended_gpu), the long ones for one or two methods.

DRAFTSMITH_GPU_TESTS_ON=cuda leaves them out there.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pretended_gpu.cuda import pretended_gpu

FEW = {"test_training.py": (None, "medusa"), "test_decoding.py": (None, "eagle3", "medusa")}
"""The methods that files of long tests are run for."""


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    if os.environ.get("DRAFTSMITH_GPU_TESTS_ON") == "cuda":
        pytest.skip("torch sees no GPU here")
    method = getattr(request.node, "callspec", None) and request.node.callspec.params.get("method")
    if method not in FEW.get(request.path.name, (method,)):
        pytest.skip(
            "minutes on a pretended GPU; tests/pretended_gpu trains and decodes with every method, in fewer steps"
        )
    with pretended_gpu():
        yield
