"""The draft model: transformers' own Llama on each document alone is the oracle, before and after an export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.draft_model.head import DraftLmHead, as_model, build
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.target.folder import TOKENIZER_FILES
from draftsmith.target.target import Target, load_target
from tests.batches import documents_of, pack
from tests.exports import LLAMA3, shake
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

LLAMA3_OWN = {**LLAMA3, "factor": 32.0}
OPTIONS = {
    "new": DraftLmOptions(),
    "other sizes": DraftLmOptions(
        num_hidden_layers=3, hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=8
    ),
    "tied": DraftLmOptions(num_hidden_layers=1, hidden_size=32, tie_word_embeddings=True),
    "the target's layers": DraftLmOptions(layers_from_target=[0, 3, 7]),
}


def make_target(**changes: Any) -> Target:
    return Target(tiny_model("llama", rope_parameters=LLAMA3, **changes), path="tiny", fingerprint="0")


def make(target: Target, options: DraftLmOptions = OPTIONS["new"], *, shaken: bool = True) -> DraftLmHead:
    torch.manual_seed(0)
    head = build(options, target, None)
    if shaken:
        shake(head)
    return head.eval()


def oracle(head: DraftLmHead) -> LlamaForCausalLM:
    """transformers' own model with copies of the weights."""
    model = LlamaForCausalLM(head.config).eval()
    missing = model.load_state_dict(head.state_dict(), strict=False).missing_keys
    assert missing == (["lm_head.weight"] if head.lm_head is None else [])
    return model


def each_document(batch: TrainBatch) -> list[tuple[int, Tensor]]:
    """The flat index of its first token, and the ids of every document."""
    flat, found = batch.document.flatten().tolist(), []
    L = batch.ids.shape[1]
    for b in range(len(batch.ids)):
        for number in sorted({*flat[b * L : (b + 1) * L]} - {-1}):
            places = [b * L + t for t in range(L) if flat[b * L + t] == number]
            found.append((places[0], batch.ids.flatten()[places]))
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_step_is_the_model_on_each_document_alone(kind: str) -> None:
    target = make_target()
    head = make(target, OPTIONS[kind])
    batch = pack(target, documents_of(target), ())
    model, probs = oracle(head), {}
    for first, ids in each_document(batch):
        with torch.no_grad():
            probs |= {first + i: row for i, row in enumerate(model(ids[None]).logits[0])}
    with torch.no_grad():
        steps = head(batch, 4).steps
    assert sum(len(step.rows) for step in steps) > 40
    for step in steps:
        expected = torch.stack([probs[row + 1 + step.offset] for row in step.rows.tolist()])
        torch.testing.assert_close(step.logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["new", "tied"])
def test_gradients_are_those_of_the_model_on_each_document_alone(kind: str) -> None:
    target = make_target()
    head, spec = make(target, OPTIONS[kind]), LossSpec(kind="soft_ce")
    batch = pack(target, documents_of(target), ())
    output = head(batch, head.trains.steps)
    head_loss(output, batch, target.head, None, spec).loss_sum.backward()
    model, p = oracle(head), target.head.logits(batch.last).softmax(-1).flatten(0, 1)
    counted = set((output.steps[0].rows + 1).tolist())
    for first, ids in each_document(batch):
        log_q = model(ids[None]).logits[0].log_softmax(-1)
        places = [first + i for i in range(len(ids))]
        (-sum((p[t] * log_q[i]).sum() for i, t in enumerate(places) if t in counted) + 0 * log_q.sum()).backward()
    theirs = {name: value.grad for name, value in model.named_parameters()}
    for name, value in head.named_parameters():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(value.grad, theirs[name], atol=1e-5 * scale, rtol=1e-4)


def test_all_of_the_targets_layers_are_the_target() -> None:
    """And copies: the target is not trained with them."""
    target = make_target()
    head = make(target, DraftLmOptions(layers_from_target=list(range(8))), shaken=False)
    batch = pack(target, documents_of(target), ())
    for step in head(batch, 2).steps:
        expected = target.head.logits(batch.last.flatten(0, 1)[step.rows + 1 + step.offset])
        torch.testing.assert_close(step.logits, expected, atol=1e-4, rtol=1e-4)
    theirs = {p.data_ptr() for p in target.model.parameters()}
    assert not theirs & {p.data_ptr() for p in head.parameters()}
    assert all(p.requires_grad for p in head.parameters())
    some = make(target, DraftLmOptions(layers_from_target=[2, 5]), shaken=False)
    own, other = target.model.model.layers[5].state_dict(), some.model.layers[1].state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_sizes_that_are_left_out_are_the_targets() -> None:
    target = make_target(tie_word_embeddings=True, intermediate_size=96)
    half = make(target, DraftLmOptions(hidden_size=32)).config
    assert (half.num_hidden_layers, half.intermediate_size, half.head_dim) == (2, 48, 16)
    assert (half.num_attention_heads, half.num_key_value_heads) == (2, 2)
    assert half.tie_word_embeddings
    assert half.rope_parameters == target.config.rope_parameters
    assert half.max_position_embeddings == 256
    assert not make(target, DraftLmOptions(tie_word_embeddings=False)).config.tie_word_embeddings


