"""Bad tokenizers: files that are lists, vocabularies that are none."""

from pathlib import Path
from typing import Any

from draftsmith.data.conversations.templates import load_tokenizer, render_prompt
from draftsmith.target.folder import hash_chat_template, hash_tokenizer
from tests.bad_inputs.cases import Case, Table, damaged, edit_json, write
from tests.bad_inputs.templates import CONFIG, MESSAGES, make

FAST = "tokenizer.json"


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
    return Case(f"model-{name}", edit_json(FAST, "model", **changes), ("tokenizer",))


def settings(name: str, **changes: Any) -> Case:
    """Return the case of a tokenizer_config.json with other entries."""
    return Case(f"settings-{name}", edit_json(CONFIG, **changes), ("tokenizer",))


TABLE = Table(
    "tokenizers",
    make,
    read,
    (
        *damaged(FAST, "tokenizer", name="fast"),
        Case("fast-half", write(FAST, '{"half'), ("is not JSON",)),
        Case("fast-object", write(FAST, "{}"), ("tokenizer",)),
        fast("model-null", model=None),
        fast("model-unknown", model={"type": "Magic"}),
        fast("added-object", added_tokens={"a": 1}),
        fast("added-without-id", added_tokens=[{"content": "x"}]),
        fast("pre_tokenizer-list", pre_tokenizer=[1]),
        fast("normalizer-unknown", normalizer={"type": "Magic"}),
        model("vocab-list", vocab=["a", "b"]),
        model("vocab-negative", vocab={"a": -1}),
        model("vocab-huge", vocab={"a": 2**60}),
        model("merges-numbers", merges=[1, 2]),
        model("merges-unknown", merges=["qq zz"]),
        *damaged(CONFIG, "tokenizer", name="settings", without="missing"),
        settings("class-number", tokenizer_class=7),
        settings("eos-number", eos_token=5),
        settings("eos-list", eos_token=["<|im_end|>"]),
        settings("decoder-list", added_tokens_decoder=[1]),
        settings("decoder-words", added_tokens_decoder={"a": {"content": "x"}}),
        settings("decoder-numbers", added_tokens_decoder={"0": 1}),
    ),
)
