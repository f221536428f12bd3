"""What is learned of rows as users bring them, by families of chat templates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.conversations.templates import prepare_prompts, render_prompt
from draftsmith.errors import UserError
from tests.data.conversations import families
from tests.data.conversations.families import Family
from tests.helpers import learnt, runs

Row = dict[str, Any]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "two plus two?"}
PLAIN: Row = {
    "messages": [
        ASK,
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "plus one?"},
        {"role": "assistant", "content": "Five."},
    ]
}
WITH_SYSTEM: Row = {"messages": [{"role": "system", "content": "Be brief."}, *PLAIN["messages"]]}
THOUGHT: Row = {
    "messages": [
        ASK,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Four."}]},
        {"role": "user", "content": "plus one?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}, {"type": "text", "text": "Five."}]},
    ]
}  # fmt: skip


def calling(*calls: Row, result: Any = "4", **row: Any) -> Row:
    """Return a row with calls, their results and an answer."""
    results = [{"role": "tool", "tool_call_id": call.get("id"), "name": "add", "content": result} for call in calls]
    turns = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        *results,
        {"role": "assistant", "content": "Four."},
    ]
    return {"messages": turns, **row}


def call(arguments: Any = '{"a": 2}', id: str = "abc123xyz") -> Row:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


CALL = calling(call(), tools=[SCHEMA])
BARE = calling(call())  # without schemas
SAME = {  # the same call, as others write it
    "arguments are an object": calling(call({"a": 2})),
    "the result is a list of parts": calling(call(), result=[{"type": "text", "text": "4"}]),
    "function_call": {"messages": [ASK, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}}, {"role": "function", "name": "add", "content": "4"}, {"role": "assistant", "content": "Four."}]},
    "ShareGPT": {"conversations": [{"from": "Human", "value": "two plus two?"}, {"from": "Function_Call", "value": '{"name": "add", "arguments": {"a": 2}}'}, {"from": "Observation", "value": "4"}, {"from": "GPT", "value": "Four."}]},
    "other spelling": {"Messages": [{"Role": "User", "Content": "two plus two?"}, {"Role": "assistant", "toolCalls": json.dumps([call()])}, {"Role": "Tool-Response", "Content": "4"}, {"Role": "Assistant", "Content": "Four."}]},
}  # fmt: skip


def load(folder: Path, row: Row) -> Any:
    (folder / "row.jsonl").write_text(json.dumps({"id": "row", **row}) + "\n")
    (conversation,) = load_conversations([str(folder / "row.jsonl")])
    return conversation


LEARNED: dict[str, tuple[Family, Row, list[list[str]]]] = {
    "GLM-4, the next marker ends an answer": (families.GLM4, PLAIN, [["\nFour.<|user|>", "\nFive."]]),
    "GLM-4, a call": (families.GLM4, CALL, [['add\n{"a": 2}<|observation|>', "\nFour."]]),
    "GLM-4.5, every turn apart": (
        families.GLM45,
        THOUGHT,
        [["\n<think>hm</think>\nFour.<|user|>"], ["\n<think>so</think>\nFive."]],
    ),
    "an end of text that the target does not write": (families.CLOSED, PLAIN, [["Four.<|user|>"], ["Five."]]),
    "Qwen2.5": (
        families.QWEN25,
        CALL,
        [['<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>', "Four.<|im_end|>"]],
    ),
    "Qwen2.5, two calls": (
        families.QWEN25,
        calling(call(), call({"a": 3}, "xyz123abc")),
        [['<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>', "Four.<|im_end|>"]],
    ),
    "Mistral, the system prompt in the last question": (families.MISTRAL, WITH_SYSTEM, [[" Four.</s>"], [" Five.</s>"]]),
    "Mistral, a call": (
        families.MISTRAL,
        {**CALL, "messages": [{"role": "system", "content": "Be brief."}, *CALL["messages"]]},
        [['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]</s>'], [" Four.</s>"]],
    ),
    "DeepSeek-R1, thoughts dropped": (families.DEEPSEEK_R1, THOUGHT, [["hm\n</think>\n\nFour.</s>"], ["so\n</think>\n\nFive.</s>"]]),
    "DeepSeek-R1, thoughts dropped and not opened": (
        families.DEEPSEEK_R1_CLOSED,
        THOUGHT,
        [["<think>\nhm\n</think>\n\nFour.</s>"], ["<think>\nso\n</think>\n\nFive.</s>"]],
    ),
    "DeepSeek-R1, the thought in the text": (
        families.DEEPSEEK_R1_CLOSED,
        {"messages": [ASK, {"role": "assistant", "content": "<think>hm</think> Four."}]},
        [["<think>hm</think> Four.</s>"]],
    ),
    "DeepSeek-V3.1, without thoughts": (families.DEEPSEEK_V31, PLAIN, [["Four.</s>", "Five.</s>"]]),
    "DeepSeek-V3.2, a block begun in the prompt": (families.DEEPSEEK_V32, PLAIN, [["Four.</s>"], ["Five.</s>"]]),
    "Qwen3, thinking off": (families.QWEN3, PLAIN, [["Four.<|im_end|>"], ["Five.<|im_end|>"]]),
    "Gemma 4, thinking off": (families.GEMMA4, PLAIN, [["Four.<turn|>"], ["Five.<turn|>"]]),
    "Llama 3.1": (families.LLAMA31, CALL, [['{"name": "add", "parameters": {"a": 2}}<|eom_id|>', "Four.<|eot_id|>"]]),
    "harmony": (
        families.HARMONY,
        THOUGHT,
        [[f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{said}<|return|>"] for thought, said in (("hm", "Four."), ("so", "Five."))],
    ),
    "harmony, a call": (
        families.HARMONY,
        CALL,
        [[' to=functions.add<|channel|>commentary<|message|>{"a": 2}<|call|>', "<|channel|>final<|message|>Four.<|return|>"]],
    ),
    "Phi-4, an end of text after the end of the turn": (families.PHI4, PLAIN, [["Four.<|end|>"], ["Five.<|end|>"]]),
    "Kimi K2": (
        families.KIMI,
        calling(call(id="functions.add:0")),
        [['<|call|>functions.add:0<|argument|>{"a": 2}<|im_end|>', "Four.<|im_end|>"]],
    ),
    "Command-R": (families.COMMAND_R, BARE, [['Action: ```json\n[{"tool_name": "add", "parameters": {"a": 2}}]```<|end_turn|>', "Four.<|end_turn|>"]]),
    "calls of earlier questions dropped": (
        families.STEPS,
        {"messages": [*BARE["messages"], *PLAIN["messages"][2:]]},
        [['<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'], ["Four.<|im_end|>"], ["Five.<|im_end|>"]],
    ),
    "parts alone": (families.PARTS, PLAIN, [["Four.<end_of_turn>", "Five.<end_of_turn>"]]),
    "parts alone, a call": (families.PARTS, BARE, [['{"name": "add", "arguments": {"a": 2}}<end_of_turn>', "Four.<end_of_turn>"]]),
}  # fmt: skip
LEARNED |= {f"GLM-4, {name}": (families.GLM4, row, LEARNED["GLM-4, a call"][2]) for name, row in SAME.items()}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_of_a_family(name: str, tmp_path: Path) -> None:
    family, row, expected = LEARNED[name]
    tokenizer, conversation = family.tokenizer(), load(tmp_path, row)
    found = tokenize_all(tokenizer, [conversation], eos_ids=family.eos_ids(tokenizer)).samples
    assert [learnt(tokenizer, sample) for sample in found] == expected
    # Every answer stands behind the ids of its own request.
    turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    prompts = [render_prompt(tokenizer, conversation.messages[:turn], conversation.tools) for turn in turns]
    starts = [(s, t) for s in found for t in range(len(s.ids)) if s.mask[t] and not s.mask[t - 1]]
    assert [sample.ids[:start].tolist() for sample, start in starts] == prompts


LOST: dict[str, tuple[Family, Row, str]] = {
    "a call beside null": (families.DEEPSEEK_R1, BARE, r"Sample row, turn 2: the call of 'add' .* in data\.chat_template"),
    "a call": (families.NO_TOOLS, BARE, "Sample row, turn 2: the call of 'add'"),
    "a call whose name stands elsewhere": (families.NO_TOOLS, {"messages": [{"role": "user", "content": "add 4"}, *BARE["messages"][1:]]}, "turn 2: the call of 'add'"),
    "an old call": (families.NO_TOOLS, SAME["function_call"], "turn 2: the call of 'add'"),
    "the second of two calls": (families.HARMONY, calling(call(), call({"a": 3})), "turn 2: the call of 'add'"),
    "a result": (families.NO_TOOLS, {"messages": [ASK, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "Four."}]}, "turn 2: the tool's result"),
    "a name that is not the id": (families.KIMI, BARE, "turn 2: the call of 'add'"),
    "a text": (families.Family(families.NO_TOOLS.template.replace("m.content", "m.text"), (), ("<end_of_turn>",)), PLAIN, "Sample row, turn 2: .*leaves out the text of this answer"),
    "several calls in a turn": (families.LLAMA31, calling(call(), call({"a": 3}, "xyz123abc")), "cannot take several calls in one turn; remove the sample"),
    "a text beside a call": (families.LLAMA31, {"messages": [ASK, {"role": "assistant", "content": "I add.", "tool_calls": [call()]}]}, "Sample row, turn 2: .*leaves out the text of this answer"),
    "the values of arguments": (families.NAMES, BARE, "turn 2: the arguments of the call of 'add'"),
    "an answer to an answer": (families.MERGED, {"messages": [*PLAIN["messages"][:2], {"role": "assistant", "content": "Really."}]}, "turn 3: .*does not continue its own prompt"),
    "a thought": (families.NO_TOOLS, THOUGHT, "Sample row, turn 2: .*leaves out the thought"),
    "a thought that is said too": (families.NO_TOOLS, {"messages": [ASK, {"role": "assistant", "reasoning_content": "Four.", "content": "Four."}]}, "turn 2: .*leaves out the thought"),
    "a thought that was asked for": (families.NO_TOOLS, {"messages": [ASK, {"role": "assistant", "reasoning_content": "two plus two", "content": "Four."}]}, "turn 2: .*leaves out the thought"),
    "a thought, thinking off": (families.DEEPSEEK_V31, THOUGHT, "Sample row, turn 2: .*leaves out the thought"),
    "a thought behind a closed block": (families.QWEN3, THOUGHT, "turn 2: .*closes a think block before the thought of this answer"),
    "a thought in the text behind a closed block": (families.QWEN3, {"messages": [ASK, {"role": "assistant", "content": "<think>hm</think> Four."}]}, "turn 2: .*closes a think block"),
    "Gemma 4's thought in the text": (families.GEMMA4, {"messages": [ASK, {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Four."}]}, "turn 2: .*closes a think block"),
    "a call behind the end of its turn": (families.GIGACHAT, {"messages": BARE["messages"][:2]}, "turn 2: .*writes the call of 'add' outside of this answer"),
    "no thought where the prompt opens one": (families.DEEPSEEK_R1, PLAIN, "turn 2: .*opens a think block, and the answer holds no thought"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_loses_is_named(name: str, tmp_path: Path) -> None:
    family, row, message = LOST[name]
    tokenizer, conversation = family.tokenizer(), load(tmp_path, row)
    with pytest.raises(UserError, match=message):
        tokenize_all(tokenizer, [conversation], eos_ids=family.eos_ids(tokenizer))
    if any(turn["role"] == "tool" for turn in conversation.messages):
        with pytest.raises(UserError, match=message):
            prepare_prompts(tokenizer, [conversation], max_new_tokens=lambda name: 8, max_length=400)


WITHIN = {"messages": [{"role": "system", "content": "Be brief.", "functions": [SCHEMA]}, *PLAIN["messages"]]}
SAID: dict[str, tuple[Family, Row, str | None]] = {
    "schemas": (families.NO_TOOLS, {**PLAIN, "tools": [SCHEMA]}, "schemas in `tools`"),
    "schemas, written": (families.GLM4, {**PLAIN, "tools": [SCHEMA]}, None),
    "schemas in a turn": (families.QWEN25, WITHIN, "schemas in `tools`"),
    "schemas in a turn, as text": (families.QWEN25, {"messages": [{**WITHIN["messages"][0], "functions": "[]"}, *PLAIN["messages"]]}, "schemas in `tools`"),
    "schemas in a turn, written": (replace(families.QWEN25, template="{{ messages[0].functions | default('') | tojson }}" + families.QWEN25.template), WITHIN, None),
    "the system prompt": (families.NO_SYSTEM, WITH_SYSTEM, "system prompt"),
    "the system prompt, written by the last question": (families.MISTRAL, WITH_SYSTEM, None),
}  # fmt: skip


@pytest.mark.parametrize("regenerate", [True, False])
@pytest.mark.parametrize("name", SAID)
def test_what_prompts_lose_is_said_and_the_sample_read_as_served(name: str, tmp_path: Path, regenerate: bool) -> None:
    family, row, what = SAID[name]
    tokenizer, said = family.tokenizer(), list[str]()
    rows = [load(tmp_path, row), load(tmp_path, {**PLAIN, "id": "other"})]
    if regenerate:
        prepare_prompts(tokenizer, rows, max_new_tokens=lambda name: 8, max_length=400, warn=said.append)
    else:
        tokenize_all(tokenizer, rows, warn=said.append)
    assert [text.split(" leaves out the ")[1].split(":")[0] for text in said] == (
        [f"{what} of 1 sample (row)"] if what else []
    )


def test_thoughts_where_the_prompt_opens_them(tmp_path: Path) -> None:
    tokenizer, conversation = families.DEEPSEEK_V31.tokenizer(), load(tmp_path, THOUGHT)
    first, _ = tokenize_all(tokenizer, [conversation], template_kwargs={"thinking": True}).samples
    assert runs(tokenizer, first) == [
        (False, "<s><User>two plus two?<Bot><think>"),
        (True, "hm</think>Four.</s>"),
    ]
