"""Bad chat templates (syntax, arithmetic, recursion, memory, time, unknown names) and bad tokenizers."""

import json
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.templates import check_template_keys, load_tokenizer, render_prompt
from draftsmith.target.folder import hash_chat_template, hash_tokenizer
from tests.bad_inputs.cases import Case, Table, copied, damaged, edit_json, write
from tests.helpers import tiny_tokenizer

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
MESSAGES = [{"role": "user", "content": "Where is the key?"}]


make = copied(lambda folder: tiny_tokenizer().save_pretrained(folder))
"""A small tokenizer with a ChatML template in a file of its own."""


def read(folder: Path) -> None:
    """Load the tokenizer and render a prompt."""
    tokenizer = load_tokenizer(str(folder))
    check_template_keys(tokenizer, {})
    render_prompt(tokenizer, MESSAGES)


def template(name: str, text: str) -> Case:
    """Return the case of another chat template."""
    return Case(name, write(FILE, text), ("template",))


_OTHERS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def _in_settings(value: object) -> Case:
    def spoil(folder: Path) -> None:
        (folder / FILE).unlink()
        edit_json(CONFIG, chat_template=value)(folder)

    return Case(f"settings-{json.dumps(value)[:30]}", spoil, ("template",))


TABLE = Table(
    "templates",
    make,
    read,
    (
        template("empty", ""),
        template("open-block", "{% for m in messages %}{{ m.content }}"),
        template("unknown-tag", "{% frobnicate %}"),
        template("unknown-filter", "{{ messages | frobnicate }}"),
        template("unknown-function", "{{ frobnicate(messages) }}"),
        template("unknown-attribute", "{{ messages[0].a.b.c }}"),
        template("refuses", "{{ raise_exception('only system messages') }}"),
        template("divides-by-zero", _OTHERS + "{{ 1 / 0 }}"),
        template("overflows", "{{ 10.0 ** 400 }}"),
        template("long-power", "{{ 9 ** (9 ** 9) }}"),
        template("recurses", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        template("imports", "{% import 'os' as os %}{{ os }}"),
        template("reaches-out", "{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}"),
        template("unknown-codec", "{{ 'a'.encode('rot-99') }}"),
        template("eats-memory", "{{ 'a' * 10 ** 11 }}"),
        template(
            "eats-memory-by-doubling",
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        ),
        template("eats-memory-by-center", "{{ 'a' | center(10 ** 11) }}"),
        template("eats-time", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        template("endless-range", "{{ range(10 ** 12) | list | length }}"),
        template("half-surrogate", "{{ '\\ud800' }}"),
        template("adds-number-to-text", "{{ messages[0].content + 1 }}"),
        template("only-spaces", "   "),
        template("nothing-of-the-messages", "{% if false %}{{ messages }}{% endif %}"),
        *damaged(FILE, "template", without="empty word list null cut deep long-integer half-surrogate"),
        *(_in_settings(value) for value in (5, {"a": 1}, [1], [{"name": "default"}], [{"name": 1, "template": 2}], "")),
    ),
)

FAST = "tokenizer.json"


def read_tokens(folder: Path) -> None:
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


TOKENIZERS = Table(
    "tokenizers",
    make,
    read_tokens,
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
