"""Samples and answers on a terminal: every character once and whole, coloured by what is learned or where it was accepted."""

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import tokenize_conversation
from draftsmith.data.conversations.show import (
    COLOURS,
    INKS,
    LiveAnswer,
    TextStream,
    conversation_text,
    print_legend,
    show_conversation,
)
from tests.helpers import tiny_tokenizer

# The whole severity of Machado, Oliveira and Fernandes (2009), https://doi.org/10.1109/TVCG.2009.113.
VISIONS = {
    "normal": [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}

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


TEXTS = (
    "你好，世界！",
    "👩‍👩‍👧 familie 🙂🙂",
    "  two  spaces\n\tand a tab\n\n",
    "naïve café – 12 €",
    "What is two plus two?",
)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: spaces are ▁, a character outside the vocabulary is its bytes."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁What",
        "▁is",
        "▁two",
        "a",
        "e",
        "s",
        "n",
    ]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte-level": tiny_tokenizer, "byte fallback": byte_fallback_tokenizer}


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_as_the_library_streams_them(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream, library = TextStream(tokenizer), DecodeStream(skip_special_tokens=True)
    pieces = [stream.put(token) for token in ids]
    assert pieces == [library.step(tokenizer.backend_tokenizer, token) or "" for token in ids]
    assert stream.end() == ""
    assert "".join(pieces) == decode(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_give_the_text_of_them_all(seed: int) -> None:
    """Half characters, special tokens and all."""
    tokenizer = tiny_tokenizer()
    ids = torch.randint(0, len(tokenizer), (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    stream = TextStream(tokenizer)
    assert "".join([*(stream.put(token) for token in ids), stream.end()]) == decode(tokenizer, ids)


def test_text_goes_on_after_bytes_that_are_no_text() -> None:
    """With byte fallback one wrong byte spoils what came before it, so that the text shown so far may change."""
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<0x41>", "<0xE4>", "<0xE4>", "▁What", "▁is", "▁two")]
    stream = TextStream(tokenizer)
    assert "".join([*(stream.put(token) for token in ids), stream.end()]) == "A\ufffd\ufffd What is two"
    assert decode(tokenizer, ids) == "\ufffd\ufffd\ufffd What is two"


def console(**how: Any) -> Console:
    return Console(file=io.StringIO(), width=40, **how)


def write(console: Console, text: str, positions: list[int | None], hidden: tuple[int, ...] = ()) -> str:
    """Print the tokens of a text, drafted at positions that are repeated as often as needed; return what was printed."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = LiveAnswer(tokenizer, console, hidden)
    for i, token in enumerate(ids):
        answer.put(token, positions[i % len(positions)])
    answer.end()
    assert answer.text == decode(tokenizer, [token for token in ids if token not in hidden])
    return console.file.getvalue()


def test_accepted_tokens_have_the_colour_of_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = write(console(force_terminal=True, color_system="truecolor"), "is\nis", [None, 1, 2])
    first, second = (f"\x1b[38;2;28;36;48;48;2;{rgb}m" for rgb in ("253;231;37", "160;218;57"))
    pieces = [decode(tiny_tokenizer(), [i]) for i in tiny_tokenizer()("is\nis", add_special_tokens=False)["input_ids"]]
    assert pieces == ["is", "\n", "is"]  # a line break is never coloured
    assert text == f"is\n{second}is\x1b[0m\n"
    assert first in write(console(force_terminal=True, color_system="truecolor"), "is", [1])


def test_a_character_of_several_tokens_has_the_colour_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    count = len(tiny_tokenizer()("🙂", add_special_tokens=False)["input_ids"])
    assert count > 1
    text = write(console(force_terminal=True, color_system="truecolor"), "🙂", [*range(1, count), 7])
    assert text == "\x1b[38;2;255;255;255;48;2;70;50;126m🙂\x1b[0m\n"


@pytest.mark.parametrize("depth", COLOURS)
def test_positions_differ_in_colour_whatever_the_terminal_shows(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = console(force_terminal=True, color_system=depth)
    print_legend(shown, 12)
    styles = re.findall(r"\x1b\[([\d;]+)m (\d)\+? \x1b\[0m", shown.file.getvalue())
    assert [number for _, number in styles] == [*"12345678"]
    assert len({style for style, _ in styles}) == 8
    assert " 8+ " in shown.file.getvalue()


def linear(colour: str) -> torch.Tensor:
    """Return a colour's light, red, green and blue."""
    light = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)


def seen(colour: str, vision: str) -> torch.Tensor:
    """Return a colour as it looks with a vision, in CIELAB, where 2.3 is a difference that can just be seen."""
    light = (torch.tensor(VISIONS[vision]) @ linear(colour)).clamp(0, 1)
    xyz = torch.tensor([[0.4339, 0.3763, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]) @ light
    x, y, z = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_any_colour_vision_tells_positions_apart(vision: str) -> None:
    colours = torch.stack([seen(colour, vision) for colour in COLOURS["truecolor"]])
    assert torch.pdist(colours).min() > 10


def test_tokens_can_be_read_on_their_colours() -> None:
    """With the contrast that WCAG asks of text."""
    weights = torch.tensor([0.2126, 0.7152, 0.0722])
    for i, colour in enumerate(COLOURS["truecolor"]):
        dark, light = sorted(float(weights @ linear(one)) for one in (colour, INKS[i // 4]))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_pipe_and_no_color_give_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "What is two plus two? " * 9  # longer than the console is wide
    assert write(console(), long, [1, 2, None]) == f"{long}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = console(force_terminal=True, color_system="truecolor")
    assert write(terminal, long, [1, 2, None]) == f"{long}\n"
    before = terminal.file.getvalue()
    print_legend(terminal, 5)
    assert terminal.file.getvalue() == before


def test_text_cannot_command_the_terminal() -> None:
    evil = "\x1b]0;title\x07 \x1b[2J \x9b31m a\rb \x7f \u202eback\u2069 ok\n\tend"
    shown = r"\x1b]0;title\x07 \x1b[2J \x9b31m a\rb \x7f \u202eback\u2069 ok" + "\n\tend"
    assert write(console(), evil, [None, 1]) == f"{shown}\n"


def test_the_token_that_ends_an_answer_is_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    (word,) = tokenizer("is", add_special_tokens=False)["input_ids"]
    assert write(console(), "is", [None], hidden=(word,)) == "\n"
