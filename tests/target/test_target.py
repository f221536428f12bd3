"""The target's view of a model is held against what transformers itself says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertLMHeadModel, DynamicCache, T5Config

import draftsmith
from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import OnlineSource
from draftsmith.decoder.answers import Generation, Request
from draftsmith.errors import UserError
from draftsmith.heads.eagle3.head import Eagle3Options, build
from draftsmith.target import pretrained
from draftsmith.target.folder import TOKENIZER_FILES, read_directory
from draftsmith.target.pretrained import probe_ids
from draftsmith.target.target import Target, TargetHead, context_of, describe_context, load_target
from tests.models import KINDS, save_tiny_target, tiny_model


def random_ids(rows: int = 2, tokens: int = 24) -> torch.Tensor:
    return torch.randint(3, 160, (rows, tokens), generator=torch.Generator().manual_seed(1))


def memory_target(kind: str = "llama", **overrides: object) -> Target:
    return Target(tiny_model(kind, **overrides), path="memory", fingerprint="none")


def test_a_hub_targets_tokenizer_is_fetched_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cached_file(path: str, name: str, **options: bool) -> str | None:
        asked.append(name)
        return str(tmp_path / name) if name == "model.safetensors" else None

    monkeypatch.setattr(pretrained, "cached_file", cached_file)
    assert pretrained.weights_directory("owner/model") == tmp_path
    assert asked == ["model.safetensors", *TOKENIZER_FILES]


def test_all_files_of_a_hub_target_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are looked into before transformers loads them."""
    tiny_model("llama").save_pretrained(tmp_path / "hub", max_shard_size="40KB")
    (tmp_path / "here").mkdir()

    def fetch(path: str, name: str, **_options: Any) -> str | None:
        if not (tmp_path / "hub" / name).is_file():
            return None
        return str(shutil.copy(tmp_path / "hub" / name, tmp_path / "here" / name))

    def fetch_all(path: str, index: str) -> None:
        for name in set(json.loads(Path(index).read_text())["weight_map"].values()):
            fetch(path, name)

    monkeypatch.setattr(pretrained, "cached_file", fetch)
    monkeypatch.setattr(pretrained, "get_checkpoint_shard_files", fetch_all)
    assert pretrained.weights_directory("owner/model") == tmp_path / "here"
    assert len(read_directory(tmp_path / "here")) == len(load_target(str(tmp_path / "hub")).model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_taps_and_logits_equal_the_model_bit_for_bit(kind: str, tmp_path: Path) -> None:
    target = load_target(save_tiny_target(tmp_path, kind))
    ids, layer_ids = random_ids(), (0, 2, 4, 5, 7)
    truth = target.model(ids, output_hidden_states=True)
    seen = target.forward(ids, layer_ids=layer_ids)
    assert torch.equal(seen.aux, torch.cat([truth.hidden_states[k] for k in layer_ids], dim=-1))
    assert torch.equal(seen.last, truth.hidden_states[-1])
    assert torch.equal(target.head.logits(seen.last), truth.logits)
    columns = torch.tensor([3, 17, 159])
    torch.testing.assert_close(target.head.logits(seen.last, columns), truth.logits[..., columns])
    assert truth.logits.std() > 0.3  # far from uniform, so that the equalities above mean something


@pytest.mark.parametrize(
    ("kind", "overrides", "scale", "softcap"),
    [
        ("gemma3", {"final_logit_softcapping": 1.5}, 1.0, 1.5),
        ("cohere", {}, 0.25, None),
        ("granite", {}, 0.25, None),
    ],
)
@torch.no_grad()
def test_scaled_and_capped_logits(
    kind: str, overrides: dict, scale: float, softcap: float | None, tmp_path: Path
) -> None:
    target = load_target(save_tiny_target(tmp_path, kind, **overrides))
    assert (target.head.scale, target.head.softcap) == (scale, softcap)
    ids = random_ids()
    truth = target.model(ids).logits
    torch.testing.assert_close(target.head.logits(target.forward(ids).last), truth)
    plain = torch.nn.functional.linear(target.forward(ids).last, target.head.weight)
    assert (plain - truth).abs().max() > 0.1  # the rule does something here


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_forward_with_a_cache_equals_one_pass(kind: str) -> None:
    target = memory_target(kind)
    ids = random_ids()
    whole = target.forward(ids, layer_ids=(1, 6))
    cache = DynamicCache(config=target.config)
    for start, end in ((0, 10), (10, 11), (11, 24)):
        position_ids = torch.arange(start, end).expand(2, -1)
        part = target.forward(ids[:, start:end], layer_ids=(1, 6), position_ids=position_ids, past_key_values=cache)
        torch.testing.assert_close(part.aux, whole.aux[:, start:end], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.last, whole.last[:, start:end], rtol=1e-4, atol=1e-4)


def test_the_self_check_leaves_no_hooks_behind(tmp_path: Path) -> None:
    target = load_target(save_tiny_target(tmp_path, "llama"))
    assert not any(module._forward_hooks for module in target.model.modules())
    ids = torch.arange(6)[None]
    states = target.model(ids, output_hidden_states=True).hidden_states
    assert len(states) == target.num_layers + 1, "which may still be asked for"
    assert torch.equal(states[2], target.forward(ids, layer_ids=(2,)).aux)


def test_forward_without_layers_and_without_gradients() -> None:
    seen = memory_target().forward(random_ids())
    assert seen.aux.shape == (2, 24, 0)
    assert not seen.last.requires_grad


def test_head_passes_gradients_to_hidden_and_ignores_autocast() -> None:
    target = memory_target()
    hidden = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = target.head.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden @ target.head.weight.T)
    logits.sum().backward()
    assert hidden.grad is not None
    assert not list(target.head.parameters())
    assert not target.head.state_dict()


