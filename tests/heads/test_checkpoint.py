"""Native checkpoints: the same head after a reload, refused on another target, never half-written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import UserError
from draftsmith.heads import checkpoint
from draftsmith.heads.checkpoint import model_directory, save_head
from draftsmith.heads.eagle3.head import Eagle3Options
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import find_method
from tests.batches import same_logits
from tests.exports import make_eagle3, make_medusa, make_target

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}


def test_the_same_logits_after_a_reload(tmp_path):
    target = make_target(rope_parameters=YARN)
    head = make_eagle3(target, norm_before_fc=True, intermediate_size=48, train_lm_head=False)
    save_head(head, tmp_path / "head", target)
    again = load_head(tmp_path / "head", target)
    assert same_logits(head, again, target)
    assert (again.options, again.reads.layer_ids) == (head.options, head.reads.layer_ids)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in head.parameters()]
    assert {f.name for f in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
    assert list(tmp_path.iterdir()) == [tmp_path / "head"]


def test_the_targets_embedding_is_shared_not_stored(tmp_path):
    target = make_target()
    save_head(make_eagle3(target), tmp_path / "head", target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "head" / "model.safetensors")
    assert load_head(tmp_path / "head", target).embed_tokens.weight.data_ptr() == target.embedding.data_ptr()


def test_no_tensor_need_be_as_large_as_the_targets_vocabulary(tmp_path):
    target = make_target(vocab_size=5000)
    head = make_medusa(target, original_lm_head=True)
    save_head(head, tmp_path / "head", target)
    assert (
        max(size for value in load_file(tmp_path / "head" / checkpoint.WEIGHTS).values() for size in value.shape) < 4096
    )
    assert load_head(tmp_path / "head", target).state_dict().keys() == head.state_dict().keys()


def test_an_embedding_of_its_own_is_stored_and_never_reaches_the_target(tmp_path):
    target = make_target()
    head = make_eagle3(target)
    head.embed_tokens.weight = torch.nn.Parameter(head.embed_tokens.weight + 1, requires_grad=False)
    before = target.embedding.clone()
    save_head(head, tmp_path / "head", target)
    again = load_head(tmp_path / "head", target)
    assert torch.equal(again.embed_tokens.weight, before + 1)
    assert torch.equal(target.embedding, before)


def test_a_target_in_another_dtype_is_the_same_target(tmp_path):
    target = make_target()
    target.model.to(torch.bfloat16)
    head = make_eagle3(target).float()
    save_head(head, tmp_path / "head", target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "head" / "model.safetensors")
    again = load_head(tmp_path / "head", target)
    assert again.fc.weight.dtype == torch.float32
    assert torch.equal(again.lm_head.weight, head.lm_head.weight)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"fingerprint": "other"}, "weights of the target .*fingerprint other, expected abc"),
        ({"vocab_size": 170}, "has 170 tokens where the head needs 160"),
        ({"hidden_size": 32}, "has 32 hidden units where the head needs 64"),
        ({"num_hidden_layers": 9}, "has 9 layers where the head needs 8"),
    ],
)
def test_another_target_is_refused(overrides, words, tmp_path):
    target = make_target()
    save_head(make_eagle3(target), tmp_path / "head", target)
    with pytest.raises(UserError, match=words):
        load_head(tmp_path / "head", make_target(**overrides))


def test_another_target_of_the_same_sizes_is_taken_with_a_warning(tmp_path):
    target, told = make_target(), []
    head = make_eagle3(target)
    save_head(head, tmp_path / "head", target)
    load_head(tmp_path / "head", target, warn=told.append)
    assert not told
    again = load_head(tmp_path / "head", make_target("other"), warn=told.append)
    assert torch.equal(again.fc.weight, head.fc.weight)
    assert [
        f"{tmp_path / 'head'} was made for models/tiny; models/tiny has other weights" in text for text in told
    ] == [True]
    with pytest.raises(UserError, match="has 170 tokens"):
        load_head(tmp_path / "head", make_target(vocab_size=170), warn=told.append)


def test_a_checkpoint_of_an_earlier_version_still_loads(tmp_path):
    """It records path, fingerprint and sizes only."""
    target = make_target()
    head = make_eagle3(target)
    save_head(head, tmp_path / "head", target)
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    old = ("path", "fingerprint", "vocab_size", "hidden_size", "num_layers", "architectures")
    file.write_text(json.dumps(config | {"target": {key: config["target"][key] for key in old}}))
    assert same_logits(load_head(tmp_path / "head", target), head, target)
    with pytest.raises(UserError, match="fingerprint other, expected abc"):
        load_head(tmp_path / "head", make_target("other"))


def test_a_failure_while_writing_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    target = make_target()
    head = make_eagle3(target)
    save_head(head, tmp_path / "head", target)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    head.fc.weight.data += 1
    with pytest.raises(UserError, match="No space left"):
        save_head(head, tmp_path / "head", target)
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "head"]
    monkeypatch.undo()
    save_head(head, tmp_path / "head", target)
    assert same_logits(load_head(tmp_path / "head", target), head, target)


@pytest.mark.parametrize("occupant", ["folder", "file"])
def test_other_peoples_files_are_never_replaced(occupant, tmp_path):
    place = tmp_path / "head"
    if occupant == "folder":
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    else:
        place.write_text("mine")
    with pytest.raises(UserError, match="not a model folder"), model_directory(place):
        pass
    assert place.exists()


def test_a_head_of_another_width_needs_its_embeddings(tmp_path: Path) -> None:
    target = make_target()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    options = Eagle3Options(layer_ids=[1], train_embeddings=True, **sizes)
    save_head(find_method("eagle3").build(options, target, None), tmp_path / "head", target)
    file = tmp_path / "head" / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "embed_tokens.weight"}, file)
    with pytest.raises(UserError, match=r"lacks the tensor embed_tokens\.weight, and the target's has another width"):
        load_head(tmp_path / "head", target)


def test_a_head_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    place = tmp_path / "head"
    with model_directory(place) as folder:
        (folder / "config.json").write_text("1")
    rename = Path.rename

    def refuse(self, to):
        if self.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="No space left"), model_directory(place) as folder:
        (folder / "config.json").write_text("2")
    assert (place / "config.json").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
