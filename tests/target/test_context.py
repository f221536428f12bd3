"""A target's context ends where the rotary frequencies of all tokens change with the length of a text."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import draftsmith
from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import OnlineSource
from draftsmith.decoder.answers import Generation, Request
from draftsmith.errors import UserError
from draftsmith.heads.eagle3.head import Eagle3Options, build
from draftsmith.target.target import Target, context_of, describe_context, load_target
from tests.models import save_tiny_target

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ORIGINAL = {"original_max_position_embeddings": 32}
CHANGES = "past that all its rotary frequencies change"


@pytest.mark.parametrize(
    ("model_type", "keys", "length"),
    [
        ("llama", {"rope_parameters": LONG | ORIGINAL}, 32),
        ("llama", {"rope_parameters": LONG | ORIGINAL | {"long_factor": [1.0] * 8}}, 128),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, 128),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | ORIGINAL}, 128),
        ("llama", {}, 128),
        ("phi3", {"rope_scaling": {k: v for k, v in LONG.items() if k != "rope_theta"}} | ORIGINAL, 32),
        ("phimoe", {"rope_parameters": LONG | ORIGINAL | {"short_mscale": 1.0, "long_mscale": 1.2}}, 32),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": LONG | ORIGINAL,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            32,
        ),
    ],
)
def test_where_a_context_ends(model_type: str, keys: dict[str, Any], length: int) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes, max_position_embeddings=128, **keys)
    assert context_of(config) == length
    assert (CHANGES in describe_context(config)) == (length != 128)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("longrope")
    return load_target(save_tiny_target(folder, "llama", rope_parameters=LONG | ORIGINAL))


def request(new: int, prompt: int = 10) -> Request:
    return Request("a", "chat", tuple(range(20, 20 + prompt)), new)


def test_answers_up_to_there_are_the_targets_own(target: Target) -> None:
    ids = torch.tensor([request(1).prompt_ids])
    truth = target.model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)[0, 10:].tolist()
    model = build(Eagle3Options(layer_ids=[1, 3, 5]), target, None)
    for head in (None, model):
        (answer,) = draftsmith.decode(target, head, [request(20)], num_speculative_tokens=2)
        assert list(answer.output_ids) == truth[: len(answer.output_ids)]
        assert len(answer.output_ids) == 20 or answer.output_ids[-1] in target.eos_ids


def test_what_goes_further_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match=f"needs 33 positions .* context has 32 .{CHANGES}"):
        draftsmith.decode(target, None, [request(23)])
    sample = Tokenized(torch.arange(20, 53), torch.ones(33, dtype=torch.bool), "line 1", "chat")
    with pytest.raises(UserError, match=f"'line 1' has 33 tokens, .* reads 1 to 32 .{CHANGES}"):
        OnlineSource(target, [sample], ())
    answer = Generation(request(23), output_ids=list(range(20, 43)))
    with pytest.raises(UserError, match=f"'a' has 33 tokens, .* reads 1 to 32 .{CHANGES}"):
        draftsmith.simulate(target, build(Eagle3Options(layer_ids=[1, 3, 5]), target, None), [answer])


def test_a_head_keeps_to_the_frequencies_that_its_target_has_there(target: Target) -> None:
    head = build(Eagle3Options(layer_ids=[1, 3, 5]), target, None)
    assert head.config.rope_parameters["long_factor"] == [1.0] * 8
    assert head.reads.context_length is None
    head.config.rope_parameters = LONG | ORIGINAL
    others = type(head)(head.options, head.config, target, (1, 3, 5), None)
    assert others.reads.context_length == 32, "of a head that others trained"
