"""Rendering conversations with any chat template, and marking the tokens that the target itself would have written.

An answer's beginning and end are found by rendering prefixes of the conversation and checking that they are token
prefixes of the whole. Where a template rewrites earlier turns, or places the system prompt by the last one, each answer becomes a
sample of its own, rendered as serving renders it.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import (
    encode,
    generation_spans,
    render_text,
    shorten,
    template_name,
)
from draftsmith.errors import UserError

# An empty think block, whole or begun in the generation prompt: the template writes it, not the target.
_EMPTY_THINK = re.compile(r"\s*(<think>\s*)?</think>\s*")
_OPEN_THINK = re.compile(r"^\s*<think>\s*")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_MARK = "qz0zq"
"""A text that no template changes and no conversation holds, to find a place by."""


@dataclass(frozen=True)
class Rendering:
    """Token ids of (a part of) a conversation and, per token, whether it is an assistant token to learn.

    cut: the text is far longer than what is of use, and these are its first tokens.
    """

    ids: list[int]
    mask: list[bool]
    cut: bool = False


@dataclass(frozen=True)
class _Turns:
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
        return render_text(
            self.tokenizer,
            messages,
            self.conversation.tools,
            generation_prompt=generation_prompt,
            name=self.conversation.id,
            **self.template_kwargs,
        )

    def text(self, end: int, *, generation_prompt: bool) -> str:
        return self.render(self.conversation.messages[:end], generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, shorten(self.tokenizer, text, self.most))

    def marks(self, end: int, text: str, shift: int) -> list[bool] | None:
        """Return per token of `text` whether the template marks it with {% generation %}; None where it has no such tag. shift:
        where the text stands in that of `end` messages."""
        messages, tools = self.conversation.messages[:end], self.conversation.tools
        spans = generation_spans(self.tokenizer, messages, tools, **self.template_kwargs)
        if spans is None:
            return None
        if not self.tokenizer.is_fast:
            raise UserError(
                f"The {template_name(self.tokenizer)} marks what is learned with {{% generation %}}, which this slow tokenizer cannot "
                "find again: name a template without the marks in data.chat_template."
            )
        places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        inside = [(start - shift, stop - shift) for start, stop in spans]
        return [any(begin < stop and end > start for start, stop in inside) for begin, end in places]


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    eos_ids: Collection[int] = (),
    most: int | None = None,
    **template_kwargs: Any,
) -> list[Rendering]:
    """Render a conversation once if its prefixes verify, else once per assistant turn as serving renders it.

    An answer's mask begins after the generation prompt (and after an empty think block, which the template
    forces) and ends with the token at which a served model stops, one of `eos_ids`. {% generation %} marks narrow it further.
    most: tokens that are of use; of a far longer text only the first are returned, and need not be the text's after those.
    Raises UserError, naming sample and turn, where it is unclear where an answer begins, and where marks lie in no answer.
    """
    turns = _Turns(tokenizer, conversation, template_kwargs, eos_ids, most)
    if not turns.answers:
        ids = turns.encode(turns.text(len(conversation.messages), generation_prompt=False))
        return [Rendering(ids, [False] * len(ids))]
    renderings = _render_whole(turns) or [_render_turn(turns, turn) for turn in turns.answers]
    if not any(rendering.cut or any(rendering.mask) for rendering in renderings):
        raise UserError(
            f"Sample {conversation.id}: the {{% generation %}} marks of the {template_name(tokenizer)} lie in none of its answers, so that "
            "nothing of it is learned: mend them, or name a template without marks in data.chat_template."
        )
    return renderings


def _render_whole(turns: _Turns) -> list[Rendering]:
    """Return one rendering with every answer marked, or none where some prefix is not a token prefix of the whole."""
    length = len(turns.conversation.messages)
    whole = turns.text(length, generation_prompt=False)
    known = shorten(turns.tokenizer, whole, turns.most)
    ids, cut = encode(turns.tokenizer, known), len(known) < len(whole)
    spans = []
    for turn in turns.answers:
        prompt = turns.encode(turns.text(turn, generation_prompt=True))
        if cut and turns.most is not None and len(prompt) > turns.most:
            break  # what follows is of no use
        through = ids if turn + 1 == length else turns.encode(turns.text(turn + 1, generation_prompt=False))
        if len(prompt) > len(through) or ids[: len(prompt)] != prompt or ids[: len(through)] != through:
            return []
        spans.append((turn, len(prompt), len(through)))
    mask = [False] * len(ids)
    for turn, start, end in spans:
        _check_thought(turns, turn, whole)
        start, end = _answer_span(turns, turn, ids, start, end)
        _check_said(turns, turn, ids[start:end])
        mask[start:end] = [True] * (end - start)
    return [Rendering(ids, _narrow(mask, turns.marks(length, known, 0)), cut)]


def _render_turn(turns: _Turns, turn: int) -> Rendering:
    """Return the prompt of one answer as serving renders it, and the answer as the template renders a last turn."""
    whole_text = turns.text(turn + 1, generation_prompt=False)
    prompt_text, answer_text = _split(turns, turn, turns.text(turn, generation_prompt=True), whole_text)
    _check_thought(turns, turn, answer_text)
    begin, known = len(whole_text) - len(answer_text), shorten(turns.tokenizer, whole_text, turns.most)
    prompt, whole = turns.encode(prompt_text), encode(turns.tokenizer, known)
    before = turns.encode(whole_text[:begin]) if whole_text.endswith(answer_text) else None
    if before is not None and whole[: len(before)] == before:
        answer, marks = whole[len(before) :], turns.marks(turn + 1, known, 0)
        marks = marks and marks[len(before) :]
        cut = len(known) < len(whole_text)
    else:
        # Tokens merge across the border, or the template drops a part of the answer: tokenize it apart, since a served model
        # starts from the prompt's own tokens.
        known = shorten(turns.tokenizer, answer_text, turns.most)
        answer, marks = encode(turns.tokenizer, known), turns.marks(turn + 1, known, begin)
        cut = len(known) < len(answer_text)
    ids = prompt + answer
    start, end = _answer_span(turns, turn, ids, len(prompt), len(ids))
    if not cut:
        ids, end = _end_as_continued(turns, turn, ids, start, end)
        _check_said(turns, turn, ids[start:end])
    mask = [start <= t < end for t in range(len(ids))]
    return Rendering(ids, _narrow(mask, marks and [*[False] * len(prompt), *marks]), cut)


def _split(turns: _Turns, turn: int, prompt: str, whole: str) -> tuple[str, str]:
    """Return the texts of a prompt and its answer. `whole` may differ from `prompt` in a think block at its end, and before its last
    turn in what the template places there."""
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    begin = prompt.rfind("<think>")
    block = prompt[begin:] if begin >= 0 else ""
    empty, opened = _EMPTY_THINK.fullmatch(block), _OPEN_THINK.fullmatch(block)
    base = prompt[:begin] if empty or opened else prompt
    rest, why = _after(turns, turn, base, prompt, whole), "it stands in another place or begins otherwise"
    if rest is not None and (base == prompt or rest.startswith(block)):
        return prompt, rest[len(prompt) - len(base) :]
    if rest is not None and empty:  # the prompt forces an empty block, and the answer is rendered without it
        return prompt, rest
    if rest is not None and opened:
        thought, said = _thought_of(turns.conversation.messages[turn], block)
        bare = _EMPTY_THINK.sub("", rest, count=1) if thought else rest
        kept = said if bare.startswith(said) else said.strip()
        if thought and bare.startswith(kept):
            # The prompt opens a block; the template drops it from the answer, which a served model would have written.
            said = said if kept == said else said.rstrip()
            return prompt, _OPEN_THINK.sub("", thought) + said + bare[len(kept) :]
        if _EMPTY_THINK.match(rest):  # rendered as if thinking had been off
            return base, rest
        why = "the prompt opens a think block, and the answer holds no thought"
    raise UserError(
        f"Sample {turns.conversation.id}, turn {turn + 1}: the {template_name(turns.tokenizer)} renders this answer so "
        f"that it does not continue its own prompt ({why}), so the tokens to learn cannot be told; "
        + ("set data.template as you serve, such as enable_thinking: false" if "think" in why else "mend the template")
        + ", remove the turn, or train on answers made by the target itself."
    )


def _after(turns: _Turns, turn: int, base: str, prompt: str, whole: str) -> str | None:
    """Return what follows `base`, the prompt or its part before a think block, in the text that holds the answer too; None where
    that is unclear.

    The two may differ further up, in a system prompt that stands by the last turn: what counts is the longest common end, which
    must hold all that follows the last message's own text.
    """
    if whole.startswith(base):
        return whole[len(base) :]
    messages = turns.conversation.messages
    asked = {**messages[turn - 1], "content": messages[turn - 1]["content"] + _MARK}
    _, found, tail = turns.render([*messages[: turn - 1], asked], generation_prompt=True).rpartition(_MARK)
    place = whole.rfind(messages[turn]["content"].strip() or "\0")
    before = whole if place < 0 else whole[:place]
    size = _common_size(base, before)
    if not found or not tail.strip() or size < len(tail) - (len(prompt) - len(base)):
        return None
    return whole[before.rfind(base[len(base) - size :]) + size :]


def _common_size(text: str, other: str) -> int:
    """Return the length of the longest end of `text` that `other` holds anywhere."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[len(text) - middle :] in other else (low, middle - 1)
    return low


