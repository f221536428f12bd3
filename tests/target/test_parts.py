"""Training from a finished store takes embeddings and projection of its target, and becomes what it would with all of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.heads.layers.from_target import final_norm_weight
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target import parts
from draftsmith.target.parts import PARTS, TargetParts, open_parts, write_parts
from draftsmith.target.pretrained import probe_ids
from draftsmith.target.target import Target, load_target
from tests.batches import documents_of, pack
from tests.ggufs import tiny_llama, write_gguf
from tests.models import SMALL_HEADS, save_tiny_target
from tests.workplace import digests, fails, make_workplace, options

LAYERS = (2, 4, 6)
METHODS = [name for name, method in methods().items() if method.layers is not True]


def opened(path: str, store: Path, **changed: Any) -> TargetParts | None:
    plain = {"dtype": "auto", "device": "cpu", "attn_implementation": "sdpa", "trust_remote_code": False}
    return open_parts(path, store / PARTS, **{**plain, **changed})


def both(path: str, store: Path) -> tuple[Target, TargetParts]:
    """A target as a whole, and as its store keeps it."""
    whole = load_target(path)
    write_parts(whole, store / PARTS, [k for k in LAYERS if k < whole.num_layers], final_norm_weight(whole))
    found = opened(path, store)
    assert found is not None
    return whole, found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, TargetParts]:
    folder = tmp_path_factory.mktemp("target")
    return both(save_tiny_target(folder / "llama", "llama"), folder)


@pytest.mark.parametrize("method", METHODS)
def test_heads_start_and_learn_as_with_the_whole_target(method: str, pair: tuple[Target, TargetParts]) -> None:
    known, losses, states = methods()[method], [], []
    documents = documents_of(pair[0])
    vocab = torch.arange(0, 160, 2) if method in ("eagle3", "peagle") else None
    for target in pair:
        torch.manual_seed(0)
        head = known.build(known.options_class(**SMALL_HEADS[method]), target, vocab)
        batch = pack(pair[0], documents, LAYERS if head.reads.layer_ids else ())
        torch.manual_seed(1)
        loss = head_loss(head(batch, head.trains.steps), batch, target.head, head.draft_vocab, LossSpec()).loss_sum
        loss.backward()
        states.append(head.state_dict() | {n: p.grad for n, p in head.named_parameters() if p.grad is not None})
        losses.append(loss)
    assert torch.equal(*losses)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "cohere", "granite", "mixtral", "gguf"])
def test_targets_of_every_kind_project_as_they_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    if kind == "gguf":
        path = str(tmp_path / "model.gguf")
        write_gguf(tmp_path / "model.gguf", tiny_llama())
    else:
        path = save_tiny_target(tmp_path / kind, kind)
        # Many models that chat end their answers with more tokens than their config names.
        (tmp_path / kind / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    whole, found = both(path, tmp_path)
    last = whole.forward(probe_ids(whole)).last
    assert torch.equal(found.head.logits(last), whole.head.logits(last))
    assert torch.equal(found.embedding, whole.embedding)
    assert (found.embedding.data_ptr() == found.head.weight.data_ptr()) == whole.config.tie_word_embeddings
    assert (found.identity, found.eos_ids) == (whole.identity, whole.eos_ids)
    assert kind == "gguf" or found.eos_ids == (2, 5)
    assert (found.context_length, found.dtype, found.fingerprint) == (
        whole.context_length,
        whole.dtype,
        whole.fingerprint,
    )
    expected = final_norm_weight(whole)
    assert (found.final_norm is None) == (expected is None)
    assert expected is None or torch.equal(expected, found.final_norm)  # type: ignore[arg-type]


def test_two_tensors_are_read_and_the_layers_have_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = save_tiny_target(tmp_path / "llama", "llama"), []
    both(path, tmp_path)

    class Counting:
        def __init__(self, file: Path, *rest: str) -> None:
            self.opened = safe_open(file, *rest)

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.opened.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.opened, name)

    monkeypatch.setattr(parts, "safe_open", Counting)
    found = opened(path, tmp_path)
    assert found is not None
    probe = {"last", "final_norm", *(f"aux.{k}" for k in LAYERS)}
    assert sorted(read) == sorted([*probe, "lm_head.weight", "model.embed_tokens.weight"])
    held = [name for name, value in found.model.named_parameters() if not value.is_meta]
    assert held == ["model.embed_tokens.weight", "lm_head.weight"]
    assert opened(path, tmp_path, dtype="bfloat16") is None
    with pytest.raises(AssertionError, match="are not loaded"):
        found.forward(torch.zeros(1, 3, dtype=torch.int64))


def test_the_dtype_of_the_checkpoint_is_not_that_of_any_store(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "llama", "llama")
    write_parts(load_target(path, dtype="bfloat16"), tmp_path / PARTS, LAYERS, None)
    assert opened(path, tmp_path, dtype="bfloat16") is not None
    assert opened(path, tmp_path) is None, "it is in float32"


def test_what_is_packed_is_not_kept(tmp_path: Path) -> None:
    target = load_target(save_tiny_target(tmp_path / "llama", "llama"))
    target.head.weight = target.head.weight + 1  # what its files do not hold
    write_parts(target, tmp_path / PARTS, LAYERS, None)
    assert not (tmp_path / PARTS).exists()
    assert opened(target.path, tmp_path) is None


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workplace with a target in many files, and a finished store."""
    place = make_workplace(tmp_path_factory.mktemp("sharded"))
    model = AutoModelForCausalLM.from_pretrained(place / "target")
    (place / "target" / "model.safetensors").unlink()
    model.save_pretrained(place / "target", max_shard_size="60KB")
    assert main(["extract", *options(place, place / "run")]) == 0
    return place


