"""The formats of data sets: rows in any of three shapes become OpenAI-style messages.

Shapes: messages (`messages`: role/content, optional `tools`), ShareGPT (`conversations`: from/value),
Alpaca (`instruction`, `input`, `output`). All functions are pure and say what is wrong with a row by
ValueError; the loader adds the file and the line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.errors import UserError
from draftsmith.foreign.json import is_text, parse_json

SHAPES = (
    "messages ('messages': a list of {role, content}), "
    "ShareGPT ('conversations': a list of {from, value}) and Alpaca ('instruction', 'input', 'output')"
)

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}


def row_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row, whatever its shape; ValueError says what cannot be read."""
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            messages = [_message(turn) for turn in _turns(row[key], key)]
            system = row.get("system")
            if isinstance(system, str) and system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            return messages
    if row.get("instruction") is not None:
        return _alpaca(row)
    raise ValueError(f"the row has the keys {_quoted(row)}, which is none of the shapes accepted: {SHAPES}")


def row_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Return the `tools` column (a list, or that list as a JSON string), or None where there are none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _parse(tools, "the text of 'tools'")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("'tools' must be a list of JSON schemas (objects), or such a list as a JSON string")
    return tuple(tools)


def drop_nulls(value: Any) -> Any:
    """Remove keys whose value is None, at every depth: Arrow fills the union of all rows' keys with nulls."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    return value


def _turns(turns: Any, key: str) -> list[Mapping[str, Any]]:
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(isinstance(t, Mapping) for t in turns):
        raise ValueError(f"'{key}' must be a list of objects, one per turn")
    if not turns:
        raise ValueError(f"'{key}' is empty")
    return list(turns)


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return one turn in OpenAI keys; other keys (name, tool_call_id, reasoning_content ...) are kept for the template."""
    role_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    if role_key not in turn:
        raise ValueError(f"a turn has the keys {_quoted(turn)}; it needs 'role' and 'content', or 'from' and 'value'")
    word = turn[role_key]
    role = _ROLES.get(word.strip().lower()) if isinstance(word, str) else None
    if role is None:
        raise ValueError(f"the role {word!r} is unknown; use system, user, assistant or tool")
    message = {key: value for key, value in turn.items() if key not in (role_key, text_key)}
    message = {"role": role, "content": _text(turn.get(text_key)), **message}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ValueError("'tool_calls' must be a list of objects with 'function': {name, arguments}")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        message.pop("tool_calls", None)
        if text_key not in turn:
            raise ValueError(f"a turn of role {word!r} has neither '{text_key}' nor 'tool_calls'")
    if word in ("function_call", "tool_call"):
        return _call_from_text(message)
    return message


def _text(content: Any) -> str:
    """Return content as text; text parts are joined by newlines, as serving engines join them."""
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a turn has a content part that is not text (an image or a sound?); only text is read")
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"the content of a turn is of type {type(content).__name__}; it must be text")
    if not is_text(content):
        raise ValueError("a turn holds half a surrogate pair; repair the text")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates expect that, OpenAI files hold a JSON string."""
    if not isinstance(call, Mapping):
        raise ValueError("'tool_calls' must be a list of objects with 'function': {name, arguments}")
    function = call.get("function", call)
    function = dict(function) if isinstance(function, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no function name")
    if isinstance(function.get("arguments"), str):
        what = f"the text of the arguments of the tool call {function['name']!r}"
        function["arguments"] = _parse(function["arguments"] or "{}", what)
    outer = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {**outer, "type": "function", "function": function}


def _call_from_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a function_call turn of ShareGPT, which holds {name, arguments} (or a list of them) as text, as tool calls."""
    try:
        calls = _parse(message["content"], "the text of a function call")
    except ValueError as error:
        if "nested" in str(error):
            raise
        return message
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return message
    return {**message, "content": "", "tool_calls": [_tool_call(call) for call in calls]}


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    question = "\n\n".join(part for part in (_text(row["instruction"]), _text(row.get("input"))) if part)
    if not question:
        raise ValueError("'instruction' is empty")
    messages = [{"role": "user", "content": question}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"])})
    if row.get("output"):
        messages.append({"role": "assistant", "content": _text(row["output"])})
    return messages


def _parse(text: str, what: str) -> Any:
    """Return JSON that a row holds as text. Raises ValueError, naming it."""
    try:
        return parse_json(text, what, "mend it")
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error


def _quoted(row: Mapping[str, Any]) -> str:
    return ", ".join(f"'{key}'" for key in row) or "(none)"
