"""The formats of data sets: rows in any of four shapes become OpenAI-style messages.

Shapes: messages (`messages`: role/content, optional `tools`), ShareGPT (`conversations`: from/value), Alpaca (`instruction`,
`input`, `output`, `history`), TRL (`prompt`, `completion`). Keys and roles count in any spelling: `toolCalls`, `Function-Call`.
All functions are pure and say what is wrong with a row by ValueError; the loader adds the file and the line.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftsmith.errors import UserError
from draftsmith.foreign.text import is_text, parse_json

SHAPES = (
    "messages ('messages': a list of {role, content}), "
    "ShareGPT ('conversations': a list of {from, value}), Alpaca ('instruction', 'input', 'output') "
    "and prompts ('prompt', 'completion': texts or lists of {role, content})"
)
_ROW_KEYS = (
    *("messages", "conversations", "instruction", "input", "output", "history"),
    *("prompt", "completion", "system", "tools", "functions"),
)
_TURN_KEYS = ("role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "reasoning_content")

_SPELLINGS = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt chatgpt bot model functioncall toolcall",
    "tool": "tool function functionresponse toolresponse observation ipython",
}
_ROLES = {word: role for role, words in _SPELLINGS.items() for word in words.split()}


def row_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row, whatever its shape; ValueError says what cannot be read."""
    row = _respell(row, _ROW_KEYS)
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            messages = [_message(turn) for turn in _turns(row[key], key)]
            break
    else:
        asked: Any
        said: Any
        if row.get("instruction") is not None:
            key, answer, said = "instruction", "output", _text(row.get("output"))
            asked = "\n\n".join(part for part in (_text(row[key]), _text(row.get("input"))) if part)
        elif row.get("prompt") is not None:
            key, answer, said, asked = "prompt", "completion", row.get("completion"), row["prompt"]
        else:
            raise ValueError(f"the row has the keys {_quoted(row)}, which is none of the shapes accepted: {SHAPES}")
        messages = [*_history(row.get("history")), *_said(asked, key, "user"), *_said(said, answer, "assistant")]
        if not messages or (key == "instruction" and not asked):
            raise ValueError(f"'{key}' is empty")
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def row_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Return the `tools` column (a list, or that list as a JSON string), or the older `functions`; None where there are none.

    A function's schema that stands alone is wrapped as engines ask for it: {"type": "function", "function": schema}.
    """
    row = _respell(row, _ROW_KEYS)
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _parse(tools, "the text of 'tools'")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("'tools' must be a list of JSON schemas (objects), or such a list as a JSON string")
    return tuple(map(_schema, tools))


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def drop_nulls(value: Any) -> Any:
    """Remove keys whose value is None, at every depth: Arrow fills the union of all rows' keys with nulls."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    return value


def _fold(word: str) -> str:
    """Return a role or key without case, spaces, underscores and hyphens."""
    return re.sub(r"[\W_]", "", word.lower())