def spoil(folder: Path) -> None:
    """Delete the files without embeddings and projection."""
    held = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(held.values()) - {held["model.embed_tokens.weight"], held["lm_head.weight"]}:
        (folder / name).unlink()


@pytest.mark.full
def test_a_target_without_its_layers_trains_from_a_store(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the head of the whole one; what needs the layers says which file is missing, before anything is removed."""
    words, run = options(place, place / "run"), place / "run"
    shutil.copytree(run, place / "before")
    whole = load_target(str(place / "target"))
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.stages.session.open_parts", lambda *_, **__: None)
        assert main(["train", *words]) == 0
    assert "was made with other settings" in fails(["train", *words, "--head.layer_ids", "[1, 3, 5]"], capsys)
    made = digests(run)
    shutil.rmtree(run)
    shutil.copytree(place / "before", run)
    spoil(place / "target")
    assert main(["train", *words]) == 0
    assert {name: digest for name, digest in digests(run).items() if name != "run.json"} == {
        name: digest for name, digest in made.items() if name != "run.json"
    }
    assert (
        json.loads((run / "train" / "best" / "config.json").read_text())["target"]["fingerprint"] == whole.fingerprint
    )
    for command in (["evaluate"], ["run"], ["train", "--redo", "features"]):
        assert "is missing: fetch the target again" in fails([*command, *words], capsys)
    assert (run / "features" / PARTS).exists()
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    recipe |= {"method": "medusa2", "head": {"num_heads": 3}, "data_dir": str(run)}
    (place / "tunes.yaml").write_text(yaml.safe_dump(recipe))
    tuning = ["--recipe", str(place / "tunes.yaml"), "--output_dir", str(place / "other")]
    assert "is missing: fetch the target again" in fails(["train", *tuning], capsys)


def test_the_same_target_by_another_name_leaves_the_same_bytes(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "llama", "llama")
    for store, name in (("one", path), ("other", str(tmp_path / "one" / ".." / "llama"))):
        (tmp_path / store).mkdir()
        _, found = both(name, tmp_path / store)
        assert found.identity.path == name
    assert (tmp_path / "one" / PARTS).read_bytes() == (tmp_path / "other" / PARTS).read_bytes()


def test_files_of_another_target_are_refused(tmp_path: Path) -> None:
    model = load_target(save_tiny_target(tmp_path / "llama", "llama")).model
    model.save_pretrained(folder := tmp_path / "many", max_shard_size="60KB")
    whole = load_target(str(folder))
    write_parts(whole, tmp_path / PARTS, LAYERS, None)
    spoil(folder)
    assert opened(str(folder), tmp_path) is not None
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    layer = next(name for name in index if "mlp.up_proj" in name)
    with torch.no_grad():
        model.get_submodule(layer.removesuffix(".weight")).weight += 1
    model.save_pretrained(tmp_path / "tuned", max_shard_size="60KB")
    shutil.copy(tmp_path / "tuned" / index[layer], folder)
    with pytest.raises(UserError, match=f"lacks weights, and its {index[layer]} is not that of the target which made"):
        opened(str(folder), tmp_path)
    (folder / index[layer]).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match=r"and its config\.json is not that"):
        opened(str(folder), tmp_path)
