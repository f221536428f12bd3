import io

import torch
from rich.console import Console

from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import tokenize_conversation
from draftsmith.data.conversations.show import conversation_text, show_conversation
from tests.helpers import tiny_tokenizer

TALK = Conversation(
    "talk-1",
    "chat",
    (
        {"role": "user", "content": "[bold]a?[/bold]"},
        {"role": "assistant", "content": "One —\nzwölf 🙂"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "Two."},
    ),
)


def shown(console):
    tokenizer = tiny_tokenizer()
    (sample,) = tokenize_conversation(tokenizer, TALK)
    show_conversation(sample, tokenizer, console)
    return sample, console.file.getvalue()


def test_without_colours_supervised_text_stands_in_brackets():
    sample, text = shown(Console(file=io.StringIO(), width=100, color_system=None))
    assert "talk-1  (chat)" in text
    supervised = int(sample.mask.sum())
    assert f"{supervised} of {len(sample.ids)} tokens supervised ({supervised / len(sample.ids):.0%})" in text
    assert "<|im_start|>user\n[bold]a?[/bold]<|im_end|>\n<|im_start|>assistant\n⟦One —⏎\nzwölf 🙂<|im_end|>⟧" in text
    assert "⟦Two.<|im_end|>⟧" in text
    assert "\x1b[" not in text


def test_with_colours_only_supervised_text_has_the_background(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, text = shown(Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor"))
    assert "⟦" not in text
    coloured = [
        part.split("\x1b[0m")[0].split("m", 1)[1] for part in text.split("\x1b[")[1:] if "48;2;31;122;77" in part
    ]
    assert "zwölf 🙂<|im_end|>" in coloured
    assert "Two.<|im_end|>" in coloured
    assert not any("a?" in part for part in coloured)


def test_text_is_that_of_the_ids():
    tokenizer = tiny_tokenizer()
    (sample,) = tokenize_conversation(tokenizer, TALK)
    plain = conversation_text(sample, tokenizer).plain.replace("⏎", "")
    assert plain == tokenizer.decode(sample.ids.tolist(), skip_special_tokens=False)
    empty = Tokenized(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.bool), "e", "s")
    assert conversation_text(empty, tokenizer).plain == ""
