"""What a chat template leaves out of a conversation: calls, their results, the schemas of the tools, and the system prompt.

A serving engine renders requests with the same template, so it leaves them out too; but an answer whose call is gone must not be
learned as an empty one, and a prompt without them asks another question.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError

_SYSTEM, _SCHEMAS = "system prompt", "schemas in `tools`"
_MARK = "qzzq"
_OWN_TOOLS = {"tools", "functions"}
_TOLD = {"tool_calls", *_OWN_TOOLS}


@dataclass
class _Marked:
    """A conversation with a mark in everything that must come out. parts: by mark, what it stands in, and its own text."""

    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def mark(self, what: str, text: str) -> str:
        mark = f"qz{len(self.parts)}zq"
        self.parts[mark] = (what, text)
        return mark

    def call(self, call: dict[str, Any], turn: int) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        marked = name + self.mark(f"turn {turn}: the call of {name!r}", name)
        if isinstance(arguments, dict) and arguments:
            mark = self.mark(f"turn {turn}: the arguments of the call of {name!r}", next(iter(arguments)))
            arguments = {**arguments, "qz": mark}  # in the value: keys alone are no arguments
        found = {**call, "function": {**call["function"], "name": marked, "arguments": arguments}}
        if (
            isinstance(own := call.get("id"), str) and name in own
        ):  # Kimi K2 writes the id, functions.add:0, for the name
            found["id"] = self.ids[own] = own.replace(name, marked)
        return found

    def message(self, message: dict[str, Any], turn: int) -> dict[str, Any]:
        for key in _OWN_TOOLS & message.keys():  # schemas that a turn holds itself
            own = message[key]
            own = (
                [self.schema(tool) for tool in own]
                if isinstance(own, list)
                else f"{own}{self.mark(_SCHEMAS, str(own))}"
            )
            message = {**message, key: own}
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [self.call(call, turn) for call in calls]}
        if message["role"] != "tool" or not message["content"].strip():
            return message
        mark = self.mark(f"turn {turn}: the tool's result", message["content"])
        found, own = {**message, "content": message["content"] + mark}, message.get("tool_call_id")
        return {**found, "tool_call_id": self.ids[own]} if isinstance(own, str) and own in self.ids else found

    def schema(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            return tool
        return {**tool, "function": {**function, "name": name + self.mark(_SCHEMAS, name)}}


def left_out(conversation: Conversation, render: Callable[..., str], template: str) -> list[str]:
    """Return what a chat template leaves out of a conversation's prompts: the system prompt, the schemas of its tools.

    render: takes messages, tools and `generation_prompt`. template: names the template. Raises UserError, naming sample, turn and
    tool, where it leaves out a call or a result, or arguments of a call. Whatever comes out is found by a mark in it, since a short
    name or result stands in other texts too; where the template refuses the marks, by its own text.
    """
    first, lost = conversation.messages[0], list[str]()
    if first["role"] == "system" and first["content"].strip():
        asked = [{**first, "content": first["content"] + _MARK}, {"role": "user", "content": "?"}]
        if _MARK not in render(asked, conversation.tools, generation_prompt=True):
            lost.append(_SYSTEM)
    if not conversation.tools and not any(m["role"] == "tool" or _TOLD & m.keys() for m in conversation.messages):
        return lost
    marked = _Marked()
    messages = tuple(marked.message(message, turn) for turn, message in enumerate(conversation.messages, start=1))
    tools = tuple(map(marked.schema, conversation.tools or ())) or None
    try:
        text = _rendered(replace(conversation, messages=messages, tools=tools), render)
        lost += [what for mark, (what, _) in marked.parts.items() if mark not in text]
    except UserError:
        text = _rendered(conversation, render)
        lost += [what for what, own in marked.parts.values() if own not in text and json.dumps(own)[1:-1] not in text]
    if turn := next((what for what in lost if what not in (_SYSTEM, _SCHEMAS)), None):
        raise UserError(
            f"Sample {conversation.id}, {turn} is not in what the {template} makes of it, nor would it be in serving, where a null "
            "content reaches the template as an empty one: name a template that writes calls and results, also beside an empty "
            "content, in data.chat_template, or remove the sample."
        )
    return list(dict.fromkeys(lost))


def _rendered(conversation: Conversation, render: Callable[..., str]) -> str:
    """Return the texts of all prompts of a conversation, as serving renders them, and that of the whole: some templates write in one
    what they leave out of another."""
    messages, tools = conversation.messages, conversation.tools
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    texts = [render(messages[:i], tools, generation_prompt=True) for i in answers]
    return "".join([*texts, render(messages, tools, generation_prompt=len(messages) - 1 not in answers)])


def warn_left_out(warn: Callable[[str], None], template: str, samples: Mapping[str, Sequence[str]]) -> None:
    """Warn of prompts that lack a system prompt or schemas. samples: by what is left out, the names of the samples."""
    for what, names in samples.items():
        warn(
            f"the {template} leaves out the {what} of {len(names)} sample{'s'[: len(names) > 1]} ({some_of(names)}): they are read without, as "
            "a serving engine reads them; name a template that writes them in data.chat_template, or remove them."
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first three names of samples."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