def _thought_of(message: dict[str, Any], block: str) -> tuple[str, str]:
    """Return the thought of an answer up to the end of the think `block` that its prompt opens, and what is said after it; "" where
    there is none."""
    content, thought = message["content"], message.get("reasoning_content", "").strip()
    if thought:  # in lines of its own where the block begins with one
        return f"{thought}\n</think>\n\n" if block.endswith("\n") else f"{thought}</think>", content
    thought, close, said = content.partition("</think>")
    return (thought + close, said) if close else ("", content)


def _check_thought(turns: _Turns, turn: int, text: str) -> None:
    """Raise UserError where the thought of an answer is not in the text to learn."""
    message = turns.conversation.messages[turn]
    within = _THOUGHT.match(message["content"])
    thought = message.get("reasoning_content") or (within[1] if within else "")
    if thought.strip() not in text:
        raise UserError(
            f"Sample {turns.conversation.id}, turn {turn + 1}: the {template_name(turns.tokenizer)} leaves out the thought of this "
            "answer, which the target would have written: set data.template as you serve, name a template that writes thoughts "
            "(reasoning_content) in data.chat_template, or remove the thought."
        )


def _check_said(turns: _Turns, turn: int, ids: Sequence[int]) -> None:
    """Raise UserError where an answer that says something has no token but those that end it."""
    special = _special_ids(turns.tokenizer)
    if turns.conversation.messages[turn]["content"].strip() and all(
        token in special or _is_blank(turns.tokenizer, token) for token in ids
    ):
        raise UserError(
            f"Sample {turns.conversation.id}, turn {turn + 1}: the {template_name(turns.tokenizer)} leaves out the text of this answer: "
            "name a template that writes it in data.chat_template, or remove the turn."
        )


