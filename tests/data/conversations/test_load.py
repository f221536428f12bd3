"""Rows of data sets of any shape, loaded from files and from the Hub."""

import json

import pytest

from draftsmith.data.conversations import load
from draftsmith.data.conversations.load import Conversation, find_chats, load_conversations
from draftsmith.data.conversations.shapes import drop_nulls
from draftsmith.errors import UserError
from draftsmith.progress import warn_anew
from draftsmith.recipe.evaluate import EvaluateSpec
from draftsmith.stages.prompts import read_conversations
from tests.helpers import write_rows

Q, A = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "One."}


def test_messages_with_id_and_slice(tmp_path):
    path = write_rows(tmp_path / "talk.jsonl", {"id": 7, "slice": "math", "messages": [Q, A]}, {"messages": [Q]})
    assert load_conversations([path]) == [
        Conversation("7", "math", (Q, A)),
        Conversation("talk-2", "talk", (Q,)),
    ]
    assert [c.slice for c in load_conversations([path], slice="own")] == ["math", "own"]


def test_references_of_any_kind_come_along(tmp_path):
    references = [6, "six", {"sum": 6}, None]
    rows = [{"messages": [Q], "reference": reference} for reference in references]
    assert [c.reference for c in load_conversations([write_rows(tmp_path / "talk.jsonl", *rows)])] == references


def test_prompt_is_what_the_target_answers():
    assert Conversation("x", "s", (Q, A, Q, A)).prompt() == (Q, A, Q)
    assert Conversation("x", "s", (Q, A, Q)).prompt() == (Q, A, Q)
    with pytest.raises(UserError, match="x has only assistant turns"):
        Conversation("x", "s", (A,)).prompt()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": [Q]}).encode())
    assert load_conversations([str(path)])[0].messages == (Q,)


def test_duplicate_ids_name_both_lines(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", {"messages": [Q, A]}, {"id": "x", "messages": [Q, A]})
    second = write_rows(tmp_path / "b.jsonl", {"id": "x", "messages": [Q]})
    with pytest.raises(UserError, match=r"'x' is used twice, at .*a\.jsonl, line 2 and at .*b\.jsonl, line 1"):
        load_conversations([first, second])


def test_made_ids_are_unique(tmp_path):
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "talk.jsonl", {"messages": [Q, A]})
    assert sorted(c.id for c in load_conversations([str(tmp_path)])) == ["talk-1", "talk-1-2", "talk-1-3"]


