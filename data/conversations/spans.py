"""Rendering conversations with any chat template, and marking the tokens that the target itself would have written.

An answer's beginning and end are found by rendering prefixes of the conversation and checking that they are token
prefixes of the whole. Where a template rewrites earlier turns, or places the system prompt by the last one, each answer becomes a
sample of its own, rendered as serving renders it. An answer ends at the token at which a served target stops, wherever the template puts it.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.data.conversations.day import dated
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import as_read, encode, render_text, shorten, template_name
from draftsmith.data.conversations.thoughts import (
    BLOCK,
    CLOSED,
    EMPTY_THINK,
    OPEN_THINK,
    OPENS,
    after_thought,
    lacks_thought,
    thought_of,
)
from draftsmith.errors import UserError

MARK = "qz0zq"
"""A text that no template changes and no conversation holds, to find a place by."""


@dataclass(frozen=True)
class Renderer:
    """Renders a conversation, its beginnings and changes of it. eos_ids: the target's end tokens. most: tokens that are of use."""

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
            return_assistant_tokens_mask=True,
            **{"chat_template": template, **dated(self.tokenizer, tools)},
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
        first = ids[start : min(end, start + 32)]
        if EMPTY_THINK.match(self.decode(first)):  # an empty think block, which the template forces
            counts = range(1, len(first) + 1)
            start += max((n for n in counts if EMPTY_THINK.fullmatch(self.decode(first[:n]))), default=0)
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
        size, place = end_within(self.decode(ids[start:core]), before)
        if not mark or not size:
            return ids, end
        closing = encode(self.tokenizer, before[place:])
        stop = next((t for t, token in enumerate(closing) if token in self._stops), None)
        if stop is None or not all(map(self.says_nothing, closing[:stop])):
            return ids, end
        closing = closing[: stop + 1]
        return (ids, end) if ids[core:end] == closing else ([*ids[:core], *closing], core + len(closing))

    @property
    def _stops(self) -> Collection[int]:
        """The tokens that end an answer: the target's, else the tokenizer's."""
        return self.eos_ids or (self.tokenizer.eos_token_id,)

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


