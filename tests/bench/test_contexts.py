"""The bench of contexts: chats grow to their lengths behind the same question, and an evaluation of them is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError
from scripts.bench import contexts


class Words:
    """A token a word, and one before each message."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return " ".join(f"# {one['content']}" for one in messages)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}


def conversation(name: str, *contents: str) -> Conversation:
    roles = ("user", "assistant")
    turns = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents))
    return Conversation(name, "any", turns)


def test_chats_grow_before_the_question() -> None:
    earlier = [conversation(f"e{i}", f"ask {i}", f"say {i}") for i in range(20)]
    questions = [conversation("q0", "what now"), conversation("q1", "and then")]
    found = {chat.id: chat for chat in contexts.chats(questions, earlier, [30, 12], Words())}
    assert [*found] == ["q0-0", "q0-12", "q0-30", "q1-0", "q1-12", "q1-30"]
    texts = {name: [m["content"] for m in chat.messages] for name, chat in found.items()}
    assert texts["q0-0"] == ["what now"]
    # Three tokens of the question and six of an exchange: one fits into 12, four into 30; what did not fit is left out.
    assert texts["q0-12"] == ["ask 0", "say 0", "what now"]
    assert texts["q0-30"][-3:] == texts["q0-12"]
    assert len(texts["q0-30"]) == 9
    assert {text.split()[-1] for text in texts["q1-30"][:-1]} == {"1", "5", "7", "9"}
    assert [chat.slice for chat in found.values()] == ["0", "12", "30"] * 2


def test_an_evaluation_of_all_windows_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def write(name: str, rows: list[Conversation]) -> str:
        lines = [json.dumps({"id": c.id, "slice": c.slice, "messages": c.messages}) for c in rows]
        (tmp_path / name).write_text("\n".join(lines))
        return json.dumps([str(tmp_path / name)])

    sources = write("c.jsonl", [conversation(f"c{i}", "ask", "say") for i in range(30)])
    prompts = write("p.jsonl", [conversation(f"p{i}", "what") for i in range(3)])
    asked: list[list[str]] = []
    monkeypatch.setattr(contexts, "read_tokenizer", lambda path: Words())
    monkeypatch.setattr(contexts, "run_command", lambda command, words, log: asked.append(words) or "")
    monkeypatch.setattr(contexts, "result_files", lambda recipe, decode: [])
    recipe = ["--recipe", "recipes/eagle3/tiny.yaml", "--data.sources", sources, "--evaluate.prompts", prompts]
    own = ["--head", "a=runs/a", "--head", "b=runs/b", "--lengths", "9", "20", "--folder", str(tmp_path / "out")]
    assert contexts.main([*own, "--windows", "64", "--", *recipe]) == 0
    (words,) = asked
    assert words[-3:] == ["--head", "runs/a", "--no-decode"]
    given = dict(zip(words[::2], words[1::2], strict=False))
    assert json.loads(given["--evaluate.drafts"]) == [{"tree": "chain"}, {"tree": "chain", "window": 64}]
    assert json.loads(given["--evaluate.beside"]) == {"b": "runs/b"}
    lines = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert [line["slice"] for line in lines] == ["0", "9", "20"] * 2
    assert json.loads(capsys.readouterr().out)["lengths"] == [0, 9, 20]
    monkeypatch.setattr(contexts, "run_command", lambda *given: "it broke")
    with pytest.raises(UserError, match=r"evaluate failed \(it broke\)"):
        contexts.main([*own, "--", *recipe])
