"""Where an answer ends: at the token at which a served target stops, wherever the chat template puts it."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations.templates import encode
from draftsmith.data.conversations.turns import MARK, Turns, common_size, decode, is_blank, special_ids
from draftsmith.errors import UserError

# An empty think block, whole or begun in the generation prompt: the template writes it, not the target.
EMPTY_THINK = re.compile(r"\s*(<think>\s*)?</think>\s*")


def answer_span(turns: Turns, turn: int, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Narrow [start, end), the rendered answer, to the tokens that a served model writes; beyond `end` if the next turn begins with
    the token at which the model stops."""
    tokenizer, stops = turns.tokenizer, turns.stops
    start += _count_forced(tokenizer, ids[start : min(end, start + 32)])
    follows = next((t for t in range(end, len(ids)) if not is_blank(tokenizer, ids[t])), end)
    if (stop := next((t for t in (*range(start, end), follows) if t < len(ids) and ids[t] in stops), None)) is not None:
        return start, stop + 1
    # None of the target's ends: whatever closes the turn, unless it only closes the text.
    closing = _turn_end(tokenizer, ids, start, end)
    if closing is not None and turns.eos_ids and _closes_text(turns, turn):
        end = max(t for t in range(start, end) if ids[t] == closing)
        closing = _turn_end(tokenizer, ids, start, end)
    if closing is not None:
        return start, next(t for t in range(start, end) if ids[t] == closing) + 1
    return start, max((t + 1 for t in range(start, end) if not is_blank(tokenizer, ids[t])), default=start)


def _closes_text(turns: Turns, turn: int) -> bool:
    """Return whether a template closes the text after this answer with what it would not write before another turn."""
    try:
        followed = turns.text(turn + 1, generation_prompt=True)
    except UserError:  # the template wants a question first
        return False
    return not followed.startswith(turns.text(turn + 1, generation_prompt=False).rstrip())


def end_as_continued(turns: Turns, turn: int, ids: list[int], start: int, end: int) -> tuple[list[int], int]:
    """Return the tokens of an answer with its end as the conversation goes on, where that is one of the target's: the marker of the
    next turn, say, in place of an end of text that the template appends to a last turn."""
    messages, tokenizer = turns.conversation.messages, turns.tokenizer
    if turn + 1 == len(messages):
        return ids, end
    try:
        continued = turns.render(
            [*messages[: turn + 1], {**messages[turn + 1], "content": MARK}], generation_prompt=False
        )
    except UserError:  # the text alone is not accepted
        return ids, end
    before, found, _ = continued.rpartition(MARK)
    special, core = special_ids(tokenizer), end
    while core > start and (ids[core - 1] in special or is_blank(tokenizer, ids[core - 1])):
        core -= 1
    said = decode(tokenizer, ids[start:core])
    size = common_size(said, before)
    if not found or not size:
        return ids, end
    closing = encode(tokenizer, before[before.rfind(said[len(said) - size :]) + size :])
    stop = next((t for t, token in enumerate(closing) if token in turns.stops), None)
    if stop is None or not all(token in special or is_blank(tokenizer, token) for token in closing[:stop]):
        return ids, end
    closing = closing[: stop + 1]
    return (ids, end) if ids[core:end] == closing else ([*ids[:core], *closing], core + len(closing))


def _count_forced(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """Return how many tokens at the start of an answer are an empty think block, which the template forces."""
    if not EMPTY_THINK.match(decode(tokenizer, ids)):
        return 0
    counts = range(1, len(ids) + 1)
    return max((count for count in counts if EMPTY_THINK.fullmatch(decode(tokenizer, ids[:count]))), default=0)


def _turn_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int) -> int | None:
    """Return the special token that closes the turn (only white space follows it), which need not be the eos token."""
    special, closing = special_ids(tokenizer), reversed(ids[start:end])
    last = next((token for token in closing if token in special or not is_blank(tokenizer, token)), None)
    return last if last in special else None
