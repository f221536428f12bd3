"""What a chat template leaves out of a conversation, and conversations that it refuses.

A serving engine renders requests with the same template, so it leaves the same out; but an answer whose call is gone must not be
learned as an empty one, and a prompt without tools or system prompt asks another question.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError

OnRefused = Literal["error", "drop"]

_SYSTEM, _SCHEMAS = "system prompt", "schemas in `tools`"
_MARK = "qzzq"
_SCHEMA_KEYS = {"tools", "functions"}
"""Where a message holds schemas itself."""


@dataclass
class _Marker:
    """Puts a mark into each part of a conversation that must come out. parts: by mark, what it stands in, and that part's own text.
    ids: of calls, which some templates write for their names, with their marks."""

    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def mark(self, what: str, text: str) -> str:
        mark = f"qz{len(self.parts)}zq"
        self.parts[mark] = (what, text)
        return mark

    def call(self, call: dict[str, Any], turn: int) -> dict[str, Any]:
        name, arguments, call_id = call["function"]["name"], call["function"]["arguments"], call.get("id")
        marked = name + self.mark(f"turn {turn}: the call of {name!r}", name)
        if isinstance(arguments, dict) and arguments:
            mark = self.mark(f"turn {turn}: the arguments of the call of {name!r}", next(iter(arguments)))
            arguments = {**arguments, "qz": mark}  # in the value: keys alone are no arguments
        call = {**call, "function": {**call["function"], "name": marked, "arguments": arguments}}
        if isinstance(call_id, str) and name in call_id:  # Kimi K2 writes the id, functions.add:0, for the name
            call["id"] = self.ids[call_id] = call_id.replace(name, marked)
        return call

    def message(self, message: dict[str, Any], turn: int) -> dict[str, Any]:
        message = dict(message)
        for key in _SCHEMA_KEYS & message.keys():
            held = message[key]
            is_list = isinstance(held, list)
            message[key] = [*map(self.schema, held)] if is_list else f"{held}{self.mark(_SCHEMAS, str(held))}"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self.call(call, turn) for call in calls]
        elif message["role"] == "tool" and message["content"].strip():
            message["content"] += self.mark(f"turn {turn}: the tool's result", message["content"])
            if isinstance(call_id := message.get("tool_call_id"), str):
                message["tool_call_id"] = self.ids.get(call_id, call_id)
        return message

    def schema(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            return tool
        return {**tool, "function": {**function, "name": name + self.mark(_SCHEMAS, name)}}


def left_out(conversation: Conversation, render: Callable[..., str], template: str) -> list[str]:
    """Return what a chat template leaves out of a conversation's prompts: the system prompt, the schemas of its tools.

    render: takes messages, tools and `generation_prompt`. template: names the template. Raises UserError, naming sample, turn and
    tool, where it leaves out a call or a result, or arguments of a call. A part that comes out is found by a mark in it, since a
    short name or result stands in other texts too; where the template refuses the marks, by its own text.
    """
    first, missing = conversation.messages[0], list[str]()
    if first["role"] == "system" and first["content"].strip():
        asked = [{**first, "content": first["content"] + _MARK}, {"role": "user", "content": "?"}]
        if _MARK not in render(asked, conversation.tools, generation_prompt=True):
            missing.append(_SYSTEM)
    of_tools = {"tool_calls", *_SCHEMA_KEYS}
    if not conversation.tools and not any(m["role"] == "tool" or of_tools & m.keys() for m in conversation.messages):
        return missing
    marker = _Marker()
    messages = tuple(marker.message(message, turn) for turn, message in enumerate(conversation.messages, start=1))
    tools = tuple(map(marker.schema, conversation.tools or ())) or None
    try:
        text = _rendered(replace(conversation, messages=messages, tools=tools), render)
        missing += [what for mark, (what, _) in marker.parts.items() if mark not in text]
    except UserError:
        text = _rendered(conversation, render)
        missing += [w for w, own in marker.parts.values() if own not in text and json.dumps(own)[1:-1] not in text]
    if turn := next((what for what in missing if what not in (_SYSTEM, _SCHEMAS)), None):
        raise UserError(
            f"Sample {conversation.id}, {turn} is not in what the {template} makes of it, nor would it be in serving, where a null "
            "content reaches the template as an empty one: name a template that writes calls and results, also beside an empty "
            "content, in data.chat_template, or remove the sample."
        )
    return list(dict.fromkeys(missing))


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


@dataclass
class Refusals:
    """Conversations that cannot be rendered: an error each, or left out and counted. on_refused: which of the two; None where nobody can
    choose. names: of those left out. first: why the first one was."""

    on_refused: OnRefused | None = None
    names: list[str] = field(default_factory=list)
    first: str = ""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Leave the block at the first UserError, which is about the conversation `name`; raise it where that is an error."""
        try:
            yield
        except UserError as error:
            why = str(error).rstrip(".")
            if self.on_refused is None:
                raise
            if self.on_refused == "error":
                raise UserError(f"{why}; with data.on_refused: drop such conversations are left out.") from error
            self.names.append(name)
            self.first = self.first or why

    def warn(self, warn: Callable[[str], None], count: int) -> None:
        """Warn of those that were left out of `count`. Raises UserError where these are all."""
        if not self.names:
            return
        if len(self.names) == count:
            raise UserError(
                f"No conversation is left, as data.on_refused drops all {count}; of the first: {self.first}."
            )
        warn(
            f"data.on_refused: {len(self.names)} of {count} conversations ({some_of(self.names)}) are left out, as they cannot be rendered; of the "
            f"first: {self.first}."
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first three names of samples."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
