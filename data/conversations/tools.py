"""What a chat template leaves out of a conversation with tools: calls, their results, and the schemas of the tools.

A serving engine renders requests with the same template, so it leaves them out too; but an answer whose call is gone must not be
learned as an empty one, and a prompt without them asks another question.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError


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
            arguments = {**arguments, mark: mark}
        found = {**call, "function": {**call["function"], "name": marked, "arguments": arguments}}
        if (
            isinstance(own := call.get("id"), str) and name in own
        ):  # Kimi K2 writes the id, functions.add:0, for the name
            found["id"] = self.ids[own] = own.replace(name, marked)
        return found

    def message(self, message: dict[str, Any], turn: int) -> dict[str, Any]:
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [self.call(call, turn) for call in calls]}
        if message["role"] != "tool" or not message["content"].strip():
            return message
        mark = self.mark(f"turn {turn}: the tool's result", message["content"])
        found, own = {**message, "content": message["content"] + mark}, message.get("tool_call_id")
        return {**found, "tool_call_id": self.ids[own]} if isinstance(own, str) and own in self.ids else found

    def schema(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            return tool
        return {**tool, "function": {**function, "name": name + self.mark("", name)}}


def lacks_schemas(conversation: Conversation, render: Callable[..., str], template: str) -> bool:
    """Return whether a chat template leaves out the schemas of a conversation's tools.

    render: takes messages, tools and `generation_prompt`. template: names the template. Raises UserError, naming sample, turn and
    tool, where it leaves out a call or a result, or arguments of a call. Whatever comes out is found by a mark in it, since a short
    name or result stands in other texts too; where the template refuses the marks, by its own text.
    """
    if not conversation.tools and not any(m["role"] == "tool" or "tool_calls" in m for m in conversation.messages):
        return False
    marked = _Marked()
    messages = tuple(marked.message(message, turn) for turn, message in enumerate(conversation.messages, start=1))
    tools = tuple(map(marked.schema, conversation.tools or ())) or None
    try:
        text = _rendered(replace(conversation, messages=messages, tools=tools), render)
        lost = [part for mark, part in marked.parts.items() if mark not in text]
    except UserError:
        text = _rendered(conversation, render)
        lost = [part for part in marked.parts.values() if part[1] not in text and json.dumps(part[1])[1:-1] not in text]
    if turn := next((what for what, _ in lost if what), None):
        raise UserError(
            f"Sample {conversation.id}, {turn} is not in what the {template} makes of it, nor would it be in serving, where a null "
            "content reaches the template as an empty one: name a template that writes calls and results, also beside an empty "
            "content, in data.chat_template, or remove the sample."
        )
    return bool(lost)


def _rendered(conversation: Conversation, render: Callable[..., str]) -> str:
    """Return the text of a conversation, and before it that of the last prompt, where some templates put what answers lack."""
    messages, tools, texts = conversation.messages, conversation.tools, []
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if last:
        texts.append(render(messages[:last], tools, generation_prompt=True))
    return "".join([*texts, render(messages, tools, generation_prompt=last + 1 < len(messages) or not last)])


def schemas_left_out(template: str, samples: Sequence[str]) -> str:
    """Return a warning that names samples whose tools have no schema in their prompts."""
    named = ", ".join(samples[:3]) + (", ..." if len(samples) > 3 else "")
    return (
        f"the {template} leaves out the schemas in `tools` of {len(samples)} sample{'s'[: len(samples) > 1]} ({named}): they are "
        "read without, as a serving engine reads them; name a template that writes them in data.chat_template, or remove the column."
    )
