import pytest
import torch

from draftsmith.data.conversations import spans, templates
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import tokenize_conversation
from draftsmith.data.conversations.spans import render_conversation
from draftsmith.data.conversations.templates import render_prompt
from draftsmith.errors import UserError
from tests import helpers
from tests.helpers import learnt, runs, talk, tiny_tokenizer

THREE = talk("a?", "One.", "b?", "Two.\n", "c?", "Three")
EXPECTED = {
    "chatml": (helpers.CHATML, "<|im_end|>", ["One.<|im_end|>", "Two.\n<|im_end|>", "Three<|im_end|>"]),
    "llama3, eos is another token than the turn's end": (
        helpers.LLAMA3,
        "<|endoftext|>",
        ["One.<|eot_id|>", "Two.<|eot_id|>", "Three<|eot_id|>"],
    ),
    "gemma": (helpers.GEMMA, "<|endoftext|>", ["One.<end_of_turn>", "Two.<end_of_turn>", "Three<end_of_turn>"]),
    "mistral, no header": (helpers.MISTRAL, "</s>", [" One.</s>", " Two.\n</s>", " Three</s>"]),
}
# The same conversation and text, the marks coming from the template.
EXPECTED["generation"] = (helpers.GENERATION, *EXPECTED["chatml"][1:])


@pytest.mark.parametrize("name", EXPECTED)
def test_masks_at_every_turn_boundary(name):
    """The slow oracle: the ids before each answer are the ids that a request for that answer sends."""
    template, eos, expected = EXPECTED[name]
    tokenizer = tiny_tokenizer(template, eos=eos)
    (sample,) = tokenize_conversation(tokenizer, THREE)
    assert learnt(tokenizer, sample) == expected
    whole = tokenizer.apply_chat_template(list(THREE.messages), tokenize=False)
    assert "".join(text for _, text in runs(tokenizer, sample)) == whole
    assert (sample.sample_id, sample.slice) == ("talk", "chat")
    assert sample.ids.dtype == torch.int64
    assert sample.mask.dtype == torch.bool
    starts = [t for t in range(len(sample.ids)) if sample.mask[t] and not sample.mask[t - 1]]
    prompts = [render_prompt(tokenizer, THREE.messages[:turn]) for turn in (1, 3, 5)]
    assert [sample.ids[:start].tolist() for start in starts] == prompts


THOUGHTS = talk("a?", "<think>\nhm\n</think>\n\nOne.", "b?", "<think>\nso\n</think>\n\nTwo.")


def test_thinking_template_gives_one_sample_per_turn_as_served():
    tokenizer = tiny_tokenizer(helpers.QWEN3)
    first, second = tokenize_conversation(tokenizer, THOUGHTS)
    assert (first.sample_id, second.sample_id) == ("talk#1", "talk#2")
    assert runs(tokenizer, first) == [
        (False, "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nhm\n</think>\n\nOne.<|im_end|>"),
        (False, "\n"),
    ]
    assert runs(tokenizer, second) == [
        (
            False,
            "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
            "<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "<think>\nso\n</think>\n\nTwo.<|im_end|>"),
        (False, "\n"),
    ]


@pytest.mark.parametrize("template_kwargs", [{}, {"enable_thinking": False}])
def test_forced_empty_think_block_belongs_to_the_prompt(template_kwargs):
    tokenizer = tiny_tokenizer(helpers.QWEN3)
    samples = tokenize_conversation(tokenizer, talk("a?", "One.", "b?", "Two."), template_kwargs=template_kwargs)
    assert [learnt(tokenizer, sample) for sample in samples] == [["One.<|im_end|>"], ["Two.<|im_end|>"]]
    assert all(
        runs(tokenizer, sample)[0][1].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for sample in samples
    )


def with_prompt_end(text):
    """ChatML whose generation prompt goes on with `text`."""
    start = helpers.CHATML[: helpers.CHATML.rindex("{% if add")]
    return start + "{% if add_generation_prompt %}<|im_start|>assistant\n" + text + "{% endif %}"


def test_prompt_opens_a_think_block_that_is_rendered_empty():
    """Like Nemotron 3: data without thinking is rendered with an empty block, spelt otherwise than the prompt's."""
    template = with_prompt_end("<think>\n").replace(
        "{{ m.content }}", "{{ ('<think></think>' if m.role == 'assistant' else '') + m.content }}"
    )
    tokenizer = tiny_tokenizer(template)
    first, second = tokenize_conversation(tokenizer, talk("What is <think>?", "One.", "b?", "Two."))
    assert runs(tokenizer, first) == [
        (False, "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n<think></think>"),
        (True, "One.<|im_end|>"),
        (False, "\n"),
    ]
    assert learnt(tokenizer, second) == ["Two.<|im_end|>"]


def test_empty_think_block_in_the_prompt_alone():
    """The prompt forces the block, but the rendered answer does not repeat it."""
    tokenizer = tiny_tokenizer(with_prompt_end("<think>\n\n</think>\n\n"))
    first, second = tokenize_conversation(tokenizer, talk("a?", "One.", "b?", "<Two>"))
    assert first.ids[: first.mask.int().argmax()].tolist() == render_prompt(tokenizer, THREE.messages[:1])
    assert learnt(tokenizer, first) == ["One.<|im_end|>"]
    assert learnt(tokenizer, second) == ["<Two><|im_end|>"]


def test_answer_that_merges_with_its_prompt_is_tokenized_apart():
    """An answer that begins with a line break: rendered in one piece it would merge with the prompt's own."""
    tokenizer = tiny_tokenizer(helpers.CHATML)
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "\nOne."))
    prompt = render_prompt(tokenizer, THREE.messages[:1])
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert learnt(tokenizer, sample) == ["\nOne.<|im_end|>"]