def test_folder_glob_json_and_limit(tmp_path, monkeypatch):
    for name in ("b", "a"):
        write_rows(tmp_path / f"{name}.jsonl", *({"messages": [Q, A]} for _ in range(3)))
    (tmp_path / "c.json").write_text(json.dumps([{"messages": [Q]}, {"messages": [Q, A]}], indent=1))
    write_rows(tmp_path / "d.json", {"messages": [Q]})
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write_rows(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", {"messages": [Q, A]})
    everything = [c.id for c in load_conversations([str(tmp_path)])]
    assert everything == ["a-1", "a-2", "a-3", "b-1", "b-2", "b-3", "c-1", "c-2", "d-1"]
    assert [c.id for c in load_conversations([str(tmp_path / "*.jsonl")])] == everything[:6]
    limited = [c.id for c in load_conversations([str(tmp_path)], limit=6)]
    assert limited == ["a-1", "b-1", "c-1", "d-1", "a-2", "b-2"]
    monkeypatch.setattr(load, "_MOST_OPEN", 3)
    assert [c.id for c in load_conversations([str(tmp_path)], limit=6)] == limited, (
        "also where files are read one after the other"
    )
    (tmp_path / "c.json").write_text('[{"messages": []},\n nonsense]')
    with pytest.raises(UserError, match=r"c\.json is not JSON .* at line 2"):
        load_conversations([str(tmp_path)])


def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"id": "p", "messages": [Q, {"role": "assistant", "content": "One.", "name": "bot"}]},
        {"id": None, "messages": [Q]},
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    with_name, without = load_conversations([str(path)])
    assert with_name.messages == (Q, {**A, "name": "bot"})
    assert (without.id, without.messages) == ("rows-2", (Q,))
    assert load_conversations([str(path)], limit=1) == [with_name]
    bracketed = tmp_path / "row[s].parquet"  # which as a pattern would be the first file
    datasets.Dataset.from_list([{"messages": [Q, A, Q]}]).to_parquet(str(bracketed))
    assert [len(c.messages) for c in load_conversations([str(bracketed)])] == [3]
    path.write_text("not parquet")
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read as Parquet \("):
        load_conversations([str(path)])


def test_hub_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "org/missing":
            raise ConnectionError("Couldn't reach 'org/missing' on the Hub (OfflineModeIsEnabled)\nmore")
        return iter([{"messages": [Q, {**A, "name": None}]}, {"messages": [Q]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_conversations(["org/some-talk:small"], split="test", slice="chat")
    assert found[0] == Conversation("some-talk-1", "chat", (Q, A))
    load_conversations(["org/talk"], limit=1)
    load_conversations(["org/talk"], limit=1, split="train[:95%]")  # a part of a split cannot be streamed
    assert asked == [
        ("org/some-talk", "small", "test", False),
        ("org/talk", None, "train", True),
        ("org/talk", None, "train[:95%]", False),
    ]
    with pytest.raises(
        UserError, match=r"no file or folder org/missing, and the Hub data set .*Couldn't reach"
    ) as error:
        load_conversations(["org/missing"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/rows.jsonl", "There is no file or folder nowhere/rows.jsonl, and it is not the name of a Hub"),
        ("/nowhere/at/all", "There is no file or folder /nowhere/at/all"),
        ("nowhere/*.jsonl", "No file matches"),
    ],
)
def test_missing_source(source, message):
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        load_conversations([source])


def test_empty_sources(tmp_path):
    with pytest.raises(UserError, match=r"holds no \.jsonl"):
        load_conversations([str(tmp_path)])
    empty = write_rows(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=r"No conversation in .*empty\.jsonl"):
        load_conversations([empty])
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"rows\.csv is of no known kind"):
        load_conversations([str(tmp_path / "rows.csv")])


def load_one(tmp_path, row):
    (conversation,) = load_conversations([write_rows(tmp_path / "rows.jsonl", row)])
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


def test_rows_that_were_rendered_otherwise_are_warned_of(tmp_path, capsys):
    rows = ({"messages": [Q, A], "chat_template_kwargs": kwargs} for kwargs in ({"a": 1}, {"a": 2}, {}, None))
    write_rows(tmp_path / "log.jsonl", *rows)
    for template, said in (({}, 2), ({"a": 1}, 1), ({"a": 2, "b": 3}, 1), (None, 0)):
        warn_anew()
        assert len(load_conversations([str(tmp_path / "log.jsonl")], template=template)) == 4
        told = capsys.readouterr().err
        assert (
            f"{said} rows ({tmp_path / 'log.jsonl'}, line {1 if template != {'a': 1} else 2} for one) have" in told
            or not said
        )
        assert bool(told) == bool(said)
    warn_anew()
    assert len(read_conversations(EvaluateSpec(), [str(tmp_path / "log.jsonl")], {"a": 1})) == 4
    assert "1 rows" in capsys.readouterr().err, "of prompts to measure on, too"


@pytest.mark.parametrize("answered", [False, True])
def test_rows_of_the_same_first_question_are_one_chat(answered: bool) -> None:
    """Which the target answers alike, whatever stands there for an answer; where that is learned, it counts too."""

    def row(name: str, *turns: tuple[str, str]) -> Conversation:
        return Conversation(name, "s", tuple({"role": role, "content": content} for role, content in turns))

    ask, other, hello = ("user", "why?"), ("user", "how?"), ("assistant", "Hello!")
    rows = [
        row("prompt", ask),
        row("same prompt", ask),
        row("one answer", ask, ("assistant", "so")),
        row("another", ask, ("assistant", "no")),
        row("longer", ask, ("assistant", "so"), other, ("assistant", "thus")),
        row("greeted", hello, ask, ("assistant", "so")),
        row("greeted, asks otherwise", hello, other, ("assistant", "so")),
        row("greeted alone", hello),
        row("example, asks one", other, hello, ("user", "1?")),
        row("example, asks two", other, hello, ("user", "2?")),
        row("asks two, then three", other, hello, ("user", "2?"), ("assistant", "2"), ("user", "3?")),
    ]
    alone = {row.id: row.id for row in rows}
    chats = find_chats(rows, answered=answered)
    if answered:
        examples = dict.fromkeys(("example, asks two", "asks two, then three"), "example, asks one")
        assert chats == alone | {"same prompt": "prompt", "longer": "one answer"} | examples
    else:
        begun = dict.fromkeys(("same prompt", "one answer", "another", "longer"), "prompt")
        assert chats == alone | begun | {"asks two, then three": "example, asks two"}
