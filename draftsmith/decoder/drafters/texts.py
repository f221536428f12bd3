"""Drafters that read texts on the host: what they share, and prompt lookup, which proposes the tokens that followed the
last few tokens where they occurred before.

Saxena, "Prompt Lookup Decoding" (2023). The first of several occurrences is taken, as in transformers
(`prompt_lookup_num_tokens`) and vLLM (method "ngram"), so that results carry over to them.

Shapes: B rows, L tokens of a text, N nodes of a draft, K drafted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, Prompts

MAX_NGRAM = 3
"""Longest suffix that prompt lookup looks up."""


@dataclass(frozen=True)
class Branches:
    """The drafted tokens of one row. parents: the number of each token's parent, where 0 is the root and i the i-th token;
    parents come before their children. score: the sum of the tokens' probabilities, where a drafter compares drafts by it."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = field(default=0.0, compare=False)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "Branches":
        """One token after the other."""
        return cls([*tokens], [*range(len(tokens))])

    @property
    def depths(self) -> list[int]:
        """The depth of each token, at least 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]

    def followed(self, text: Sequence[int]) -> int:
        """Return how many tokens of `text` the branches hold from the root on."""
        children = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True), 1)}
        node = 0
        for depth, token in enumerate(text):
            if (node, token) not in children:
                return depth
            node = children[node, token]
        return len(text)


def pack(root_B: Tensor, rows: Sequence[Branches], *, linear: bool) -> Draft:
    """Return the draft of all rows. linear: whether all are chains."""
    longest = max(len(row.tokens) for row in rows)
    padding = [*range(longest)] if linear else [0] * longest
    tokens = [[*row.tokens, *[0] * (longest - len(row.tokens))] for row in rows]
    parents = [[-1, *row.parents, *padding[len(row.parents) :]] for row in rows]
    tokens_BK = torch.tensor(tokens, dtype=torch.long, device=root_B.device)
    parents_BN = torch.tensor(parents, device=root_B.device)
    nodes_B = torch.tensor([1 + len(row.tokens) for row in rows], device=root_B.device)
    depth = longest if linear else max((depth for row in rows for depth in row.depths), default=0)
    return Draft(torch.cat([root_B[:, None], tokens_BK], 1), parents_BN, nodes_B, linear=linear, depth=depth)


class TextDrafter:
    """The base of drafters that read the texts of their rows on the host."""

    layer_ids: tuple[int, ...] = ()
    max_nodes: int
    _texts_BL: np.ndarray

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the texts; position p of a text is its token p."""
        self._texts_BL = np.zeros((rows, capacity + self.max_nodes), dtype=np.int64)

    def admit(self, prompts: Prompts) -> None:
        """Store the prompts; the token after each comes with the row's next proposal."""
        rows = prompts.rows_b.cpu().numpy()
        self._texts_BL[rows, : prompts.ids_bL.shape[1]] = prompts.ids_bL.cpu().numpy()

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._texts_BL = self._texts_BL[rows.cpu().numpy()]

    def read(self, state: DecodeState) -> list[tuple[np.ndarray, int]]:
        """Store the new tokens; return every row's text up to its root, and how many tokens it may draft: 0 where it is
        finished."""
        new_tokens = state.new_tokens
        counts_B3 = torch.stack([state.length_B, new_tokens.count_B, state.limit_B], 1)
        host = torch.cat([counts_B3, new_tokens.tokens_Bn], 1).cpu().numpy()
        texts = []
        for text_L, (length, count, limit, *tokens) in zip(self._texts_BL, host, strict=True):
            # The last new token is the root, at position `length`.
            if count <= length + 1:  # else a finished one, which ends within what was accepted
                text_L[length + 1 - count : length + 1] = tokens[:count]
            texts.append((text_L[: length + 1], max(0, int(limit)) if count else 0))
        return texts


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
