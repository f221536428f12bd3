"""Bad chat templates: syntax, arithmetic, recursion, memory, time, and names that are unknown."""

import json
from pathlib import Path

from draftsmith.data.conversations.templates import check_template_keys, load_tokenizer, render_prompt
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