def test_rows_of_some_columns_are_kept_and_follow_the_weights() -> None:
    head = TargetHead(torch.randn(9, 4), torch.randn(9))
    hidden, columns = torch.randn(3, 4, requires_grad=True), torch.tensor([8, 0])
    with torch.inference_mode():
        first = head.logits(hidden, columns)
    rows = head._selected._weights
    head.logits(hidden, columns).sum().backward()
    torch.testing.assert_close(hidden.grad, head.weight[columns].sum(0).expand(3, 4))
    assert head._selected._weights is rows, "made once"
    torch.testing.assert_close(first, head.logits(hidden)[:, columns])
    changes: dict[str, Callable[[], object]] = {
        "other columns": lambda: columns.copy_(torch.tensor([1, 2])),
        "other weights": lambda: head.weight.mul_(2),
        "another bias": lambda: head.bias.add_(1),
        "another dtype": head.double,
    }
    for what, change in changes.items():
        change()
        torch.testing.assert_close(head.logits(hidden, columns), head.logits(hidden)[:, columns], msg=what)


def test_casting_the_head_leaves_the_model_alone() -> None:
    target = memory_target()
    target.head.to(torch.bfloat16)
    assert target.model.lm_head.weight.dtype == torch.float32


def test_facts_about_the_target(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path, "qwen3", num_hidden_layers=12, eos_token_id=[5, 2])
    target = load_target(path, dtype="bfloat16")
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.context_length) == (12, 64, 160, 256)
    assert target.dtype == torch.bfloat16
    assert target.eos_ids == (2, 5)
    assert target.default_layer_ids() == (2, 6, 9)
    assert target.embedding.shape == (160, 64)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 7}))
    assert load_target(path).eos_ids == (7,)


