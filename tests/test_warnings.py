"""Every warning names the key, option or command that would mend it."""

import ast
import re

from tests.test_floors import parse, sources

REMEDY = re.compile(
    r"\b(answers|data|evaluate|export|features|head|target|tracking|train)\.[a-z_]+|--[a-z]|draftsmith [a-z]"
)
ELSEWHERE = re.compile(r"(warning: )?\{[^{}]*\}\.?")
"""A warning whose words are made where a test of their own holds them."""
OTHERS = {
    "is measured again, as it cannot be read": "mended already",
    "gets no more figures": "nothing of the training is lost",
    "the next export or evaluation tries again": "mended later, and the error of the dashboard says the rest",
    "are not the target's own": "what is served is to be changed, not the recipe",
    "emulates bf16": "the keys are filled in",
    "do not quote": "the option is filled in",
    "was made for": "the remedy is filled in",
    "is not compared with the original": "the key is filled in",
    "but not exported": "the error that is filled in says what to change",
    "costs contradict each other": "another program is to be stopped, and the file removed that is filled in",
    "the target is slower than alone": "the head is to be trained for longer",
}
"""Words of the warnings that name none, and why."""


def test_warnings_say_what_would_mend_them() -> None:
    lacking, used = [], set()
    for path in sources():
        for node in ast.walk(parse(path)):
            name = node.func if isinstance(node, ast.Call) and node.args else None
            called = getattr(name, "attr", getattr(name, "id", None))
            if not isinstance(node, ast.Call) or called not in ("say", "warn"):
                continue
            said = node.args[0]
            text = "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
                for part in (said.values if isinstance(said, ast.JoinedStr) else [said])
            )
            if (
                (called == "say" and not text.startswith("warning: "))
                or REMEDY.search(text)
                or ELSEWHERE.fullmatch(text)
            ):
                continue
            used |= (known := {words for words in OTHERS if words in text})
            lacking += [] if known else [f"{path}:{node.lineno} {text}"]
    assert not lacking
    assert used == set(OTHERS), "an exception that is none any more goes"