def test_answer_that_drops_its_own_beginning_names_sample_and_turn():
    tokenizer = tiny_tokenizer(with_prompt_end("<think>\n"))
    with pytest.raises(UserError, match=r"Sample talk, turn 4.*does not continue its own prompt"):
        tokenize_conversation(tokenizer, talk("a?", "<think>\n.</think>x", "b?", "Two."))


def test_think_block_in_a_question_is_not_taken_for_the_prompts_own():
    tokenizer = tiny_tokenizer(with_prompt_end("Sure: "))
    with pytest.raises(UserError, match="Sample talk, turn 2"):
        tokenize_conversation(tokenizer, talk("<think></think>?", "One."))


def test_text_after_the_stop_token_is_not_learnt():
    tokenizer = tiny_tokenizer(helpers.CHATML)
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "One.<|im_end|>more"))
    assert learnt(tokenizer, sample) == ["One.<|im_end|>"]
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "One.<|endoftext|>"))
    assert learnt(tokenizer, sample) == ["One.<|endoftext|><|im_end|>"]


@pytest.mark.parametrize("stop", ["<|eot_id|>", "<|endoftext|>"])
def test_both_the_eos_token_and_the_end_of_the_turn_stop(stop):
    tokenizer = tiny_tokenizer(helpers.LLAMA3, eos="<|endoftext|>")
    (sample,) = tokenize_conversation(tokenizer, talk("a?", f"One.{stop}more"))
    assert learnt(tokenizer, sample) == [f"One.{stop}"]


def test_template_without_a_stop_token_leaves_its_white_space_out():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = tiny_tokenizer(template)
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "One"))
    assert runs(tokenizer, sample) == [(False, "user: a?\n\nassistant:"), (True, " One"), (False, "\n\n")]


def test_generation_marks_narrow_the_answer():
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}(note)\n"
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tiny_tokenizer(template)
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "One.", "b?", "Two."))
    assert learnt(tokenizer, sample) == ["One.<|im_end|>", "Two.<|im_end|>"]


def test_opening_assistant_turn_is_context():
    tokenizer = tiny_tokenizer()
    conversation = talk("Hello!", "a?", "One.", roles=("assistant", "user", "assistant"))
    (sample,) = tokenize_conversation(tokenizer, conversation)
    assert learnt(tokenizer, sample) == ["One.<|im_end|>"]


def test_without_an_answer_nothing_is_learnt():
    tokenizer = tiny_tokenizer()
    (rendering,) = render_conversation(tokenizer, talk("a?"))
    assert "a?" in tokenizer.decode(rendering.ids)
    assert rendering.mask == [False] * len(rendering.ids)


