"""Templates that print today's date: the same day for all texts of a run, however long that takes, so that prompts stay the same.

Serving engines give templates `strftime_now`, as transformers does, which lets no other clock in: a macro stands in its place.
"""

import json
import re
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_CLOCK = "strftime_now"
_DIRECTIVES = [f"%{mark}{letter}" for mark in ("", "-") for letter in "aAbBcdDeFhHIjmMpSTuUVwWxXyYZ"]


def set_day(tokenizer: PreTrainedTokenizerBase, day: date) -> None:
    """Have a template that prints today's date print this day's."""
    tokenizer.__dict__["draftsmith_day"] = day


def prints_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a template prints today's date."""
    template = tokenizer.chat_template
    return any(_CLOCK in text for text in (template.values() if isinstance(template, dict) else [template]))


def dated(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> dict[str, str]:
    """Return the argument with which `apply_chat_template` prints the day that was set; none where the template tells none."""
    day = tokenizer.__dict__.get("draftsmith_day")
    if day is None or _CLOCK not in (template := tokenizer.get_chat_template(None, tools)):
        return {}
    return {"chat_template": _of_day(template, day)}


@lru_cache(maxsize=8)
def _of_day(template: str, day: date) -> str:
    said = {one: datetime.combine(day, time()).strftime(one) for one in _DIRECTIVES}
    parts = "".join(f" | replace({json.dumps(one)}, {json.dumps(text)})" for one, text in said.items())
    # Behind a value no newline is taken away, and what stood before a block at the beginning goes, as it did.
    rest = re.sub(r"\A[ \t]+(?=\{[%#](?!\+))", "", template)
    return f'{{% macro {_CLOCK}(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}{{{{ "" }}}}{rest}'
