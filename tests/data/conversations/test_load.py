import json
from pathlib import Path

import pytest

from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.errors import UserError

SHARED = Path(__file__).resolve().parents[3].parent / "shared"
Q, A = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "One."}


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def test_messages_with_id_and_slice(tmp_path):
    path = write(tmp_path / "talk.jsonl", {"id": 7, "slice": "math", "messages": [Q, A]}, {"messages": [Q]})
    assert load_conversations([path]) == [
        Conversation("7", "math", (Q, A)),
        Conversation("talk-2", "talk", (Q,)),
    ]
    assert [c.slice for c in load_conversations([path], slice="own")] == ["math", "own"]


def test_references_of_any_kind_come_along(tmp_path):
    references = [6, "six", {"sum": 6}, None]
    rows = [{"messages": [Q], "reference": reference} for reference in references]
    assert [c.reference for c in load_conversations([write(tmp_path / "talk.jsonl", *rows)])] == references


def test_prompt_is_what_the_target_answers():
    assert Conversation("x", "s", (Q, A, Q, A)).prompt() == (Q, A, Q)
    assert Conversation("x", "s", (Q, A, Q)).prompt() == (Q, A, Q)
    with pytest.raises(UserError, match="x has only assistant turns"):
        Conversation("x", "s", (A,)).prompt()


def test_not_utf8(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"messages": [{"role": "user", "content": "é"}]}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="line 1 is not UTF-8"):
        load_conversations([str(path)])
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": [Q]}).encode())
    assert load_conversations([str(path)])[0].messages == (Q,)


def test_duplicate_ids_name_both_lines(tmp_path):
    first = write(tmp_path / "a.jsonl", {"messages": [Q, A]}, {"id": "x", "messages": [Q, A]})
    second = write(tmp_path / "b.jsonl", {"id": "x", "messages": [Q]})
    with pytest.raises(UserError, match=r"'x' is used twice, at .*a\.jsonl, line 2 and at .*b\.jsonl, line 1"):
        load_conversations([first, second])


def test_made_ids_are_unique(tmp_path):
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "talk.jsonl", {"messages": [Q, A]})
    assert sorted(c.id for c in load_conversations([str(tmp_path)])) == ["talk-1", "talk-1-2", "talk-1-3"]


def test_folder_glob_json_and_limit(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", *({"messages": [Q, A]} for _ in range(3)))
    (tmp_path / "c.json").write_text(json.dumps([{"messages": [Q]}, {"messages": [Q, A]}], indent=1))
    write(tmp_path / "d.json", {"messages": [Q]})
    (tmp_path / "notes.txt").write_text("not data")
    everything = [c.id for c in load_conversations([str(tmp_path)])]
    assert everything == ["a-1", "a-2", "a-3", "b-1", "b-2", "b-3", "c-1", "c-2", "d-1"]
    assert [c.id for c in load_conversations([str(tmp_path / "*.jsonl")])] == everything[:6]
    limited = [c.id for c in load_conversations([str(tmp_path)], limit=6)]
    assert limited == ["a-1", "b-1", "c-1", "d-1", "a-2", "b-2"]
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
    assert asked == [("org/some-talk", "small", "test", False), ("org/talk", None, "train", True)]
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
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match=r"No conversation in .*empty\.jsonl"):
        load_conversations([empty])
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"rows\.csv is of no known kind"):
        load_conversations([str(tmp_path / "rows.csv")])


@pytest.mark.skipif(not (SHARED / "prompts").is_dir(), reason="the shared material is not beside the repository")
def test_shared_prompts():
    prompts = load_conversations([str(SHARED / "prompts" / "in_domain.jsonl")])
    assert len(prompts) == 140
    assert {p.slice for p in prompts} == {"chat", "code", "math", "rag", "json"}
    assert all(p.prompt() == p.messages for p in prompts)