def test_the_drafter_shares_the_weights_and_freezes_nothing() -> None:
    for options in (OPTIONS["new"], OPTIONS["tied"]):
        head = make(make_target(), options)
        model = as_model(head).model
        ours = {p.data_ptr() for p in head.parameters()}
        assert {p.data_ptr() for p in model.parameters()} == ours
        assert all(p.requires_grad for p in head.parameters())


def test_it_drafts_no_trees() -> None:
    from draftsmith.decoder.trees import PUBLISHED

    with pytest.raises(UserError, match="draft_model heads draft no static trees: remove the tree medusa_63"):
        head_system("draft_model", make(make_target()), 4, 8, tree=PUBLISHED["medusa_63"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_from": "x", "layers_from_target": [0]}, "both say what to start from: name one"),
        ({"layers_from_target": []}, r"layers_from_target is \[\]: name at least one"),
        ({"layers_from_target": [3, 1]}, r"is \[3, 1\]: name .* in ascending order"),
        ({"layers_from_target": [0, 8]}, r"has 8 layers: choose from 0 to 7"),
        ({"layers_from_target": [0], "hidden_size": 8}, "head.hidden_size is 8, but head.layers_from_target names"),
        ({"num_attention_heads": 5}, "5 heads, 1 key/value heads and head_dim 16 do not fit a hidden size of 64"),
        ({"head_dim": 9}, "head_dim 9 do not fit"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make(make_target(), DraftLmOptions(**options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "odd"), [("qwen3", "is of type 'qwen3'"), ("llama", "has biases in its layers")])
def test_layers_of_a_target_that_is_no_plain_llama(kind: str, odd: str) -> None:
    biased = {"attention_bias": True} if kind == "llama" else {}
    target = Target(tiny_model(kind, **biased), path="tiny", fingerprint="0")
    with pytest.raises(UserError, match=f"{odd}, but draft models here are plain Llamas"):
        make(target, DraftLmOptions(layers_from_target=[0]))
    make(target)  # one of its own needs no plain Llama


def test_layers_of_a_quantized_target_are_refused() -> None:
    target = make_target()
    target.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(
        UserError, match="is quantized, and its layers are not: name the unquantized model, or a small one"
    ):
        make(target, DraftLmOptions(layers_from_target=[0]))


def write(folder: Path, *, tokens: int = 0, **changes: Any) -> Path:
    """A Llama with the tests' tokenizer, which has so many tokens more."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id} | changes
    tokenizer.add_tokens([f"new{i}" for i in range(tokens)])
    tiny_model("llama", initializer_range=0.08, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft-lm")
    write(folder / "target", rope_parameters=LLAMA3)
    small = {"num_hidden_layers": 2, "hidden_size": 32, "rope_parameters": LLAMA3_OWN, "seed": 1}
    write(folder / "small", **small, tie_word_embeddings=True)
    write(folder / "bigger vocabulary", **small, vocab_size=len(tiny_tokenizer()) + 8)
    write(folder / "another token", **small, tokens=1)
    write(folder / "biased", **small, attention_bias=True)
    shutil.copytree(folder / "small", folder / "no tokenizer")
    for name in TOKENIZER_FILES:
        (folder / "no tokenizer" / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def target(place: Path) -> Target:
    return load_target(str(place / "target"), dtype="float32")


def same(one: DraftHead, other: DraftHead) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("options", [DraftLmOptions(num_hidden_layers=1), OPTIONS["tied"]], ids=["untied", "tied"])
def test_an_export_is_a_model_for_everybody(options: DraftLmOptions, target: Target, tmp_path: Path) -> None:
    head = make(target, options)
    folder = export_head(head, target, tmp_path / "out", dtype="float32", num_speculative_tokens=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    batch = pack(target, documents_of(target), ())
    step = head(batch, 1).steps[0]
    for first, ids in each_document(batch):
        rows = [i for i, row in enumerate(step.rows.tolist()) if first <= row < first + len(ids)]
        with torch.no_grad():
            logits = model(ids[None]).logits[0][step.rows[rows] + 1 - first]
        torch.testing.assert_close(step.logits[rows], logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id == target.config.eos_token_id
    assert model.config.bos_token_id == target.config.bos_token_id
    # It drafts for transformers, and comes back.
    ids = torch.tensor([[5, 6, 7, 8]])
    how = {"max_new_tokens": 12, "do_sample": False}
    alone, assisted = target.model.generate(ids, **how), target.model.generate(ids, **how, assistant_model=model)
    assert alone.tolist() == assisted.tolist()
    again = load_head(folder, target)
    assert isinstance(again, DraftLmHead)
    assert same(head, again)
    export_head(head, target, folder, dtype="bfloat16")  # an older export is replaced, tokenizer and all


def test_it_drafts_for_every_target_of_its_tokens(target: Target, tmp_path: Path) -> None:
    """It reads no states, so a larger target of the family takes it, and says that it is another; other tokens refuse it."""
    write(tmp_path / "larger", num_hidden_layers=9, hidden_size=128, seed=3)
    write(tmp_path / "other", vocab_size=len(tiny_tokenizer()) + 8)
    larger, other = (load_target(str(tmp_path / name), dtype="float32") for name in ("larger", "other"))
    head = make(target)
    save_head(head, tmp_path / "native", target)
    export_head(head, target, tmp_path / "export", dtype="float32")
    for folder in (tmp_path / "native", tmp_path / "export"):
        told: list[str] = []
        assert same(load_head(folder, larger, warn=told.append), head)
        assert [f"{larger.path} has other weights or another configuration" in text for text in told] == [True]
        assert same(load_head(folder, target, warn=pytest.fail), head)
        with pytest.raises(UserError, match="The weights of the target"):
            load_head(folder, larger)
        with pytest.raises(UserError, match=f"has {other.vocab_size} tokens where the head needs {target.vocab_size}"):
            load_head(folder, other, warn=told.append)


def test_the_readme_starts_every_engine(target: Target, tmp_path: Path) -> None:
    folder = export_head(make(target), target, tmp_path / "eagle-1", num_speculative_tokens=4)
    text = (folder / "README.md").read_text()
    assert "reads: the text alone" in text
    assert '"method": "draft_model"' in text
    assert "move the folder first" in text, "vLLM takes the path for a method"
    assert "--speculative-algorithm STANDALONE" in text
    assert "decoding_type: DraftTarget" in text
    assert "--spec-type draft-simple" in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "assisted.py", "exec")
    assert "num_assistant_tokens = 4" in code


def test_a_model_that_exists_is_trained_further(place: Path, target: Target, tmp_path: Path) -> None:
    """By init_from or by train.warm_start, from a checkpoint, an export or a plain folder."""
    named = build(DraftLmOptions(init_from=str(place / "small")), target, None)
    found = load_head(place / "small", target)
    assert same(named, found)
    assert named.config.rope_parameters["factor"] == 32
    assert (named.config.hidden_size, named.config.num_hidden_layers, named.lm_head) == (32, 2, None)
    save_head(named, tmp_path / "native", target)
    with pytest.raises(UserError, match=r"^head\.init_from names .* which holds a draft head: .* train\.warm_start\.$"):
        build(DraftLmOptions(init_from=str(tmp_path / "native")), target, None)
    warm = load_head(tmp_path / "native", target)
    with pytest.raises(UserError, match=r"head.layers_from_target is \[0\], but the head .* has null: set"):
        adopt_options(DraftLmOptions(layers_from_target=[0]), warm, target, "native")
    options = adopt_options(DraftLmOptions(init_from=str(place / "small")), warm, target, "native")
    assert (options.hidden_size, options.tie_word_embeddings) == (32, True)
    assert same(restart(warm, options, target), named)
    with pytest.raises(UserError, match=r"head.hidden_size is 64, but the head that train.warm_start names"):
        adopt_options(DraftLmOptions(hidden_size=64), warm, target, "native")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("bigger vocabulary", "has a vocabulary of .* take a model of the target's own family"),
        ("another token", "has another tokenizer than the target: id .* is 'new0' there and no token in the target"),
        ("biased", "has biases in its layers, but draft models here are plain Llamas"),
    ],
)
def test_models_that_cannot_draft(folder: str, words: str, place: Path, target: Target) -> None:
    for started in (
        lambda: build(DraftLmOptions(init_from=str(place / folder)), target, None),
        lambda: load_head(place / folder, target),
    ):
        with pytest.raises(UserError, match=words) as caught:
            started()
        assert "\n" not in str(caught.value)


def test_what_is_not_there_or_has_no_tokens_is_refused(place: Path, target: Target) -> None:
    for path, words in (
        (place / "nowhere", "does not exist"),
        (place / "no tokenizer", "No tokenizer could be loaded"),
        (place / "target", "is the target itself; take a smaller model"),
    ):
        with pytest.raises(UserError, match=f"head.init_from names a model that cannot be a draft .*{words}"):
            build(DraftLmOptions(init_from=str(path)), target, None)
    with pytest.raises(UserError, match="is the target itself, which drafts nothing"):
        load_head(place / "target", target)


def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def untie(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def quantize(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def wide(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["intermediate_size"] += 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop, "lacks the tensor model.layers.1.mlp.up_proj.weight"),
        (untie, "holds an lm_head.weight that is not the embeddings, though tie_word_embeddings is true"),
        (quantize, "holds model.norm.weight as torch.int8"),
        (wide, "has shape"),
    ],
)
def test_damaged_folders(
    damage: Callable[[dict[str, Tensor], dict[str, Any]], None], words: str, place: Path, target: Target, tmp_path: Path
) -> None:
    folder = shutil.copytree(place / "small", tmp_path / "small")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    # A copy of the embeddings, and tables of older files, are in order.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert same(load_head(folder, target), load_head(place / "small", target))
    damage(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_head(folder, target)
