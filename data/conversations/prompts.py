"""Prompts for a model to answer: conversations up to the turn that it answers, as token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import render_prompt
from draftsmith.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A conversation, the token ids of its history with the generation prompt, and the most tokens of the answer."""

    conversation: Conversation
    ids: tuple[int, ...]
    max_new_tokens: int


def prepare_prompts(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: Callable[[str], int],
    max_length: int,
    template: dict[str, Any] | None = None,
    limit: str = "data.max_length and the target allow: raise data.max_length or give shorter prompts",
) -> list[Prompt]:
    """Render the history of each conversation up to the last turn that is not the assistant's.

    Prompts that leave no space for an answer within `max_length` tokens are left out. max_new_tokens: by slice. template:
    arguments of the chat template. limit: what sets `max_length` and how to raise it, for the UserError where no prompt
    is left.
    """
    prompts = []
    for conversation in conversations:
        ids = render_prompt(tokenizer, conversation.prompt(), conversation.tools, **(template or {}))
        left = min(max_new_tokens(conversation.slice), max_length - len(ids))
        if left > 0:
            prompts.append(Prompt(conversation, tuple(ids), left))
    if conversations and not prompts:
        raise UserError(f"No prompt leaves room for an answer within the {max_length} tokens that {limit}.")
    return prompts