@pytest.mark.parametrize(
    ("layer_ids", "words"),
    [
        ((), "at least one"),
        ((2, 2, 5), "once, in ascending order"),
        ((5, 2), "ascending"),
        ((-1, 3), "-1 is out of range"),
        ((2, 9), "9 is out of range"),
        ((2, 8), "8 is the number of layers"),
    ],
)
def test_layer_ids_that_are_refused(layer_ids: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        memory_target().check_layer_ids(layer_ids)


def test_layer_ids_of_small_targets() -> None:
    target = memory_target(num_hidden_layers=4)
    with pytest.raises(UserError, match="only 4 layers"):
        target.default_layer_ids()
    target.check_layer_ids((0, 1, 3))


# Bad input: one sentence each.


def refused(path: object, *words: str, **options: object) -> None:
    with pytest.raises(UserError) as info:
        load_target(str(path), **options)
    text = str(info.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_missing_path_and_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    refused(tmp_path, str(tmp_path), "config.json")


def test_encoder_only_is_refused_by_what_it_computes(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=160,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,  # tokens say something to each other
    )
    torch.manual_seed(0)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    refused(tmp_path, "bert", "encoder-only")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    refused(tmp_path, "t5", "encoder-decoder")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "safetensors")


def test_options_that_do_not_exist(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path, "llama")
    refused(path, "int4", "bfloat16", dtype="int4")
    refused(path, "nonsense", device="nonsense")
    refused(path, "nonsense", attn_implementation="nonsense")
    if not torch.cuda.is_available():
        refused(path, "cuda", device="cuda")


@pytest.mark.parametrize("broken", ["taps", "logits"])
def test_the_self_check_catches_a_model_that_does_something_else(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_target(tmp_path, "llama")
    cls = type(AutoModelForCausalLM.from_pretrained(path))
    original = cls.forward

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if broken == "taps":
            output.hidden_states = (
                *output.hidden_states[:3],
                output.hidden_states[3] * 1.01,
                *output.hidden_states[4:],
            )
        else:
            output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(cls, "forward", forward)
    refused(path, "'llama'", "hidden_states[3]" if broken == "taps" else "logits")


def test_the_tokens_of_the_probe_are_the_same_while_something_is_built_on_another_device() -> None:
    target = memory_target()
    with torch.device("meta"):
        found = probe_ids(target)
    assert torch.equal(found, probe_ids(target))


# A context ends where the rotary frequencies of all tokens change with the length of a text.

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
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("longrope")
    return load_target(save_tiny_target(folder, "llama", rope_parameters=LONG | ORIGINAL))


def request(new: int, prompt: int = 10) -> Request:
    return Request("a", "chat", tuple(range(20, 20 + prompt)), new)


def test_answers_up_to_there_are_the_targets_own(long_target: Target) -> None:
    ids = torch.tensor([request(1).prompt_ids])
    truth = long_target.model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)[0, 10:].tolist()
    model = build(Eagle3Options(layer_ids=[1, 3, 5]), long_target, None)
    for head in (None, model):
        (answer,) = draftsmith.decode(long_target, head, [request(20)], num_speculative_tokens=2)
        assert list(answer.output_ids) == truth[: len(answer.output_ids)]
        assert len(answer.output_ids) == 20 or answer.output_ids[-1] in long_target.eos_ids


def test_what_goes_further_is_refused(long_target: Target) -> None:
    with pytest.raises(UserError, match=f"needs 33 positions .* context has 32 .{CHANGES}"):
        draftsmith.decode(long_target, None, [request(23)])
    sample = Tokenized(torch.arange(20, 53), torch.ones(33, dtype=torch.bool), "line 1", "chat")
    with pytest.raises(UserError, match=f"'line 1' has 33 tokens, .* reads 1 to 32 .{CHANGES}"):
        OnlineSource(long_target, [sample], ())
    answer = Generation(request(23), output_ids=list(range(20, 43)))
    with pytest.raises(UserError, match=f"'a' has 33 tokens, .* reads 1 to 32 .{CHANGES}"):
        draftsmith.simulate(long_target, build(Eagle3Options(layer_ids=[1, 3, 5]), long_target, None), [answer])


def test_a_head_keeps_to_the_frequencies_that_its_target_has_there(long_target: Target) -> None:
    head = build(Eagle3Options(layer_ids=[1, 3, 5]), long_target, None)
    assert head.config.rope_parameters["long_factor"] == [1.0] * 8
    assert head.reads.context_length is None
    head.config.rope_parameters = LONG | ORIGINAL
    others = type(head)(head.options, head.config, long_target, (1, 3, 5), None)
    assert others.reads.context_length == 32, "of a head that others trained"
