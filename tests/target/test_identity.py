"""The identity of a target: every change of a folder is found under its own name, and nothing else is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.record import RECORD, Passport, read_record, write_passport
from draftsmith.storage import fingerprint
from draftsmith.target.folder import fingerprint_directory
from draftsmith.target.identity import CHANGES_OUTPUT, KINDS, TargetIdentity, compare, identify_directory, not_compared
from draftsmith.target.target import load_target
from tests.exports import make_eagle3, make_medusa, make_target
from tests.helpers import save_target, tiny_tokenizer
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, its lm_head not tied."""
    folder = tmp_path_factory.mktemp("identity") / "target"
    save_target(folder)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def kinds(folder: Path, other: Path) -> list[str]:
    return [one.kind for one in compare(identify_directory(folder), identify_directory(other))]


def change_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def change_tensor(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[-1] += 0.5
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def change_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def swap_merges(value: dict) -> None:
    merges = value["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


MUTANTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "one value of the lm_head": (change_tensor("lm_head.weight"), ["lm_head", "weights"]),
    "one value of the embedding": (change_tensor("model.embed_tokens.weight"), ["embeddings", "weights"]),
    "one value of a layer": (change_tensor("model.layers.3.mlp.up_proj.weight"), ["weights"]),
    "a key of the config": (change_json("config.json", lambda c: c.update(rms_norm_eps=0.5)), ["config"]),
    "the eos ids": (change_json("generation_config.json", lambda c: c.update(eos_token_id=[2, 5])), ["eos"]),
    "the order of two merges": (change_json("tokenizer.json", swap_merges), ["tokenizer"]),
    "an added token": (
        change_json("tokenizer.json", lambda t: t["added_tokens"][1].update(content="<|start|>")),
        ["tokenizer"],
    ),
    "the splitting": (change_json("tokenizer.json", lambda t: t.update(pre_tokenizer=None)), ["tokenizer"]),
    "the name of eos": (change_json("tokenizer_config.json", lambda t: t.update(eos_token="</s>")), ["tokenizer"]),
    "a blank in the template": (change_template, ["template"]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_change_is_found_under_its_own_name_only(mutant: str, folder: Path, copy: Path) -> None:
    change, expected = MUTANTS[mutant]
    change(copy)
    assert kinds(folder, copy) == kinds(copy, folder) == expected
    same = not {*CHANGES_OUTPUT} & {*expected}
    assert (fingerprint_directory(folder) == fingerprint_directory(copy)) == same
    assert not not_compared(identify_directory(folder), identify_directory(copy))


def shard(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def move_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    change_json("tokenizer_config.json", lambda t: t.update(chat_template=text))(folder)


def list_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": text}]
    change_json("tokenizer_config.json", lambda t: t.update(chat_template=named))(folder)


def old_merges(value: dict) -> None:
    """As tokenizers before 0.20 write them; switches that are off are left out."""
    value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
    value["model"] = {key: item for key, item in value["model"].items() if item not in (None, False)}


REWRITINGS: dict[str, Callable[[Path], None]] = {
    "copied": lambda folder: None,
    "sharded": shard,
    "template in the config": move_template,
    "template in a list": list_template,
    "older merges": change_json("tokenizer.json", old_merges),
    "padding left on": change_json("tokenizer.json", lambda t: t.update(padding={"strategy": "BatchLongest"})),
    "token as an object": change_json(
        "tokenizer_config.json", lambda t: t.update(eos_token={"content": t["eos_token"], "lstrip": False})
    ),
    "another version of transformers": change_json("config.json", lambda c: c.update(transformers_version="5.0")),
}


@pytest.mark.parametrize("rewriting", REWRITINGS)
def test_the_same_target_in_other_files_is_the_same(rewriting: str, folder: Path, copy: Path) -> None:
    REWRITINGS[rewriting](copy)
    assert kinds(folder, copy) == []
    assert not_compared(identify_directory(folder), identify_directory(copy)) == []
    assert fingerprint_directory(folder) == fingerprint_directory(copy)


def test_what_is_known_of_a_folder(folder: Path) -> None:
    known = identify_directory(folder, "org/model")
    assert (known.path, known.model_type, known.architectures) == ("org/model", "llama", ("LlamaForCausalLM",))
    assert (known.vocab_size, known.hidden_size, known.num_layers, known.num_heads) == (len(tiny_tokenizer()), 64, 8, 4)
    assert known.eos_ids == (2,)
    assert known.tied is False
    assert TargetIdentity.from_json(json.loads(json.dumps(known.to_json())), "here") == known


def test_a_tied_lm_head_is_the_embedding(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    known = identify_directory(tmp_path)
    assert known.tied is True
    assert known.lm_head == known.embeddings is not None
    # An architecture that ties unless told otherwise; a copy of the matrix in the file changes nothing.
    change_json("config.json", lambda c: c.pop("tie_word_embeddings"))(tmp_path)
    assert identify_directory(tmp_path).tied is True
    change_json("config.json", lambda c: c.update(tie_word_embeddings=True))(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    assert identify_directory(tmp_path).lm_head == known.lm_head


@pytest.mark.parametrize(
    ("model_type", "names"), [("gpt_neox", ("embed_in", "embed_out")), ("gpt2", ("wte", "lm_head"))]
)
def test_other_architectures_call_them_differently(model_type: str, names: tuple[str, str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    config = AutoConfig.for_model(model_type, **sizes, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    known = identify_directory(tmp_path)
    assert (known.vocab_size, known.hidden_size, known.tied) == (50, 32, False)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, kind in zip(names, ("embeddings", "lm_head"), strict=True):
        (key,) = (key for key in tensors if key.endswith(f"{name}.weight"))
        changed = {k: value + 1 if k == key else value for k, value in tensors.items()}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        assert [one.kind for one in compare(known, identify_directory(tmp_path))] == [kind, "weights"]


def test_what_is_not_there_is_not_compared(folder: Path, copy: Path) -> None:
    for file in copy.iterdir():
        if "token" in file.name or "template" in file.name or file.suffix == ".safetensors":
            file.unlink()
    assert kinds(folder, copy) == []
    lost = not_compared(identify_directory(folder), identify_directory(copy))
    assert lost == ["embeddings", "lm_head", "weights", "tokenizer", "template"]
    assert not_compared(TargetIdentity(), identify_directory(folder)) == list(KINDS)


def test_tokenizers_of_other_files_cannot_be_compared(folder: Path, copy: Path) -> None:
    """vocab.json and merges.txt say the same as tokenizer.json in other words, so nothing is claimed."""
    model = json.loads((copy / "tokenizer.json").read_text())["model"]
    (copy / "vocab.json").write_text(json.dumps(model["vocab"]))
    (copy / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    assert kinds(folder, copy) == []  # tokenizer.json goes first
    (copy / "tokenizer.json").unlink()
    before = identify_directory(copy)
    assert kinds(folder, copy) == []
    assert not_compared(identify_directory(folder), before) == ["tokenizer"]
    (copy / "merges.txt").write_text((copy / "merges.txt").read_text() + "\nx y")
    assert [one.kind for one in compare(before, identify_directory(copy))] == ["tokenizer"]
    (copy / "tokenizer.model").write_bytes(b"pieces")
    before = identify_directory(copy)
    (copy / "tokenizer.model").write_bytes(b"other pieces")
    assert [one.kind for one in compare(before, identify_directory(copy))] == ["tokenizer"]


def test_differences_say_what_they_mean() -> None:
    base = TargetIdentity(
        vocab_size=160, fingerprint="f", config="c", weights="w", embeddings="e", lm_head="l", eos_ids=(2,)
    )
    (fine_tuned,) = compare(base, replace(base, weights="x", fingerprint="g"))
    assert "same embeddings and lm_head" in fine_tuned.found
    (unknown,) = compare(base, replace(base, weights="x", embeddings=None, lm_head=None))
    assert "same embeddings" not in unknown.found
    (old,) = compare(replace(base, weights=None, config=None), replace(base, fingerprint="g", weights="x"))
    assert old.kind == "weights"
    (sizes,) = compare(base, replace(base, vocab_size=170))
    assert (sizes.severity, sizes.found) == ("refuse", "170 tokens where the head needs 160")
    (eos,) = compare(base, replace(base, eos_ids=(2, 3)))
    assert "[2, 3] instead of [2]" in eos.found


def test_sampled_windows_see_a_change_of_every_value(folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.target.folder.FULL_HASH_BYTES", 0)
    monkeypatch.setattr("draftsmith.target.folder.SAMPLE_BYTES", 64)
    assert kinds(folder, copy) == []
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] *= 1.001
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert kinds(folder, copy) == ["lm_head", "weights"]


def test_damaged_files_are_one_sentence(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        identify_directory(copy)


def test_a_loaded_target_is_its_folder(folder: Path) -> None:
    target = load_target(str(folder))
    assert target.identity == load_target(str(folder), dtype="bfloat16").identity == identify_directory(folder)
    in_memory = make_target().identity
    assert (in_memory.vocab_size, in_memory.eos_ids, in_memory.tokenizer) == (160, (2,), None)


@pytest.mark.parametrize("make", [make_eagle3, make_medusa])
def test_checkpoints_and_exports_record_their_target(make: Callable, folder: Path, copy: Path, tmp_path: Path) -> None:
    target = load_target(str(folder))
    head = make(target)
    save_head(head, tmp_path / "head", target)
    export_head(head, target, tmp_path / "export")
    known = identify_directory(folder)
    assert read_record(tmp_path / "head") == read_record(tmp_path / "export") == known
    record = json.loads((tmp_path / "export" / RECORD).read_text())
    assert (record["method"], record["layout"]) == (head.method, head.method)
    export_head(head, target, tmp_path / "export")  # a second export replaces the first, record and all

    change_tensor("model.layers.3.mlp.up_proj.weight")(copy)
    change_template(copy)
    other = load_target(str(copy))
    for place in ("head", "export"):
        told: list[str] = []
        load_head(tmp_path / place, other, warn=told.append)
        assert [("other weights" in text, "chat template" in text) for text in told] == [(True, False), (False, True)]
        with pytest.raises(UserError, match=r"weights of the target .* are not those"):
            load_head(tmp_path / place, other)


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_passport(tmp_path, Passport("0", "eagle3", "eagle3", TargetIdentity(path="x").to_json()))
    assert read_record(tmp_path) == TargetIdentity(path="x")
    record = json.loads((tmp_path / RECORD).read_text())
    del record["digest"]
    for wrong, words in (
        (record, "was changed since"),
        (record | {"schema_version": 9}, "schema version 9"),
        (record | {"target": None}, "must be an object"),
        (record | {"target": {"schema_version": 9}}, "schema version 9"),
        (record | {"target": {"vocab_size": "many"}}, "vocab_size"),
    ):
        signed = wrong if wrong is record else wrong | {"digest": fingerprint(wrong)}
        (tmp_path / RECORD).write_text(json.dumps(signed))
        with pytest.raises(UserError, match=words):
            read_record(tmp_path)
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_record(tmp_path)