def _respell(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a row or a turn with its known keys spelt as in `names`."""
    spelt = {_fold(name): name for name in names if name not in row}
    return {spelt.get(_fold(key), key): value for key, value in row.items()}


def _turns(turns: Any, key: str) -> list[Mapping[str, Any]]:
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(isinstance(t, Mapping) for t in turns):
        raise ValueError(f"'{key}' must be a list of objects, one per turn")
    if not turns:
        raise ValueError(f"'{key}' is empty")
    return list(turns)


def _said(value: Any, key: str, role: str) -> list[dict[str, Any]]:
    """Return the messages of a column that holds a text of `role`, or a list of turns."""
    if not value:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": _text(value)}]
    return [_message(turn) for turn in _turns(value, key)]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return one turn in OpenAI keys; other keys (name, tool_call_id ...) are kept for the template.

    A thought is `reasoning_content`, wherever it stood; `weight` 0 is kept for answers that are not to be learned.
    """
    turn = _respell(turn, _TURN_KEYS)
    role_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    if role_key not in turn:
        raise ValueError(f"a turn has the keys {_quoted(turn)}; it needs 'role' and 'content', or 'from' and 'value'")
    word = turn.pop(role_key)
    role = _ROLES.get(_fold(word)) if isinstance(word, str) else None
    if role is None:
        raise ValueError(f"the role {word!r} is unknown; use system, user, assistant or tool")
    content = turn.pop(text_key, None)
    keys = ("reasoning_content", "reasoning", "thinking") if role == "assistant" else ()
    thoughts = [turn.pop(key, None) for key in keys]
    thought = next((value for value in thoughts if value), _thought(content, role))
    message = {"role": role, "content": ""} | _weight(turn, role) | {"role": role, "content": _text(content)}
    if thought:
        message["reasoning_content"] = _text(thought)
    if calls := _calls(message):
        message["tool_calls"] = calls
    elif content is None and not thought and role != "tool":
        raise ValueError(f"a turn of role {word!r} has neither '{text_key}' nor 'tool_calls'")
    return _call_from_text(message) if _fold(word) in ("functioncall", "toolcall") else message


def _weight(turn: dict[str, Any], role: str) -> dict[str, Any]:
    """Return a turn without the keys that say whether it is learned (OpenAI's `weight`, Axolotl's `train`, ms-swift's `loss`), but
    weight 0."""
    weight = turn.pop("weight", None)
    weight = 1 if weight is None else weight
    for key in ("train", "loss"):
        if isinstance(turn.get(key), bool):
            weight = turn.pop(key) and weight
    if weight not in (0, 1):
        raise ValueError(f"the weight of a turn is {weight!r}; write 1, or 0 for a turn that is not to be learned")
    return turn | ({"weight": 0} if not weight and role == "assistant" else {})


def _text(content: Any) -> str:
    """Return content as text without its thoughts; text parts are joined by newlines, as serving engines join them."""
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        shown = [part for part in content if not _is_thought(part)]
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in shown]
        kinds = [str(part.get("type", "text")) for part in shown if isinstance(part, Mapping)]
        if not all(isinstance(part, str) for part in parts) or not all("text" in kind for kind in kinds):
            raise ValueError("a turn has a content part that is not text (an image or a sound?); only text is read")
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ValueError(f"the content of a turn is of type {type(content).__name__}; it must be text")
    if not is_text(content):
        raise ValueError("a turn holds half a surrogate pair; repair the text")
    return content


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning")


def _thought(content: Any, role: str) -> str:
    """Return the thoughts among the parts of an assistant's content."""
    parts = [part for part in content if _is_thought(part)] if isinstance(content, list | tuple) else []
    if parts and role != "assistant":
        raise ValueError(f"a turn of role {role!r} holds a thought; only the assistant's turns may")
    return "\n".join(_text(part.get("thinking") or part.get("reasoning") or part.get("text")) for part in parts)


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the calls out of a message: `tool_calls`, a list or that list as a JSON string, and the older `function_call`."""
    calls, old = message.pop("tool_calls", None) or [], message.pop("function_call", None)
    if isinstance(calls, str):
        calls = _parse(calls, "the text of 'tool_calls'")
    if not isinstance(calls, list | tuple):
        raise ValueError("'tool_calls' must be a list of objects with 'function': {name, arguments}")
    return [_tool_call(call) for call in (*calls, *([old] if old else []))]


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates expect that, OpenAI files hold a JSON string."""
    if not isinstance(call, Mapping):
        raise ValueError("'tool_calls' must be a list of objects with 'function': {name, arguments}")
    flat = ("name", "arguments", "parameters")
    function = call.get("function", {key: call[key] for key in flat if key in call})
    function = dict(function) if isinstance(function, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no function name")
    arguments = function.get("arguments", function.pop("parameters", None))
    if isinstance(arguments, str):
        arguments = _parse(arguments or "{}", f"the text of the arguments of the tool call {function['name']!r}")
    function["arguments"] = {} if arguments is None else arguments
    outer = {key: value for key, value in call.items() if key not in ("function", *flat)}
    return {**outer, "type": "function", "function": function}


def _call_from_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a function_call turn of ShareGPT, which holds {name, arguments} (or a list of them) as text, as tool calls."""
    try:
        calls = _parse(message["content"], "the text of a function call")
    except ValueError as error:
        if "nested" in str(error):
            raise
        return message  # in the target's own words
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and ("name" in call or "function" in call) for call in calls):
        raise ValueError('the text of a function call is JSON, but no call: write {"name": ..., "arguments": {...}}')
    return {**message, "content": "", "tool_calls": [_tool_call(call) for call in calls]}


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Return the earlier turns of a row, which are pairs of a question and its answer."""
    pairs = pairs or []
    listed = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) for pair in pairs)
    if not listed or any(len(pair) != 2 for pair in pairs):
        raise ValueError("'history' must be a list of [question, answer] pairs")
    turns = (turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True))
    return [{"role": role, "content": _text(text)} for role, text in turns]


def _parse(text: str, what: str) -> Any:
    """Return JSON that a row holds as text. Raises ValueError, naming it."""
    try:
        return parse_json(text, what, "mend it")
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error


def _quoted(row: Mapping[str, Any]) -> str:
    return ", ".join(f"'{key}'" for key in row) or "(none)"
