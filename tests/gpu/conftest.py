"""Where torch sees no GPU these tests run on a pretended one (tests/pretended_gpu), the long ones for Medusa alone.

DRAFTSMITH_GPU_TESTS_ON=cuda leaves them out there.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pretended_gpu.cuda import pretended_gpu

LONG = ("test_training.py", "test_decoding.py")
REAL = ("test_prompts_that_wait_get_the_answers_they_have_alone", "test_no_kernel_is_planned_anew_for_every_length")


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    if os.environ.get("DRAFTSMITH_GPU_TESTS_ON") == "cuda":
        pytest.skip("torch sees no GPU here")
    method = getattr(request.node, "callspec", None) and request.node.callspec.params.get("method")
    if (request.path.name in LONG and method not in (None, "medusa")) or request.node.originalname in REAL:
        pytest.skip("long on a pretended GPU; tests/pretended_gpu trains and decodes with every method, in fewer steps")
    with pretended_gpu():
        yield
