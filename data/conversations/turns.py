"""One conversation with all that its rendering depends on, and what the spans of its answers are found with."""

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


@dataclass(frozen=True)
class Turns:
    """A conversation with its tokenizer, arguments of the chat template, the target's end tokens, and how many tokens are of use."""

    tokenizer: PreTrainedTokenizerBase
    conversation: Conversation
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    eos_ids: Collection[int] = ()
    most: int | None = None

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant turns to learn. One that opens the conversation answers nothing and is context only; so is one
        of weight 0."""
        turns = enumerate(self.conversation.messages)
        return [i for i, message in turns if message["role"] == "assistant" and i and message.get("weight") != 0]

    @property
    def stops(self) -> Collection[int]:
        """The tokens that end an answer: the target's, else the tokenizer's."""
        return self.eos_ids or (self.tokenizer.eos_token_id,)

    def render(self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool) -> str:
        """Return the text of other messages in place of the conversation's."""
        return render_text(
            self.tokenizer,
            messages,
            self.conversation.tools,
            generation_prompt=generation_prompt,
            name=self.conversation.id,
            **self.template_kwargs,
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
        places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        inside = [(start - shift, stop - shift) for start, stop in spans[0]]
        return [any(begin < stop and end > start for start, stop in inside) for begin, end in places]


def common_size(text: str, other: str) -> int:
    """Return the length of the longest end of `text` that `other` holds anywhere."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[len(text) - middle :] in other else (low, middle - 1)
    return low


@lru_cache(maxsize=4)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is white space."""
    return not decode(tokenizer, [token]).strip()


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
