"""Memory by formula, held against the tensors that a decode has: weights, and keys and values."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.cache import KVCache, entry_bytes, layer_shapes
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.eval.drafters.baselines import BaselineSpec, Supplies, make_baseline
from draftsmith.eval.drafters.system import DraftInfo, SystemUnderTest, head_system
from draftsmith.eval.planner.memory import Memory, memory_at
from draftsmith.eval.results.result import TargetInfo
from draftsmith.heads.hydra import HydraOptions
from draftsmith.heads.registry import methods
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from tests.gpu.support import OPTIONS
from tests.models import make_target

BUSH = StaticTree.of("bush", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SYSTEMS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{name: (name, options, {}) for name, options in OPTIONS.items()},
    "eagle3 tree": ("eagle3", OPTIONS["eagle3"], {"tree": BUSH}),
    "eagle3 dynamic tree": ("eagle3", OPTIONS["eagle3"], {"tree": DynamicTree(10, 3, 2)}),
    "hydra without a prefix layer": ("hydra", HydraOptions(num_heads=3), {}),
    "medusa tree": ("medusa", OPTIONS["medusa"], {"tree": BUSH}),
}
BASELINES = {
    "draft model": BaselineSpec("draft_model", path="small"),
    "prompt lookup": BaselineSpec("prompt_lookup"),
    "lookahead": BaselineSpec("lookahead", W=4, N=3, G=2),
    "suffix decoding": BaselineSpec("suffix"),
}
PROMPTS, ANSWER = (5, 9, 7), 12
LONGEST = max(PROMPTS) + ANSWER


def make_system(target: Target, name: str) -> SystemUnderTest:
    if name in BASELINES:
        supplies = Supplies(4, 4, target.vocab_size, lambda path: make_target(num_hidden_layers=2), lambda path: [])
        return make_baseline(BASELINES[name], supplies)
    method, options, how = SYSTEMS[name]
    head = methods()[method].build(options, target, None).deployed(target).to(target.dtype)
    verifier = head.verifier(target)
    return head_system(name, head, 3, 3, verifier=None if verifier is target else verifier, **how)


def described(target: Target) -> TargetInfo:
    return TargetInfo("t", weight_bytes=target.weight_bytes, cache_bytes=entry_bytes(layer_shapes(target)))


def own_weights(modules: Any, besides: Target) -> int:
    """Bytes of the weights of a module that are no weights of a target."""
    shared = {p.untyped_storage().data_ptr() for p in besides.model.parameters()}
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in modules.parameters()}
    return sum(size for at, size in found.items() if at not in shared)


def cached(cache: KVCache | None) -> int:
    return 0 if cache is None else sum(buffer.nbytes for buffer in cache.buffers.values())


def loop_of(target: Target, system: SystemUnderTest) -> Loop:
    """A batch after a round; the answers are as long as asked for."""
    requests = [Request(f"{n}", "chat", tuple(range(3, 3 + n)), ANSWER, ignore_eos=True) for n in PROMPTS]
    made = system.make(system.num_speculative_tokens)
    loop = Loop(system.verified_by(target), made, requests, Sampling(), system.typical, len(PROMPTS))
    loop.round()
    return loop


@pytest.mark.parametrize("name", [*SYSTEMS, *BASELINES])
def test_every_drafters_memory_is_that_of_its_tensors(name: str) -> None:
    target = make_target()
    system = make_system(target, name)
    found = memory_at(described(target), system.info, len(PROMPTS), LONGEST)
    assert found is not None
    loop = loop_of(target, system)
    assert found.target_cache + found.draft_entries == cached(loop.cache)
    assert found.draft_cache == cached(getattr(loop.drafter, "cache", None))
    weights = loop.drafter.model.model if isinstance(loop.drafter, DraftModel) else system.head
    assert found.drafter == (0 if weights is None else own_weights(weights, target))
    assert found.drafted == found.alone + found.draft_entries + found.drafter + found.draft_cache


@pytest.mark.parametrize("kind", ["llama", "deepseek", "gemma3", "gemma3n"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_targets_memory_is_that_of_its_tensors(kind: str, dtype: torch.dtype) -> None:
    target = make_target(kind, dtype)
    found = memory_at(described(target), DraftInfo("none", 0, 0, weight_bytes=0, cache_bytes=0, cache_slots=0), 3, 20)
    assert found is not None
    assert found.alone == own_weights(target.model, make_target()) + cached(KVCache.for_target(target, 3, 21))
    assert found.drafted == found.alone


def test_a_plan_from_a_config_counts_a_tokens_keys_and_values_alike() -> None:
    target = make_target("qwen3", torch.bfloat16)
    assert shape_of(target.config, 2).kv_bytes == entry_bytes(layer_shapes(target))


@pytest.mark.parametrize("missing", ["weight_bytes", "cache_bytes", "cache_slots"])
def test_what_was_not_recorded_is_not_guessed(missing: str) -> None:
    target = TargetInfo("t", weight_bytes=100, cache_bytes=10)
    draft = DraftInfo("eagle3", 3, 3, weight_bytes=20, cache_bytes=4, cache_slots=5)
    assert memory_at(target, draft, 2, 7) == Memory(100, 160, 60, 20, 96)
    assert memory_at(target, replace(draft, **{missing: None}), 2, 7) is None
    assert memory_at(target, None, 2, 7) is None
    if missing != "cache_slots":
        assert memory_at(replace(target, **{missing: None}), draft, 2, 7) is None
