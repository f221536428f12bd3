"""One conversation as the target's chat template renders it, and where an answer in it begins and ends for a served target.

An answer ends at the token at which a served target stops, wherever the template puts it.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import as_read, encode, render_text, shorten, template_name
from draftsmith.errors import UserError

MARK = "qz0zq"
"""A text that no template changes and no conversation holds, to find a place by."""
EMPTY_THINK = re.compile(r"\s*(<think>\s*)?</think>\s*")
"""An empty think block, whole or begun in the generation prompt: the template writes it, not the target."""


@dataclass(frozen=True)
class Renderer:
    """Renders a conversation, its beginnings and changes of it.

    eos_ids: the target's end tokens. most: tokens that are of use.
    """

    tokenizer: PreTrainedTokenizerBase
    conversation: Conversation
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    eos_ids: Collection[int] = ()
    most: int | None = None

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant turns to learn. One that opens the conversation answers nothing and is context only; so is one
        of weight 0."""
        messages = enumerate(self.conversation.messages)
        return [i for i, message in messages if message["role"] == "assistant" and i and message.get("weight") != 0]

    def render(self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool) -> str:
        """Return the text of other messages in place of the conversation's."""
        tools, name = self.conversation.tools, self.conversation.id
        return render_text(
            self.tokenizer, messages, tools, generation_prompt=generation_prompt, name=name, **self.template_kwargs
        )

    def text(self, end: int, *, generation_prompt: bool) -> str:
        """Return the text of the first `end` messages."""
        return self.render(self.conversation.messages[:end], generation_prompt=generation_prompt)

    def error(self, turn: int, why: str) -> UserError:
        """Return an error that names the sample, the turn and the template."""
        return UserError(f"Sample {self.conversation.id}, turn {turn + 1}: the {template_name(self.tokenizer)} {why}")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, the first where it is far longer than what is of use."""
        return encode(self.tokenizer, shorten(self.tokenizer, text, self.most))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def is_blank(self, token: int) -> bool:
        """Return whether a token is white space."""
        return not self.decode([token]).strip()

    def says_nothing(self, token: int) -> bool:
        """Return whether a token is special or white space."""
        return token in _special_ids(self.tokenizer) or self.is_blank(token)

    def marks(self, end: int, text: str, shift: int) -> list[bool] | None:
        """Return per token of `text` whether the template marks it with {% generation %}; None where it has no such tag. shift:
        where the text stands in that of `end` messages."""
        tools = list(self.conversation.tools) if self.conversation.tools else None
        template = self.tokenizer.get_chat_template(None, tools)
        if "endgeneration" not in template:
            return None
        _, spans = render_jinja_template(
            conversations=[as_read(self.tokenizer, self.conversation.messages[:end])],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
        )
        if not self.tokenizer.is_fast:
            raise UserError(
                f"The {template_name(self.tokenizer)} marks what is learned with {{% generation %}}, which this slow tokenizer cannot "
                "find again: name a template without the marks in data.chat_template."
            )
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        inside = [(start - shift, stop - shift) for start, stop in spans[0]]
        return [any(begin < stop and end > start for start, stop in inside) for begin, end in offsets]

    def answer_span(self, turn: int, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
        """Narrow [start, end), the rendered answer, to the tokens that a served model writes; beyond `end` if the next turn begins
        with the token at which the model stops."""
        start += self._count_forced(ids[start : min(end, start + 32)])
        follows = next((t for t in range(end, len(ids)) if not self.is_blank(ids[t])), end)
        stops, candidates = self._stops, (*range(start, end), follows)
        if (stop := next((t for t in candidates if t < len(ids) and ids[t] in stops), None)) is not None:
            return start, stop + 1
        # None of the target's ends: whatever closes the turn, unless it only closes the text.
        closing = self._turn_end(ids[start:end])
        if closing is not None and self.eos_ids and self._closes_text(turn):
            end = max(t for t in range(start, end) if ids[t] == closing)
            closing = self._turn_end(ids[start:end])
        if closing is not None:
            return start, next(t for t in range(start, end) if ids[t] == closing) + 1
        return start, max((t + 1 for t in range(start, end) if not self.is_blank(ids[t])), default=start)

    def end_as_continued(self, turn: int, ids: list[int], start: int, end: int) -> tuple[list[int], int]:
        """Return the tokens of an answer with its end as the conversation goes on, where that is one of the target's: the marker of
        the next turn, say, in place of an end of text that the template appends to a last turn."""
        messages = self.conversation.messages
        if turn + 1 == len(messages):
            return ids, end
        marked = [*messages[: turn + 1], {**messages[turn + 1], "content": MARK}]
        try:
            before, mark, _ = self.render(marked, generation_prompt=False).rpartition(MARK)
        except UserError:  # the text alone is not accepted
            return ids, end
        core = next((t + 1 for t in reversed(range(start, end)) if not self.says_nothing(ids[t])), start)
        said_end = end_within(self.decode(ids[start:core]), before)
        if not mark or not said_end.size:
            return ids, end
        closing = encode(self.tokenizer, before[said_end.place :])
        stop = next((t for t, token in enumerate(closing) if token in self._stops), None)
        if stop is None or not all(map(self.says_nothing, closing[:stop])):
            return ids, end
        closing = closing[: stop + 1]
        return (ids, end) if ids[core:end] == closing else ([*ids[:core], *closing], core + len(closing))

    @property
    def _stops(self) -> Collection[int]:
        """The tokens that end an answer: the target's, else the tokenizer's."""
        return self.eos_ids or (self.tokenizer.eos_token_id,)

    def _count_forced(self, ids: Sequence[int]) -> int:
        """Return how many tokens at the start of an answer are an empty think block, which the template forces."""
        if not EMPTY_THINK.match(self.decode(ids)):
            return 0
        counts = range(1, len(ids) + 1)
        return max((count for count in counts if EMPTY_THINK.fullmatch(self.decode(ids[:count]))), default=0)

    def _turn_end(self, ids: Sequence[int]) -> int | None:
        """Return the special token that closes the turn (only white space follows it), which need not be the eos token."""
        special = _special_ids(self.tokenizer)
        last = next((token for token in reversed(ids) if token in special or not self.is_blank(token)), None)
        return last if last in special else None

    def _closes_text(self, turn: int) -> bool:
        """Return whether a template closes the text after this answer with what it would not write before another turn."""
        try:
            followed = self.text(turn + 1, generation_prompt=True)
        except UserError:  # the template wants a question first
            return False
        return not followed.startswith(self.text(turn + 1, generation_prompt=False).rstrip())


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


@dataclass(frozen=True)
class End:
    """The longest end of a text that another one holds: its length, and the place behind it there."""

    size: int
    place: int


def end_within(text: str, other: str) -> End:
    """Return the longest end of `text` that `other` holds anywhere; of several places the last."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[len(text) - middle :] in other else (low, middle - 1)
    return End(low, other.rfind(text[len(text) - low :]) + low)
