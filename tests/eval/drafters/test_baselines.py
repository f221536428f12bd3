"""transformers' own decoding says what ours says; drafters without a head leave nothing on the CPU, value for value."""

import time
from typing import Any

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.drafters.baselines import GenerateSystem, assisted, looked_up, plain
from draftsmith.target.target import Target
from tests.models import tiny_model

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", num_hidden_layers=2, initializer_range=0.1), path="tiny", fingerprint="0")


def systems(target: Target) -> list[GenerateSystem]:
    draft = Target(tiny_model("llama", num_hidden_layers=2, seed=1), path="draft", fingerprint="1")
    others = [assisted(target, other, 3, confidence=c) for other in (target, draft) for c in (0.0, 0.4)]
    return [plain(target), looked_up(target, 4), *others]


def requests(count: int = 3, new_tokens: int = 16) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 150, (n,), generator=generator).tolist() * 2 for n in (5, 9, 4, 7, 3, 6)[:count]]
    return [Request.seeded(f"p{i}", "ab"[i % 2], prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_texts_are_ours(target: Target, penalty: float) -> None:
    """Whatever the models' own generation configs say."""
    target.model.generation_config.repetition_penalty = 1.7
    sampling = Sampling(repetition_penalty=penalty)
    ours = decode_batch(target, TargetAlone(), requests(), sampling).generations
    for system in systems(target):
        for request, expected in zip(requests(), ours, strict=True):
            assert system.decode([request], sampling).generations[0].output_ids == expected.output_ids, system.name


def test_sampled_texts_are_within_the_settings(target: Target) -> None:
    torch.manual_seed(0)
    (request,) = requests(1)
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.5, top_p=0.5), Sampling(2.0, min_p=0.4)):
        for system in systems(target)[:3]:
            (found,) = system.decode([request], sampling).generations
            text = torch.tensor([[*request.prompt_ids, *found.output_ids]])
            logits = target.head.logits(target.forward(text).last[0, len(request.prompt_ids) - 1 : -1])
            p_RV = (logits / sampling.temperature).softmax(-1)
            p_R = p_RV.gather(1, text[0, len(request.prompt_ids) :, None])
            rank_R = (p_RV > p_R).sum(-1)
            before_R = (p_RV * (p_RV > p_R)).sum(-1)
            if sampling.top_k:
                assert int(rank_R.max()) < 2
            assert float(before_R.max()) < sampling.top_p
            assert float((p_R[:, 0] / p_RV.amax(-1)).min()) >= sampling.min_p


def calls_of(system: GenerateSystem, request: Request, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafts as the assistant was told to make them: its settings at every call."""
    seen: list[int] = []
    assistant = system.assistant
    assert assistant is not None
    real = assistant.model.generate

    def spy(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        seen.append(len(output.scores))
        return output

    monkeypatch.setattr(assistant.model, "generate", spy)
    system.decode([request], Sampling())
    return seen


def test_the_assistant_drafts_as_many_tokens_as_asked(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not transformers' 20, and not more after each success; its own threshold ends drafts early."""
    draft = Target(tiny_model("llama", num_hidden_layers=2, seed=1), path="draft", fingerprint="1")
    (request,) = requests(1, 24)
    pinned = calls_of(assisted(target, draft, 3), request, monkeypatch)
    assert set(pinned[:-3]) == {3}, "the last ones are cut by the limit"
    default = calls_of(assisted(target, draft, 3, confidence=0.9), request, monkeypatch)
    assert min(default) < 3
    assert max(default) <= 3


def test_the_clock_starts_with_the_call_and_turns_over_at_the_first_tokens(target: Target) -> None:
    (request,) = requests(1)
    pause = 0.01
    passes = 0

    def slow(*_: Any) -> None:
        nonlocal passes
        passes += 1
        time.sleep(pause)

    handle = target.model.register_forward_hook(slow)
    try:
        timed = plain(target).decode([request], Sampling())
        assert timed.timed_tokens == len(timed.generations[0].output_ids) - 1 == passes - 1
        assert timed.seconds["ttft"] >= pause
        assert timed.decode_s >= pause * timed.timed_tokens
        # A model that assists itself gives four tokens a round, the first round's before the clock turns over.
        passes = 0
        itself = GenerateSystem("x", target, {}, Target(target.model, path="t", fingerprint="0"), 3)
        helped = itself.decode([request], Sampling())
        assert helped.timed_tokens == len(helped.generations[0].output_ids) - 4
        assert helped.seconds["ttft"] >= 4 * pause
    finally:
        handle.remove()


def test_a_cache_is_used_though_the_configuration_says_none(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(target.model.generation_config, "use_cache", False)
    handle = target.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    plain(target).decode(requests(1, 4), Sampling())
    handle.remove()
    assert lengths[1:] == [1, 1, 1]
