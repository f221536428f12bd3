from contextlib import nullcontext
from pathlib import Path

import pytest

from draftsmith.data.conversations.masks import (
    TokenizeStats,
    tokenize_all,
    tokenize_answers,
    tokenize_conversation,
)
from draftsmith.data.conversations.templates import (
    check_template_keys,
    check_tokenizer,
    load_tokenizer,
    render_prompt,
)
from draftsmith.errors import UserError
from tests import helpers
from tests.helpers import talk, tiny_tokenizer

THREE = talk("a?", "One.", "b?", "Two.\n", "c?", "Three")


def test_template_that_refuses_a_role():
    tokenizer = tiny_tokenizer(helpers.GEMMA)
    with pytest.raises(UserError, match=r"sample talk: it cannot take messages of role 'system'.*System role not"):
        tokenize_conversation(tokenizer, talk("a?", "One.", system="Help."))
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('Alternate!') }}")
    with pytest.raises(UserError, match=r"roles in this order: user, user .*Alternate"):
        render_prompt(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_conversations_that_cannot_be_rendered_are_left_out_where_asked():
    tokenizer, warned = tiny_tokenizer(helpers.GEMMA), []
    data = [talk("a?", "One.", id="1"), talk("b?", "Two.", system="Help.", id="2"), talk("c?", "Three.", id="3")]
    plain = tokenize_all(tokenizer, [data[0], data[2]])
    kept = tokenize_all(tokenizer, data, on_refused="drop", warn=warned.append)
    assert [(s.sample_id, s.ids.tolist()) for s in kept.samples] == [
        (s.sample_id, s.ids.tolist()) for s in plain.samples
    ]
    assert kept.stats == plain.stats
    (said,) = warned
    assert said.startswith(
        "data.on_refused: 1 of 3 conversations (2) are left out, as they cannot be rendered; of the first: The chat"
    )
    with pytest.raises(
        UserError, match=r"sample 2: .*System role.*; with data.on_refused: drop such conversations are left out"
    ):
        tokenize_all(tokenizer, data, on_refused="error")
    with pytest.raises(
        UserError, match=r"No conversation is left, as data.on_refused drops all 1; of the first: .*sample 2"
    ):
        tokenize_all(tokenizer, data[1:2], on_refused="drop")
    with pytest.raises(UserError, match=r"more than the 3 that data.max_length"):
        tokenize_all(tokenizer, data, on_refused="drop", on_too_long="error", max_length=3)


def test_too_long_is_counted_and_never_silent():
    tokenizer = tiny_tokenizer()
    whole = tokenize_conversation(tokenizer, THREE)[0]
    answers = [t for t in range(len(whole.ids)) if whole.mask[t]]
    limit = answers[-3]  # cuts the last three tokens to learn
    stats = TokenizeStats()
    (cut,) = tokenize_conversation(tokenizer, THREE, max_length=limit, on_too_long="truncate", stats=stats)
    assert cut.ids.tolist() == whole.ids[:limit].tolist()
    assert stats == TokenizeStats(kept=1, truncated=1, supervised_tokens=len(answers) - 3, cut_supervised_tokens=3)
    stats = TokenizeStats()
    assert tokenize_conversation(tokenizer, THREE, max_length=limit, stats=stats) == []
    assert stats == TokenizeStats(dropped_too_long=1, cut_supervised_tokens=len(answers))
    stats = TokenizeStats()
    assert tokenize_conversation(tokenizer, THREE, max_length=5, on_too_long="truncate", stats=stats) == []
    assert stats == TokenizeStats(dropped_too_long=1, cut_supervised_tokens=len(answers))
    with pytest.raises(
        UserError, match=rf"Sample talk has {len(whole.ids)} tokens, more than the {limit} that data.max_length"
    ):
        tokenize_conversation(tokenizer, THREE, max_length=limit, on_too_long="error")
    (kept,) = tokenize_conversation(tokenizer, THREE, max_length=len(whole.ids), on_too_long="error")
    assert kept.ids.tolist() == whole.ids.tolist()


def test_a_sample_of_which_only_the_beginning_was_read_is_named():
    tokenizer, stats = tiny_tokenizer(), TokenizeStats()
    long = talk("word " * 15_000, "One.", id="pasted")
    assert tokenize_conversation(tokenizer, long, max_length=50, stats=stats) == []
    assert (stats.dropped_too_long, stats.without_supervised) == (1, 0)
    assert str(stats).endswith("of 1 far longer than max_length only the first tokens were read (pasted)")
    with pytest.raises(UserError, match="Sample pasted has over "):
        tokenize_conversation(tokenizer, long, max_length=50, on_too_long="error")


def test_data_set_with_nothing_to_learn():
    tokenizer = tiny_tokenizer()
    prompts = [talk("a?", id="p1"), talk("b?", id="p2")]
    with pytest.raises(UserError, match="none of the 2 samples holds an assistant turn"):
        tokenize_all(tokenizer, prompts)
    with pytest.raises(UserError, match=r"all 1 samples .* longer than the 4 tokens that data.max_length"):
        tokenize_all(tokenizer, [*prompts, THREE], max_length=4)
    found = tokenize_all(tokenizer, [*prompts, THREE])
    assert [sample.sample_id for sample in found.samples] == ["talk"]
    assert found.stats.without_supervised == 2
    assert "2 without a token to learn left out" in str(found.stats)


def test_what_was_left_out_is_said_and_progress_where_it_is_asked_for(capsys):
    assert str(TokenizeStats(kept=3, supervised_tokens=20)) == "3 samples with 20 tokens to learn"
    every = TokenizeStats(3, 1, 2, 4, supervised_tokens=20, cut_supervised_tokens=5)
    said = (
        "1 truncated; 2 dropped as too long; 5 tokens to learn lost to max_length; 4 without a token to learn left out"
    )
    assert str(every) == f"3 samples with 20 tokens to learn; {said}"
    tokenizer = tiny_tokenizer()
    tokenize_all(tokenizer, [THREE])
    assert capsys.readouterr().err == ""
    tokenize_all(tokenizer, [THREE], progress=True)
    assert "tokenize: 1/1 conv" in capsys.readouterr().err


def test_answers_keep_their_own_ids():
    row = {"id": "x", "slice": "math", "prompt_ids": [5, 6, 7], "output_ids": [8, 2]}
    [sample] = tokenize_answers([row]).samples
    assert sample.ids.tolist() == [5, 6, 7, 8, 2]
    assert sample.mask.tolist() == [False, False, False, True, True]
    rows = [
        {"id": "x", "slice": "math", "prompt_ids": [5, 6], "output_ids": [8]},
        {"id": "y", "slice": "math", "prompt_ids": [5], "output_ids": []},
        {"id": "z", "slice": "math", "prompt_ids": [5], "output_ids": [8, 9, 9, 2]},
    ]
    found = tokenize_answers(rows, max_length=4, on_too_long="truncate")
    assert [(s.sample_id, s.mask.sum().item()) for s in found.samples] == [("x", 1), ("z", 3)]
    assert found.stats == TokenizeStats(
        kept=2, truncated=1, without_supervised=1, supervised_tokens=4, cut_supervised_tokens=1
    )


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (
            "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}{{ enable_thinking }}",
            True,
        ),
        ("{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}", True),
        (
            "{% macro turn(m) %}{{ m if enable_thinking }}{% endmacro %}{% generation %}{{ turn(1) }}{% endgeneration %}",
            True,
        ),
        ("{% for m in messages %}{% if m.x %}{% break %}{% endif %}{{ enable_thinking }}{% endfor %}", True),
        ("{{ messages }}{{ enable_thinkin }}", False),
        ("{% broken", True),
    ],
)
def test_arguments_that_a_template_does_not_read(template: str, reads: bool) -> None:
    """What cannot be parsed is for rendering to explain."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with nullcontext() if reads else pytest.raises(UserError, match=r"does not read \(did you mean enable_thinkin\?\)"):
        check_template_keys(tokenizer, {"enable_thinking": False})


def test_foreign_tokenizer():
    tokenizer = tiny_tokenizer()
    largest = max(tokenizer.get_vocab().values())
    check_tokenizer(tokenizer, largest + 1)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=rf"'<new>' has the id {largest + 1}, but the target's vocabulary has"):
        check_tokenizer(tokenizer, largest + 1)


def test_loading_a_tokenizer(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "good")
    assert render_prompt(load_tokenizer(str(tmp_path / "good")), THREE.messages[:1])[0] == 1
    tiny_tokenizer(None).save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"has no chat template: name a file with one in data.chat_template"):
        load_tokenizer(str(tmp_path / "base"))
    with pytest.raises(UserError, match="There is no folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match=r"No tokenizer could be loaded from .*empty|tokenizer in .*empty is empty"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    """For a base model, whose prompts are plain text, and in place of another."""
    file, beginning = tmp_path / "plain.jinja", ({"role": "user", "content": "Once upon"},)
    file.write_text("{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}")
    for template in (None, helpers.GEMMA):
        tiny_tokenizer(template).save_pretrained(tmp_path / "model")
        tokenizer = load_tokenizer(str(tmp_path / "model"), chat_template=str(file))
        assert tokenizer.decode(render_prompt(tokenizer, beginning)) == f"{tokenizer.bos_token}Once upon"
        (sample,) = tokenize_conversation(tokenizer, talk("Once upon", " a time"))
        assert tokenizer.decode(sample.ids[sample.mask]) == " a time"
    for wrong, said in (
        (None, "does not exist"),
        ("", "is empty"),
        ("{% for %}", "cannot render a single question"),
        ("{{ messages[0].text }}", "leaves out what a user says"),
    ):
        file.unlink() if wrong is None else file.write_text(wrong)
        with pytest.raises(UserError, match=said):
            load_tokenizer(str(tmp_path / "model"), chat_template=str(file))
