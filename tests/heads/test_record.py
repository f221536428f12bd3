"""The passport of an export: what it says of a head, and that the files, the reader and the passport itself are held to it."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.training.history import trained_length
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.record import RECORD, HeadFacts, History, Trained, facts_of, read_passport, write_passport
from draftsmith.storage import fingerprint
from tests.exports import PLAIN, VOCAB, make_dflash2, make_eagle3, make_target


@pytest.mark.parametrize("method", PLAIN)
def test_a_passport_says_how_a_head_is_computed(method: str, tmp_path: Path) -> None:
    target = make_target()
    head = PLAIN[method](target)
    folder = export_head(head, target, tmp_path / "out", history=History(Trained(answers=3, longest=40)))
    passport = read_passport(folder)
    assert passport is not None
    assert passport.head == facts_of(head) == facts_of(load_head(folder, target))
    assert passport.files.keys() == {file.name for file in folder.iterdir()} - {RECORD, "README.md"}
    assert trained_length(folder) == 40


def test_the_facts_of_two_heads() -> None:
    target = make_target()
    chain, block = facts_of(make_eagle3(target)), facts_of(make_dflash2(target, None))
    digest = chain.draft_vocab
    assert chain == HeadFacts((1, 3, 5), None, "causal", None, None, None, len(VOCAB), digest)
    assert digest != facts_of(make_eagle3(target, VOCAB + 0 * VOCAB.roll(1) + (VOCAB == 159) * -1)).draft_vocab
    assert block == HeadFacts((1, 3, 5), None, "bidirectional", None, 1, 3, None, None)
    assert facts_of(PLAIN["mtp"](target)).last_state == "after_norm"
    assert facts_of(PLAIN["draft_model"](target)).last_state is None


def test_changed_exports_are_refused_by_name(tmp_path: Path) -> None:
    target = make_target()
    folder = export_head(make_eagle3(target), target, tmp_path / "out")
    (folder / "README.md").write_text("ours to change")
    load_head(folder, target)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors is not the file that was exported"):
        load_head(folder, target)
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    with pytest.raises(UserError, match=r"config\.json is not the file"):
        load_head(folder, target)
    (folder / RECORD).unlink()  # whoever changes a head has one without a passport
    load_head(folder, target)


@pytest.mark.parametrize(
    ("method", "layout", "added"),
    [
        ("medusa", "medusa", "medusa_lm_head.safetensors"),
        ("eagle3", "eagle3", "model.safetensors.index.json"),
        ("eagle3", "eagle3", "medusa_lm_head.pt"),
    ],
)
def test_weights_that_were_added_to_an_export_are_refused_by_name(
    method: str, layout: str, added: str, tmp_path: Path
) -> None:
    """They may be read in place of those that were exported, which are as they were."""
    target = make_target()
    folder = export_head(PLAIN[method](target), target, tmp_path / "out", layout=layout)
    passport = read_passport(folder)
    assert passport is not None
    assert passport.changed(folder) == []
    shutil.copyfile(folder / next(name for name in passport.files if name != "config.json"), folder / added)
    assert passport.changed(folder) == [added]
    with pytest.raises(UserError, match=rf"{added} was not exported with the head \(draftsmith\.json does not"):
        load_head(folder, target)
    (folder / added).unlink()
    load_head(folder, target)


def test_a_reader_that_computes_another_head_is_refused(tmp_path: Path) -> None:
    target = make_target()
    folder = export_head(make_eagle3(target), target, tmp_path / "out")
    passport = read_passport(folder)
    assert passport is not None
    assert passport.head is not None
    for changed, words in (
        ({"layer_ids": (2, 4, 6)}, r"layer_ids \(2, 4, 6\), but is read as one with \(1, 3, 5\)"),
        ({"window": 16}, "window 16, but is read as one with None"),
        ({"draft_vocab": "0" * 64}, "draft_vocab 0000"),
    ):
        write_passport(folder, replace(passport, head=replace(passport.head, **changed), files={}))
        with pytest.raises(UserError, match=words):
            load_head(folder, target)
    # One that somebody else signed is read within its types.
    value = json.loads(json.dumps(asdict(replace(passport, files={})))) | {"trained": {"answers": "all"}}
    (folder / RECORD).write_text(json.dumps(value | {"digest": fingerprint(value)}))
    with pytest.raises(UserError, match="trained"):
        load_head(folder, target)


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    target = make_target()
    folder = export_head(make_eagle3(target), target, tmp_path / "out")
    now = json.loads((folder / RECORD).read_text())
    earlier = {name: now[name] for name in ("draftsmith", "method", "layout", "target")} | {"schema_version": 1}
    (folder / RECORD).write_text(json.dumps(earlier))
    passport = read_passport(folder)
    assert passport is not None
    assert (passport.head, passport.files, passport.measured) == (None, {}, ())
    load_head(folder, target)
    assert trained_length(folder) is None
