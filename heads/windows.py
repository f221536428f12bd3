"""Draft heads with a sliding window over their attention that they were not trained with."""

from copy import copy
from dataclasses import replace

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead


def with_window(head: DraftHead, window: int) -> DraftHead:
    """Return a head of the same weights whose attention sees no more than so many tokens, its own the last of them; `head` stays as it
    is. Raises UserError where its attention takes no window, and for one that its drafts do not fit into."""
    least, where = head.least_window, f"evaluate.drafts: window is {window}, but"
    if least is None:
        raise UserError(f"{where} {head.method} heads, or this one, have no attention that takes one: leave it out.")
    if window < least:
        raise UserError(f"{where} a draft of this {head.method} head needs {least} tokens or more: make it longer.")
    narrow = copy(head)
    # A longer draft would lose sight of its own root.
    narrow.window, narrow.drafts = window, replace(head.drafts, max_speculative_tokens=head.clamp_draft_length(window))
    return narrow