def end_within(text: str, other: str) -> tuple[int, int]:
    """Return the length of the longest end of `text` that `other` holds anywhere, and the place behind it there, the last of several."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[len(text) - middle :] in other else (low, middle - 1)
    return low, other.rfind(text[len(text) - low :]) + low


@dataclass(frozen=True)
class Rendering:
    """Token ids of (a part of) a conversation and, per token, whether it is an assistant token to learn.

    cut: the text is far longer than what is of use, and these are its first tokens.
    """

    ids: list[int]
    mask: list[bool]
    cut: bool = False


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
    renderer = Renderer(tokenizer, conversation, template_kwargs, eos_ids, most)
    if not renderer.answers:
        ids = renderer.encode(renderer.text(len(conversation.messages), generation_prompt=False))
        return [Rendering(ids, [False] * len(ids))]
    renderings = _render_whole(renderer) or [_render_turn(renderer, turn) for turn in renderer.answers]
    if not any(rendering.cut or any(rendering.mask) for rendering in renderings):
        raise UserError(
            f"Sample {conversation.id}: the {{% generation %}} marks of the {template_name(tokenizer)} lie in none of its answers, so that "
            "nothing of it is learned: mend them, or name a template without marks in data.chat_template."
        )
    return renderings


def _render_whole(renderer: Renderer) -> list[Rendering]:
    """Return one rendering with every answer marked, or none where some prefix is not a token prefix of the whole."""
    length = len(renderer.conversation.messages)
    whole = renderer.text(length, generation_prompt=False)
    known = shorten(renderer.tokenizer, whole, renderer.most)
    ids, cut = encode(renderer.tokenizer, known), len(known) < len(whole)
    spans = []
    for turn in renderer.answers:
        prompt_text = renderer.text(turn, generation_prompt=True)
        through_text = whole if turn + 1 == length else renderer.text(turn + 1, generation_prompt=False)
        if cut and not (whole.startswith(prompt_text) and whole.startswith(through_text)):
            return []
        if lacks_thought(renderer.conversation.messages[turn], through_text.removeprefix(prompt_text)):
            return []
        prompt, through = renderer.encode(prompt_text), ids if turn + 1 == length else renderer.encode(through_text)
        if cut and renderer.most is not None and len(prompt) > renderer.most:
            break  # what follows is of no use
        if len(prompt) > len(through) or ids[: len(prompt)] != prompt or ids[: len(through)] != through:
            return []
        spans.append((turn, len(prompt), len(through)))
    mask = [False] * len(ids)
    for turn, start, end in spans:
        start, end = renderer.answer_span(turn, ids, start, end)
        if not cut or end < len(ids):
            _check_said(renderer, turn, ids[:start], ids[start:end])
        mask[start:end] = [True] * (end - start)
    return [Rendering(ids, _narrow(mask, renderer.marks(length, known, 0)), cut)]


def _render_turn(renderer: Renderer, turn: int) -> Rendering:
    """Return the prompt of one answer as serving renders it, and the answer as the template renders a last turn."""
    whole_text = renderer.text(turn + 1, generation_prompt=False)
    prompt_text, answer_text = _split(renderer, turn, renderer.text(turn, generation_prompt=True), whole_text)
    answer_text = _with_thought(renderer, turn, prompt_text, answer_text)
    begin, known = len(whole_text) - len(answer_text), shorten(renderer.tokenizer, whole_text, renderer.most)
    prompt, whole = renderer.encode(prompt_text), encode(renderer.tokenizer, known)
    before = renderer.encode(whole_text[:begin]) if whole_text.endswith(answer_text) else None
    if before is not None and whole[: len(before)] == before:
        answer, marks = whole[len(before) :], renderer.marks(turn + 1, known, 0)
        marks = marks and marks[len(before) :]
        cut = len(known) < len(whole_text)
    else:
        # Tokens merge across the border, or the template drops a part of the answer: tokenize it apart, since a served model
        # starts from the prompt's own tokens.
        known = shorten(renderer.tokenizer, answer_text, renderer.most)
        answer, marks = encode(renderer.tokenizer, known), renderer.marks(turn + 1, known, begin)
        cut = len(known) < len(answer_text)
    ids = prompt + answer
    start, end = renderer.answer_span(turn, ids, len(prompt), len(ids))
    if not cut:
        ids, end = renderer.end_as_continued(turn, ids, start, end)
        _check_said(renderer, turn, ids[:start], ids[start:end])
    mask = [start <= t < end for t in range(len(ids))]
    return Rendering(ids, _narrow(mask, marks and [*[False] * len(prompt), *marks]), cut)


def _split(renderer: Renderer, turn: int, prompt: str, whole: str) -> tuple[str, str]:
    """Return the texts of a prompt and its answer. `whole` may differ from `prompt` in a think block at its end, and before its last
    turn in what the template places there."""
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    begin = max(map(prompt.rfind, OPENS))
    block = prompt[begin:] if begin >= 0 else ""
    empty, opened = EMPTY_THINK.fullmatch(block), OPEN_THINK.fullmatch(block)
    base = prompt[:begin] if empty or opened else prompt
    rest, why = _after(renderer, turn, base, prompt, whole), "it stands in another place or begins otherwise"
    if rest is not None and (base == prompt or rest.startswith(block)):
        return prompt, rest[len(prompt) - len(base) :]
    # The prompt forces an empty block, and the answer is rendered without it, or with its end alone.
    if rest is not None and empty:
        return prompt, rest[match.end() :] if (match := EMPTY_THINK.match(rest)) else rest
    if rest is not None and opened:
        thought, said = thought_of(renderer.conversation.messages[turn], block)
        bare = EMPTY_THINK.sub("", rest, count=1)
        if thought and (answer := after_thought(OPEN_THINK.sub("", thought), said, bare)):
            # The prompt opens a block; the template drops it from the answer, which a served model would have written.
            return prompt, answer
        if EMPTY_THINK.match(rest):  # rendered as if thinking had been off
            return base, rest
        why = "the prompt opens a think block, and the answer holds no thought"
    raise renderer.error(
        turn,
        f"renders this answer so that it does not continue its own prompt ({why}), so the tokens to learn cannot be told; "
        + ("set data.template as you serve, such as enable_thinking: false" if "think" in why else "mend the template")
        + ", remove the turn, or train on answers made by the target itself.",
    )


def _after(renderer: Renderer, turn: int, base: str, prompt: str, whole: str) -> str | None:
    """Return what follows `base` in `whole`, the text that holds the answer too; None where that is unclear.

    base: the prompt, or its part before a think block. The two texts may differ further up, since some templates put the system
    prompt by the last turn. So the longest common end counts, and it must hold all that follows the last message's own text.
    """
    if whole.startswith(base):
        return whole[len(base) :]
    messages = renderer.conversation.messages
    asked = {**messages[turn - 1], "content": messages[turn - 1]["content"] + MARK}
    _, marked, tail = renderer.render([*messages[: turn - 1], asked], generation_prompt=True).rpartition(MARK)
    said_at = whole.rfind(messages[turn]["content"].strip() or "\0")
    before = whole if said_at < 0 else whole[:said_at]
    size, place = end_within(base, before)
    # An answer to an answer, which the template writes as one.
    merged = (
        messages[turn - 1]["role"] == "assistant" and (messages[turn - 1]["content"].strip() or MARK) in before[place:]
    )
    if not marked or not tail.strip() or size < len(tail) - (len(prompt) - len(base)) or merged:
        return None
    return whole[place:]


def _with_thought(renderer: Renderer, turn: int, prompt: str, answer: str) -> str:
    """Return an answer with the thought that a template which knows think blocks drops from every turn: the target writes it.

    Raises UserError where the thought has no place.
    """
    message = renderer.conversation.messages[turn]
    if not lacks_thought(message, answer):
        return answer
    thought, said = thought_of(message, BLOCK)
    full = after_thought(BLOCK * ("reasoning_content" in message) + thought, said, answer)
    known = "</think>" in str(renderer.tokenizer.chat_template) and not prompt.rstrip().endswith("</think>")
    if known and full is not None:
        return full
    raise renderer.error(
        turn,
        "leaves out the thought of this answer, which the target would have written: set data.template as you serve, name a "
        "template that writes thoughts (reasoning_content) in data.chat_template, or remove the thought.",
    )


def _check_said(renderer: Renderer, turn: int, before: Sequence[int], ids: Sequence[int]) -> None:
    """Raise UserError where the text or a call of an answer is not among its tokens: they only end it, or hold its call alone. And where
    they are a thought behind a block that is closed `before` them."""
    message = renderer.conversation.messages[turn]
    text = renderer.decode(ids)
    if renderer.decode(before[-8:]).rstrip().endswith(CLOSED) and text.lstrip().startswith(OPENS):
        raise renderer.error(
            turn,
            "closes a think block before the thought of this answer, which the target would not write there: set data.template as you serve, "
            "such as enable_thinking: true, give the thought as reasoning_content, or remove it.",
        )
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    if names and not any(re.sub(r"\W", "", name) in re.sub(r"\W", "", text) for name in names):
        raise renderer.error(
            turn,
            f"writes the call of {names[0]!r} outside of this answer, so the tokens to learn cannot be told: name a template that writes calls as "
            "the target does in data.chat_template, or remove the turn.",
        )
    nothing = all(map(renderer.says_nothing, ids))
    said = encode(renderer.tokenizer, message["content"].rpartition("</think>")[2]) if "tool_calls" in message else []
    beside = re.sub(r"\W", "", renderer.decode(said)) not in re.sub(r"\W", "", text)
    if message["content"].strip() and (nothing or beside):
        why = "leaves out the text of this answer: name a template that writes it in data.chat_template, or remove the turn."
        raise renderer.error(turn, why)


def _narrow(mask: list[bool], marks: list[bool] | None) -> list[bool]:
    """Keep tokens that the template marks too, and the stop token after them, since a served model writes it."""
    if marks is None:
        return mask
    marks = [*marks, *[False] * (len(mask) - len(marks))]
    last = [a and not b for a, b in pairwise([*mask, False])]
    return [m and (marks[t] or (last[t] and t > 0 and marks[t - 1])) for t, m in enumerate(mask)]
