"""Rendering conversations with any chat template, and marking the tokens that the target itself would have written.

An answer's beginning and end are found by rendering prefixes of the conversation and checking that they are token
prefixes of the whole. Where a template rewrites earlier turns, each answer becomes a sample of its own, rendered as
serving renders it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import encode, generation_mask, render_text, template_name
from draftsmith.errors import UserError

# An empty think block, whole or begun in the generation prompt: the template writes it, not the target.
_EMPTY_THINK = re.compile(r"\s*(<think>\s*)?</think>\s*")
_OPEN_THINK = re.compile(r"^\s*<think>\s*")


@dataclass(frozen=True)
class Rendering:
    """Token ids of (a part of) a conversation and, per token, whether it is an assistant token to learn."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class _Turns:
    """A conversation with its tokenizer and arguments of the chat template."""

    tokenizer: PreTrainedTokenizerBase
    conversation: Conversation
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant turns to learn; one that opens the conversation answers nothing and is context only."""
        return [i for i, message in enumerate(self.conversation.messages) if message["role"] == "assistant" and i]

    def text(self, end: int, *, generation_prompt: bool) -> str:
        return render_text(
            self.tokenizer,
            self.conversation.messages[:end],
            self.conversation.tools,
            generation_prompt=generation_prompt,
            name=self.conversation.id,
            **self.template_kwargs,
        )

    def generation_mask(self, end: int) -> list[bool] | None:
        messages = self.conversation.messages[:end]
        return generation_mask(self.tokenizer, messages, self.conversation.tools, **self.template_kwargs)


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, **template_kwargs: Any
) -> list[Rendering]:
    """Render a conversation once if its prefixes verify, else once per assistant turn as serving renders it.

    An answer's mask begins after the generation prompt (and after an empty think block, which the template
    forces) and ends with the token at which a served model stops. {% generation %} marks narrow it further.
    Raises UserError, naming sample and turn, where it is unclear where an answer begins.
    """
    turns = _Turns(tokenizer, conversation, template_kwargs)
    if not turns.answers:
        ids = encode(tokenizer, turns.text(len(conversation.messages), generation_prompt=False))
        return [Rendering(ids, [False] * len(ids))]
    return _render_whole(turns) or [_render_turn(turns, turn) for turn in turns.answers]


def _render_whole(turns: _Turns) -> list[Rendering]:
    """Return one rendering with every answer marked, or none where some prefix is not a token prefix of the whole."""
    length = len(turns.conversation.messages)
    whole = turns.text(length, generation_prompt=False)
    ids = encode(turns.tokenizer, whole)
    spans = []
    for turn in turns.answers:
        prompt = encode(turns.tokenizer, turns.text(turn, generation_prompt=True))
        through = ids if turn + 1 == length else encode(turns.tokenizer, turns.text(turn + 1, generation_prompt=False))
        if len(prompt) > len(through) or ids[: len(prompt)] != prompt or ids[: len(through)] != through:
            return []
        spans.append((len(prompt), len(through)))
    mask = [False] * len(ids)
    for start, end in spans:
        start, end = _answer_span(turns.tokenizer, ids, start, end)
        mask[start:end] = [True] * (end - start)
    return [Rendering(ids, _narrow(mask, ids, turns.generation_mask(length)))]


def _render_turn(turns: _Turns, turn: int) -> Rendering:
    """Return the prompt of one answer as serving renders it, and the answer as the template renders a last turn."""
    tokenizer = turns.tokenizer
    prompt_text = turns.text(turn, generation_prompt=True)
    whole_text = turns.text(turn + 1, generation_prompt=False)
    prompt, whole = encode(tokenizer, prompt_text), encode(tokenizer, whole_text)
    marks = turns.generation_mask(turn + 1)
    if whole[: len(prompt)] != prompt:
        # Tokens merge across the border, or the two texts differ: tokenize the two apart, since a served
        # model starts from the prompt's own tokens.
        prompt_text, answer_text = _split(turns, turn, prompt_text, whole_text)
        prompt = encode(tokenizer, prompt_text)
        whole, marks = prompt + encode(tokenizer, answer_text), None
    start, end = _answer_span(tokenizer, whole, len(prompt), len(whole))
    mask = [start <= t < end for t in range(len(whole))]
    return Rendering(whole, _narrow(mask, whole, marks))


def _split(turns: _Turns, turn: int, prompt: str, whole: str) -> tuple[str, str]:
    """Return the texts of a prompt and its answer, where `whole` may differ from `prompt` in a think block at its end."""
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    begin = prompt.rfind("<think>")
    block, rest = prompt[begin:], whole[begin:]
    if begin >= 0 and whole.startswith(prompt[:begin]):
        if _EMPTY_THINK.fullmatch(block):  # the prompt forces an empty block, and the answer is rendered without it
            return prompt, rest
        if _OPEN_THINK.fullmatch(block) and _EMPTY_THINK.match(rest):  # rendered as if thinking had been off
            return prompt[:begin], rest
        # The prompt opens a block; the template drops it from the answer, which a served model would have written.
        thought, close, said = turns.conversation.messages[turn]["content"].partition("</think>")
        kept = said if rest.startswith(said) else said.strip()
        if _OPEN_THINK.fullmatch(block) and close and rest.startswith(kept):
            said = said if kept == said else said.rstrip()
            return prompt, _OPEN_THINK.sub("", thought) + close + said + rest[len(kept) :]
    raise UserError(
        f"Sample {turns.conversation.id}, turn {turn + 1}: the {template_name(turns.tokenizer)} renders this answer so "
        "that it does not continue its own prompt (a thinking model's data without thinking?), so the tokens to "
        "learn cannot be told; try template_kwargs such as enable_thinking: false, remove the turn, or train on "
        "answers made by the target itself."
    )


def _answer_span(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Narrow [start, end), the rendered answer, to the tokens that a served model writes."""
    start += _count_forced(tokenizer, ids[start : min(end, start + 32)])
    stops = {tokenizer.eos_token_id, _turn_end(tokenizer, ids, start, end)}
    for t in range(start, end):
        if ids[t] in stops:
            return start, t + 1
    while end > start and not _decode(tokenizer, ids[end - 1 : end]).strip():
        end -= 1
    return start, end


def _count_forced(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """Return how many tokens at the start of an answer are an empty think block, which the template forces."""
    if not _EMPTY_THINK.match(_decode(tokenizer, ids)):
        return 0
    counts = range(1, len(ids) + 1)
    return max((count for count in counts if _EMPTY_THINK.fullmatch(_decode(tokenizer, ids[:count]))), default=0)


def _turn_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int) -> int | None:
    """Return the special token that closes the turn (only white space follows it), which need not be the eos token."""
    special = _special_ids(tokenizer)
    for t in reversed(range(start, end)):
        if ids[t] in special:
            return ids[t]
        if _decode(tokenizer, ids[t : t + 1]).strip():
            return None
    return None


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def _narrow(mask: list[bool], ids: Sequence[int], marks: list[bool] | None) -> list[bool]:
    """Keep tokens that the template marks too, and the stop token after them, since a served model writes it."""
    if marks is None or len(marks) != len(mask):
        return mask
    last = [a and not b for a, b in pairwise([*mask, False])]
    return [
        m and (g or (end and t > 0 and marks[t - 1]))
        for t, (m, g, end) in enumerate(zip(mask, marks, last, strict=True))
    ]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
