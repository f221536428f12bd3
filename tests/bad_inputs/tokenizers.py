"""Bad tokenizers: files that are lists, vocabularies that are none."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.templates import load_tokenizer, render_prompt
from draftsmith.target.files import hash_chat_template, hash_tokenizer
from tests.bad_inputs.cases import Case, Table, cut, edit_json, link, nested, pipe, remove, replace_by_folder, write
from tests.helpers import tiny_tokenizer

FAST, CONFIG = "tokenizer.json", "tokenizer_config.json"
MESSAGES = [{"role": "user", "content": "Where is the key?"}]


@functools.cache
def _saved() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make(folder: Path) -> None:
    """Copy a small byte-level BPE tokenizer with a ChatML template."""
    shutil.copytree(_saved(), folder, dirs_exist_ok=True)


def read(folder: Path) -> None:
    """Load the tokenizer, render a prompt, and hash what identifies it."""
    render_prompt(load_tokenizer(str(folder)), MESSAGES)
    hash_tokenizer(folder)
    hash_chat_template(folder)


def fast(name: str, **changes: Any) -> Case:
    """Return the case of a tokenizer.json with other entries."""
    return Case(f"fast-{name}", edit_json(FAST, **changes), ("tokenizer",))


def model(name: str, **changes: Any) -> Case:
    """Return the case of a tokenizer.json whose model has other entries."""

    def spoil(folder: Path) -> None:
        value = json.loads((folder / FAST).read_text())
        value["model"] |= changes
        (folder / FAST).write_text(json.dumps(value))

    return Case(f"model-{name}", spoil, ("tokenizer",))


def settings(name: str, **changes: Any) -> Case:
    """Return the case of a tokenizer_config.json with other entries."""
    return Case(f"settings-{name}", edit_json(CONFIG, **changes), ("tokenizer",))


TABLE = Table(
    "tokenizers",
    make,
    read,
    (
        Case("fast-empty-file", write(FAST, ""), ("tokenizer",)),
        Case("fast-list", write(FAST, "[]"), ("tokenizer",)),
        Case("fast-null", write(FAST, "null"), ("tokenizer",)),
        Case("fast-object", write(FAST, "{}"), ("tokenizer",)),
        Case("fast-text", write(FAST, '"bpe"'), ("tokenizer",)),
        Case("fast-cut", cut(FAST, 0.5), ("tokenizer",)),
        Case("fast-binary", write(FAST, b"\xff\x80" * 99), ("tokenizer",)),
        Case("fast-deep", write(FAST, nested(100_000)), ("tokenizer",)),
        Case("fast-missing", remove(FAST), ("tokenizer",)),
        Case("fast-folder", replace_by_folder(FAST), ("tokenizer",)),
        Case("fast-dangling", link(FAST, "nowhere"), ("tokenizer",)),
        Case("fast-pipe", pipe(FAST), ("tokenizer",)),
        fast("model-null", model=None),
        fast("model-list", model=[]),
        fast("model-text", model="BPE"),
        fast("model-unknown", model={"type": "Magic"}),
        fast("added-object", added_tokens={"a": 1}),
        fast("added-numbers", added_tokens=[1, 2]),
        fast("added-without-id", added_tokens=[{"content": "x"}]),
        fast("added-text", added_tokens="x"),
        fast("pre_tokenizer-list", pre_tokenizer=[1]),
        fast("decoder-text", decoder="ByteLevel"),
        fast("normalizer-unknown", normalizer={"type": "Magic"}),
        model("vocab-list", vocab=["a", "b"]),
        model("vocab-texts", vocab={"a": "1"}),
        model("vocab-negative", vocab={"a": -1}),
        model("vocab-huge", vocab={"a": 2**60}),
        model("vocab-null", vocab=None),
        model("merges-numbers", merges=[1, 2]),
        model("merges-unknown", merges=["qq zz"]),
        model("merges-text", merges="a b"),
        Case("settings-list", write(CONFIG, "[]"), ("tokenizer",)),
        Case("settings-null", write(CONFIG, "null"), ("tokenizer",)),
        Case("settings-cut", cut(CONFIG, 0.5), ("tokenizer",)),
        Case("settings-binary", write(CONFIG, b"\xff\x80" * 9), ("tokenizer",)),
        Case("settings-deep", write(CONFIG, '{"a": ' + nested(100_000) + "}"), ("tokenizer",)),
        Case("settings-folder", replace_by_folder(CONFIG), ("tokenizer",)),
        Case("settings-pipe", pipe(CONFIG), ("tokenizer",)),
        settings("class-number", tokenizer_class=7),
        settings("eos-number", eos_token=5),
        settings("eos-list", eos_token=["<|im_end|>"]),
        settings("decoder-list", added_tokens_decoder=[1]),
        settings("decoder-words", added_tokens_decoder={"a": {"content": "x"}}),
        settings("decoder-numbers", added_tokens_decoder={"0": 1}),
    ),
)