@pytest.mark.parametrize("answer", ["hm\n</think>\n\nOne. ", "hm</think>One. "])
def test_white_space_at_the_end_of_an_answer_is_learnt_once(answer):
    drop = "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}"
    tokenizer = tiny_tokenizer(with_prompt_end("<think>\n").replace("{{ m.content }}", drop))
    (sample,) = tokenize_conversation(tokenizer, talk("a?", f"<think>\n{answer}"))
    assert learnt(tokenizer, sample) == [f"{answer}<|im_end|>"]


def test_empty_think_block_that_is_one_token_is_not_learnt():
    template = helpers.CHATML.replace(
        "{{ m.content }}", "{{ ('<think></think>' if m.role == 'assistant' else '') + m.content }}"
    )
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_tokens(["<think></think>"])
    (sample,) = tokenize_conversation(tokenizer, talk("a?", "One."))
    assert learnt(tokenizer, sample) == ["One.<|im_end|>"]


def test_answers_of_weight_0_are_context():
    tokenizer = tiny_tokenizer()
    messages = list(THREE.messages)
    messages[1] = {**messages[1], "weight": 0}
    (sample,) = tokenize_conversation(tokenizer, Conversation("t", "chat", tuple(messages)))
    assert learnt(tokenizer, sample) == ["Two.\n<|im_end|>", "Three<|im_end|>"]


NOTED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}(note)\n{% generation %}{{ m.content }}{% endgeneration %}"
    "<|im_end|>\n{% else %}{% if loop.last %}Now: {% endif %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_generation_marks_hold_where_every_turn_is_rendered_apart():
    tokenizer = tiny_tokenizer(NOTED)
    samples = tokenize_conversation(tokenizer, talk("a?", "One.", "b?", "Two."))
    assert [learnt(tokenizer, sample) for sample in samples] == [["One.<|im_end|>"], ["Two.<|im_end|>"]]
    assert runs(tokenizer, samples[0])[0][1] == "user: Now: a?\nassistant: (note)\n"


@pytest.mark.parametrize("marked", ["m.role == 'user'", "m.role == 'nobody'"])
def test_generation_marks_that_lie_in_no_answer_are_said(marked):
    template = (
        "{% for m in messages %}{{ m.role }}: {% if " + marked + " %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(UserError, match=r"Sample talk: the \{% generation %\} marks .* lie in none of its answers"):
        tokenize_conversation(tiny_tokenizer(template), talk("a?", "One."))


def test_an_end_that_is_not_the_targets_is_learnt_where_it_closes_every_turn():
    """The target's configuration names another end than its template writes."""
    tokenizer = tiny_tokenizer(helpers.CHATML)
    (sample,) = tokenize_conversation(tokenizer, THREE, eos_ids=[0])
    assert learnt(tokenizer, sample) == ["One.<|im_end|>", "Two.\n<|im_end|>", "Three<|im_end|>"]


LONG = "word " * 15_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "place", "on_too_long"),
    [
        (template, place, ("drop", "truncate")[(row + place) % 2])
        for row, template in enumerate([helpers.CHATML, helpers.QWEN3, helpers.GPT_OSS, NOTED])
        for place in range(4)
    ],
)
def test_a_far_too_long_text_is_cut_before_it_is_tokenized(template, place, on_too_long, monkeypatch):
    """What is kept is what is kept of all tokens."""
    contents = ["a?", "One.", "b?", "Two."]
    contents[place] = LONG + contents[place]
    sizes, tokenizer = [], tiny_tokenizer(template)
    whole, short = (
        tokenize_conversation(tokenizer, talk(*contents), max_length=100, on_too_long=on_too_long)
        for _ in monkeypatched(monkeypatch, sizes)
    )
    assert [(s.sample_id, s.ids.tolist(), s.mask.tolist()) for s in short] == [
        (s.sample_id, s.ids.tolist(), s.mask.tolist()) for s in whole
    ]
    assert max(sizes) <= 2**16 < len(contents[place])


def monkeypatched(monkeypatch, sizes):
    """Yield with texts tokenized whole, then as they are, when the sizes of texts are kept."""
    with monkeypatch.context() as patch:
        for module in (spans, templates):
            patch.setattr(module, "shorten", lambda tokenizer, text, most: text)
        yield
    encode = templates.encode
    with monkeypatch.context() as patch:
        for module in (spans, templates):
            patch.setattr(module, "encode", lambda tokenizer, text: sizes.append(len(text)) or encode(tokenizer, text))
        yield
