import json

import pytest

from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.shapes import drop_nulls

Q, A = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "One."}


def load_one(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (conversation,) = load_conversations([str(tmp_path / "rows.jsonl")])
    return conversation


def test_sharegpt_function_call_and_system_column(tmp_path):
    row = {
        "system": "Help.",
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
        ],
    }
    conversation = load_one(tmp_path, row)
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool"]
    assert conversation.messages[2]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert conversation.tools == ({"type": "function", "function": {"name": "add"}},)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, [("user", "Add.\n\n2, 2"), ("assistant", "4")]),
        ({"instruction": "Hi.", "input": "", "output": "Ho."}, [("user", "Hi."), ("assistant", "Ho.")]),
        ({"instruction": "Hi.", "output": ""}, [("user", "Hi.")]),
        (
            {"system": "Help.", "instruction": "Hi.", "output": "Ho."},
            [("system", "Help."), ("user", "Hi."), ("assistant", "Ho.")],
        ),
        (
            {"instruction": "b?", "history": [["a?", "One."]], "output": "Two."},
            [("user", "a?"), ("assistant", "One."), ("user", "b?"), ("assistant", "Two.")],
        ),
        ({"prompt": "a?"}, [("user", "a?")]),
        ({"prompt": "a?", "completion": "One."}, [("user", "a?"), ("assistant", "One.")]),
        (
            {"prompt": "b?", "history": [["a?", "One."]], "completion": "Two."},
            [("user", "a?"), ("assistant", "One."), ("user", "b?"), ("assistant", "Two.")],
        ),
        (
            {"prompt": [Q], "completion": [A], "system": "Help."},
            [("system", "Help."), ("user", "a?"), ("assistant", "One.")],
        ),
        ({"Prompt": [Q], "completion": None}, [("user", "a?")]),
        ({"prompt": "ignored", "messages": [Q]}, [("user", "a?")]),
    ],
)
def test_rows_without_a_list_of_turns(tmp_path, row, expected):
    assert [(m["role"], m["content"]) for m in load_one(tmp_path, row).messages] == expected


def test_tool_calls_as_openai_writes_them(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    answer = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}],
    }
    row = {"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [call]}, answer], "tools": []}
    conversation = load_one(tmp_path, row)
    called, result = conversation.messages[1:]
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert called["tool_calls"][0]["id"] == "c1"
    assert called["content"] == ""
    assert (result["content"], result["tool_call_id"]) == ("4\n!", "c1")
    assert conversation.tools is None


@pytest.mark.parametrize(
    "word", ["function_call", "Function_Call", "function-call", "FunctionCall", "tool_call", "TOOL CALL"]
)
def test_roles_count_in_any_spelling(tmp_path, word):
    text = json.dumps({"name": "add", "parameters": {"a": 2}})
    called = load_one(tmp_path, {"conversations": [{"from": "Human", "value": "a?"}, {"from": word, "value": text}]})
    assert called.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert called.messages[1]["content"] == ""


@pytest.mark.parametrize(
    "turn",
    [
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "One."}]},
        {"content": [{"type": "reasoning", "text": "hm"}, "One."]},
        {"content": "One.", "reasoning": "hm"},
        {"content": "One.", "thinking": "hm", "reasoning_content": ""},
        {"content": "One.", "reasoningContent": "hm"},
    ],
)
def test_thoughts_are_reasoning_content(tmp_path, turn):
    conversation = load_one(tmp_path, {"messages": [Q, {"role": "assistant", **turn}]})
    assert conversation.messages[1] == {**A, "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"weight": 0}, {"weight": 0}),
        ({"weight": 1}, {}),
        ({"train": False}, {"weight": 0}),
        ({"train": True}, {}),
        ({"loss": False}, {"weight": 0}),
    ],
)
def test_weights_of_turns(tmp_path, keys, kept):
    conversation = load_one(tmp_path, {"messages": [{**Q, "weight": 0}, {**A, **keys}]})
    assert conversation.messages == (Q, {**A, **kept})


@pytest.mark.parametrize(
    "row",
    [
        {"functions": [{"name": "add", "parameters": {}}]},
        {"tools": [{"type": "function", "name": "add", "parameters": {}}]},
        {"Tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])},
    ],
)
def test_schemas_are_as_engines_ask_for_them(tmp_path, row):
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert load_one(tmp_path, {"messages": [Q], **row}).tools == (schema,)


def test_nulls_that_arrow_fills_in_are_dropped_at_every_depth():
    row = {
        "id": None,
        "messages": [{"content": "x", "tool_calls": [{"arguments": {"a": 1, "b": None}}]}, {"name": None}],
    }
    assert drop_nulls(row) == {"messages": [{"content": "x", "tool_calls": [{"arguments": {"a": 1}}]}, {}]}
