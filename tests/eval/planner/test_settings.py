"""What starts engines after a plan."""

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.eval.planner.settings import engine_settings


def decision(target: str) -> Any:
    draft = SimpleNamespace(tree=None, lossy=False, tuned=False, method="draft_model", layer_ids=(), num_heads=0)
    rules = SimpleNamespace(largest_batch=4, drafter="draft_model", num_speculative_tokens=3, by_batch=())
    result = SimpleNamespace(
        drafters={"draft_model": SimpleNamespace(draft=draft)}, target=SimpleNamespace(path=target)
    )
    return SimpleNamespace(rules=rules, plan=SimpleNamespace(results=[result]))


@pytest.mark.parametrize(
    ("target", "engines"),
    [
        ("models/my-model", {"vllm", "sglang", "tensorrt_llm", "llama_cpp", "transformers"}),
        ("models/my.Q4_1.gguf", {"llama_cpp", "transformers"}),
    ],
)
def test_only_engines_that_take_the_target_are_started(target: str, engines: set[str]) -> None:
    found = engine_settings(decision(target))
    assert found.keys() == engines
    name = target.rsplit("/", 1)[-1]
    assert all(any(name in snippet.text for snippet in snippets) for snippets in found.values())
