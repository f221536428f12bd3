"""Prompt lookup: propose the tokens that followed the last few tokens where they occurred before; nothing is trained.

Saxena, "Prompt Lookup Decoding" (2023). The first of several occurrences is taken, as in transformers
(`prompt_lookup_num_tokens`) and vLLM (method "ngram"), so that results carry over to them.

Shapes: L tokens of a text.
"""

import numpy as np

from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.drafters.texts import Branches, TextDrafter, pack

MAX_NGRAM = 3
"""Longest suffix that is looked up."""


def find_continuation(ids_L: np.ndarray, max_ngram: int = MAX_NGRAM) -> int:
    """Return the position behind the first earlier occurrence of the text's longest suffix of at most `max_ngram`
    tokens, or the text's length where not even its last token occurred before.

    An occurrence of a suffix is one of all shorter suffixes too, so candidates are narrowed down token by token.
    """
    last = len(ids_L) - 1
    ends = np.flatnonzero(ids_L[:last] == ids_L[last])
    for back in range(1, max_ngram):
        longer = ends[ends >= back]
        longer = longer[ids_L[longer - back] == ids_L[last - back]]
        if not len(longer):
            break
        ends = longer
    return int(ends[0]) + 1 if len(ends) else last + 1


class PromptLookup(TextDrafter):
    """Drafts chains of at most `num_speculative_tokens` tokens from the prompt and the answer so far."""

    name = "prompt lookup"

    def __init__(self, num_speculative_tokens: int, *, max_ngram: int = MAX_NGRAM) -> None:
        assert num_speculative_tokens >= 1
        assert max_ngram >= 1
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1
        self.max_ngram = max_ngram

    def propose(self, state: DecodeState) -> Draft:
        """Look up every row's last tokens; a row in which they have not occurred before drafts nothing."""
        rows = []
        for text_L, limit in self.read(state):
            start = find_continuation(text_L, self.max_ngram) if limit else len(text_L)
            rows.append(Branches.chain(text_L[start : start + min(self.num_speculative_tokens, limit)].tolist()))
        return pack(state.root_B, rows, linear=True)
