"""Showing a sample as the target reads it, with the tokens to learn in colour."""

from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.batch import Tokenized
from draftsmith.errors import one_line, printable

_SUPERVISED = "#ffffff on #1f7a4d"
_PROMPT = "dim"
_OPEN, _CLOSE = "⟦", "⟧"


def show_conversation(tokenized: Tokenized, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print one sample: id, slice, how much of it is supervised, a legend, and its text.

    Supervised tokens have a background colour, or stand in brackets where the console has no colours. Special
    tokens are shown; a line break that is itself supervised is shown as ⏎ before it breaks.
    """
    plain = console.no_color or console.color_system is None
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
