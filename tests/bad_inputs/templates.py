"""Bad chat templates: syntax, arithmetic, recursion, memory, time, and names that are unknown."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from draftsmith.data.conversations.templates import check_template_keys, load_tokenizer, render_prompt
from tests.bad_inputs.cases import Case, Table, edit_json, link, pipe, remove, replace_by_folder, write
from tests.helpers import tiny_tokenizer

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
MESSAGES = [{"role": "user", "content": "Where is the key?"}]


@functools.cache
def _saved() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="template-"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make(folder: Path) -> None:
    """Copy a small tokenizer with a ChatML template in a file of its own."""
    shutil.copytree(_saved(), folder, dirs_exist_ok=True)


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
        template("open-print", "{{ messages"),
        template("unknown-tag", "{% frobnicate %}"),
        template("unknown-filter", "{{ messages | frobnicate }}"),
        template("unknown-test", "{{ messages is frobnicate }}"),
        template("unknown-function", "{{ frobnicate(messages) }}"),
        template("unknown-attribute", "{{ messages[0].a.b.c }}"),
        template("refuses", "{{ raise_exception('only system messages') }}"),
        template("divides-by-zero", _OTHERS + "{{ 1 / 0 }}"),
        template("remainder-by-zero", "{{ 1 % 0 }}"),
        template("overflows", "{{ 10.0 ** 400 }}"),
        template("long-power", "{{ 9 ** (9 ** 9) }}"),
        template("recurses", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        template("includes", "{% include 'other.jinja' %}"),
        template("imports", "{% import 'os' as os %}{{ os }}"),
        template("extends", "{% extends 'base' %}"),
        template("reaches-out", "{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}"),
        template("unknown-codec", "{{ 'a'.encode('rot-99') }}"),
        template("eats-memory", "{{ 'a' * 10 ** 11 }}"),
        template("eats-memory-by-list", "{{ ([0] * 10 ** 11) | length }}"),
        template(
            "eats-memory-by-doubling",
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        ),
        template("eats-memory-by-format", "{{ '%099999999999d' % 1 }}"),
        template("eats-memory-by-center", "{{ 'a' | center(10 ** 11) }}"),
        template("eats-time", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        template("endless-range", "{{ range(10 ** 12) | list | length }}"),
        template("half-surrogate", "{{ '\\ud800' }}"),
        template("index-beyond", "{{ messages[7].content }}"),
        template("adds-number-to-text", "{{ messages[0].content + 1 }}"),
        template("sorts-mixed", "{{ [1, 'a'] | sort }}"),
        template("only-spaces", "   "),
        template("nothing-of-the-messages", "{% if false %}{{ messages }}{% endif %}"),
        Case("file-binary", write(FILE, b"\xff\xfe\x80" * 9), ("template",)),
        Case("file-folder", replace_by_folder(FILE), ("template",)),
        Case("file-dangling", link(FILE, "nowhere"), ("template",)),
        Case("file-pipe", pipe(FILE), ("template",)),
        Case("file-missing", remove(FILE), ("template",)),
        _in_settings(5),
        _in_settings({"a": 1}),
        _in_settings([1]),
        _in_settings([{"name": "default"}]),
        _in_settings([{"name": 1, "template": 2}]),
        _in_settings(""),
    ),
)