def _answer_span(turns: _Turns, turn: int, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Narrow [start, end), the rendered answer, to the tokens that a served model writes; beyond `end` if the next turn begins with
    the token at which the model stops."""
    tokenizer, stops = turns.tokenizer, turns.stops
    start += _count_forced(tokenizer, ids[start : min(end, start + 32)])
    for t in range(start, end):
        if ids[t] in stops:
            return start, t + 1
    follows = next((t for t in range(end, len(ids)) if not _is_blank(tokenizer, ids[t])), None)
    if follows is not None and ids[follows] in stops:
        return start, follows + 1
    # None of the target's ends: whatever closes the turn, unless it only closes the text.
    closing = _turn_end(tokenizer, ids, start, end)
    if closing is not None and turns.eos_ids and _closes_text(turns, turn):
        end = max(t for t in range(start, end) if ids[t] == closing)
        closing = _turn_end(tokenizer, ids, start, end)
    if closing is not None:
        return start, next(t for t in range(start, end) if ids[t] == closing) + 1
    return start, _without_blanks(tokenizer, ids, start, end)


def _closes_text(turns: _Turns, turn: int) -> bool:
    """Return whether a template closes the text after this answer with what it would not write before another turn."""
    try:
        followed = turns.text(turn + 1, generation_prompt=True)
    except UserError:  # the template wants a question first
        return False
    return not followed.startswith(turns.text(turn + 1, generation_prompt=False).rstrip())


def _end_as_continued(turns: _Turns, turn: int, ids: list[int], start: int, end: int) -> tuple[list[int], int]:
    """Return the tokens of an answer with its end as the conversation goes on, where that is one of the target's: the marker of the
    next turn, say, in place of an end of text that the template appends to a last turn."""
    messages, tokenizer = turns.conversation.messages, turns.tokenizer
    if turn + 1 == len(messages):
        return ids, end
    try:
        continued = turns.render(
            [*messages[: turn + 1], {**messages[turn + 1], "content": _MARK}], generation_prompt=False
        )
    except UserError:  # the text alone is not accepted
        return ids, end
    before, found, _ = continued.rpartition(_MARK)
    special, core = _special_ids(tokenizer), end
    while core > start and (ids[core - 1] in special or _is_blank(tokenizer, ids[core - 1])):
        core -= 1
    said = _decode(tokenizer, ids[start:core])
    size = _common_size(said, before)
    if not found or not size:
        return ids, end
    closing = encode(tokenizer, before[before.rfind(said[len(said) - size :]) + size :])
    stop = next((t for t, token in enumerate(closing) if token in turns.stops), None)
    if stop is None or not all(token in special or _is_blank(tokenizer, token) for token in closing[:stop]):
        return ids, end
    closing = closing[: stop + 1]
    return (ids, end) if ids[core:end] == closing else ([*ids[:core], *closing], core + len(closing))


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


def _narrow(mask: list[bool], marks: list[bool] | None) -> list[bool]:
    """Keep tokens that the template marks too, and the stop token after them, since a served model writes it."""
    if marks is None:
        return mask
    marks = [*marks, *[False] * (len(mask) - len(marks))]
    last = [a and not b for a, b in pairwise([*mask, False])]
    return [m and (marks[t] or (last[t] and t > 0 and marks[t - 1])) for t, m in enumerate(mask)]


def _without_blanks(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int) -> int:
    """Return where a text ends without the white space at its end."""
    while end > start and _is_blank(tokenizer, ids[end - 1]):
        end -= 1
    return end


def _is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return not _decode(tokenizer, [token]).strip()


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
