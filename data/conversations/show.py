"""Showing conversations on a console: a sample with the tokens to learn, an answer while it is written, in colours where there are any."""

import re
from collections.abc import Collection
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.batch import Tokenized
from draftsmith.errors import one_line, printable

COLOURS = {
    "truecolor": ("#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"),
    "256": tuple(f"color({code})" for code in (220, 149, 71, 36, 30, 24, 54, 17)),
    "standard": (
        *("bright_yellow", "bright_green", "bright_cyan", "green"),
        *("bright_blue", "blue", "magenta", "bright_black"),
    ),
}
"""Backgrounds of draft positions 1 to 8, by what a terminal can show: viridis, from light to dark, which any colour vision tells
apart (van der Walt and Smith 2015)."""
INKS = ("#1c2430", "#ffffff")
"""Of the lighter and of the darker half."""


def has_colours(console: Console) -> bool:
    """Return whether a console shows colours: not a file, a pipe or a plain terminal, nor where NO_COLOR is set."""
    return not console.no_color and console.color_system is not None


class TextStream:
    """Turns tokens into text one at a time; all that it returns together is the text of all tokens, if that is valid UTF-8.

    It decodes a few tokens again with every new one, since a token's text may depend on the one before, and a character
    may take several: its bytes come with the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._before, self._read = 0, 0  # the text of _ids[_before:_read] has been returned, and is decoded again

    def put(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):  # a character whose bytes are not all there
            return ""
        self._before, self._read = self._read, len(self._ids)
        return text

    def end(self) -> str:
        """Return the text of tokens that completed nothing."""
        return self._new_text()

    def _new_text(self) -> str:
        shown, known = (self._decode(self._ids[self._before : end]) for end in (self._read, None))
        return known[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class LiveAnswer:
    """Prints an answer on a console, token by token. hidden: tokens that are not shown, which are those that end answers."""

    def __init__(self, tokenizer: Any, console: Console, hidden: Collection[int]) -> None:
        self._stream, self._console, self._hidden = TextStream(tokenizer), console, hidden
        self._position: int | None = None
        self.text = ""

    def put(self, token: int, position: int | None) -> None:
        """Print what a token completes. position: of the draft, from 1; None for the target's own. A character of several
        tokens has the colour of the last."""
        if token not in self._hidden:
            self._position = position
            self._print(self._stream.put(token))

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._print(self._stream.end())
        self._console.out()

    def _print(self, text: str) -> None:
        self.text += text
        style = position_style(self._console, self._position)
        # A coloured line break would colour the rest of the line.
        parts = re.split(r"(\n)", printable(text))
        segments = [Segment(part, None if part == "\n" else style) for part in parts if part]
        self._console.print(Segments(segments), end="", crop=False, soft_wrap=True)


def position_style(console: Console, position: int | None) -> Style | None:
    """Return how a token accepted at a draft position is shown; None for plain."""
    if position is None or not has_colours(console):
        return None
    colours = COLOURS.get(str(console.color_system), COLOURS["standard"])
    shade = min(position, len(colours)) - 1
    return Style(color=INKS[2 * shade // len(colours)], bgcolor=colours[shade])


def print_legend(console: Console, longest: int) -> None:
    """Say what the colours of drafts of up to `longest` tokens mean, where there are colours."""
    if not has_colours(console):
        return
    most = min(longest, len(COLOURS["truecolor"]))
    parts = [Segment("plain: the target's own; accepted at draft position ")]
    for position in range(1, most + 1):
        last = "+" if position == most < longest else ""
        parts += [Segment(f" {position}{last} ", position_style(console, position)), Segment(" ")]
    console.print(Segments(parts), crop=False, soft_wrap=True)
    console.out()


_SUPERVISED = "#ffffff on #1f7a4d"
_PROMPT = "dim"
_OPEN, _CLOSE = "⟦", "⟧"


def show_conversation(tokenized: Tokenized, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print one sample: id, slice, how much of it is supervised, a legend, and its text.

    Supervised tokens have a background colour, or stand in brackets where the console has no colours. Special
    tokens are shown; a line break that is itself supervised is shown as ⏎ before it breaks.
    """
    plain = not has_colours(console)
    total, supervised = len(tokenized.ids), int(tokenized.mask.sum())
    console.rule(Text(one_line(f"{tokenized.sample_id}  ({tokenized.slice})")), align="left")
    legend = Text("supervised: ")
    legend.append_text(_piece("the draft learns to predict this", True, plain))
    legend.append("   context: ")
    legend.append_text(_piece("read only", False, plain))
    console.print(legend)
    console.print(Text(f"{supervised} of {total} tokens supervised ({supervised / max(total, 1):.0%})"))
    console.print()
    console.print(conversation_text(tokenized, tokenizer, plain=plain))
    console.print()


def conversation_text(tokenized: Tokenized, tokenizer: PreTrainedTokenizerBase, *, plain: bool = False) -> Text:
    """Return the text of a sample, decoded in runs of equal mask (a character may take several tokens)."""
    text = Text()
    pairs = zip(tokenized.ids.tolist(), tokenized.mask.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        piece = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text.append_text(_piece(piece, supervised, plain))
    return text


def _piece(text: str, supervised: bool, plain: bool) -> Text:
    text = printable(text)
    if not supervised:
        return Text(text, style="" if plain else _PROMPT)
    text = text.replace("\n", "⏎\n")
    return Text(f"{_OPEN}{text}{_CLOSE}") if plain else Text(text, style=_SUPERVISED)
