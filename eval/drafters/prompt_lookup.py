"""Prompt lookup: propose the tokens that followed the last few tokens where they occurred before; nothing is trained.

Saxena, "Prompt Lookup Decoding" (2023). The first of several occurrences is taken, as in transformers
(`prompt_lookup_num_tokens`) and vLLM (method "ngram"), so that results carry over to them.

Shapes: B rows, n new tokens, L tokens of a text, T roots, K drafted tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.decode.answers import Generation
from draftsmith.eval.decode.draft import DecodeState, Draft, Prompts
from draftsmith.eval.simulate.acceptance import expected_tallies
from draftsmith.eval.simulate.texts import Simulation

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


class PromptLookup:
    """Drafts chains of at most `num_speculative_tokens` tokens from the prompt and the answer so far."""

    name = "prompt lookup"
    layer_ids: tuple[int, ...] = ()
    _texts_BL: np.ndarray

    def __init__(self, num_speculative_tokens: int, *, max_ngram: int = MAX_NGRAM) -> None:
        assert num_speculative_tokens >= 1
        assert max_ngram >= 1
        self.num_speculative_tokens = num_speculative_tokens
        self.max_nodes = num_speculative_tokens + 1
        self.max_ngram = max_ngram

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

    def propose(self, state: DecodeState) -> Draft:
        """Look up every row's last tokens; a row in which they have not occurred before drafts nothing."""
        new_tokens = state.new_tokens
        counts_B3 = torch.stack([state.length_B, new_tokens.count_B, state.limit_B], 1)
        host = torch.cat([counts_B3, new_tokens.tokens_Bn], 1).cpu().numpy()
        found = [self._look_up(text_L, row) for text_L, row in zip(self._texts_BL, host, strict=True)]
        drafted_BK = np.zeros((len(found), max(map(len, found))), dtype=np.int64)
        for row_K, tokens in zip(drafted_BK, found, strict=True):
            row_K[: len(tokens)] = tokens
        device = state.root_B.device
        count_B = torch.tensor([len(tokens) for tokens in found], device=device)
        return Draft.chain(state.root_B, torch.from_numpy(drafted_BK).to(device), count_B)

    def _look_up(self, text_L: np.ndarray, host: np.ndarray) -> np.ndarray:
        """Store a row's new tokens; return the proposal. host: its length, number of new tokens, limit, new tokens."""
        length, new_tokens, limit = host[:3]
        # The last new token is the root, at position `length`.
        text_L[length + 1 - new_tokens : length + 1] = host[3 : 3 + new_tokens]
        most = min(self.num_speculative_tokens, limit)
        if not new_tokens or most <= 0:
            return text_L[:0]
        known_L = text_L[: length + 1]
        start = find_continuation(known_L, self.max_ngram)
        return known_L[start : start + most]


def simulate_prompt_lookup(generations: Sequence[Generation], max_k: int, *, max_ngram: int = MAX_NGRAM) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers; the text alone decides, at any temperature, what
    was proposed and what was accepted."""
    tallies = []
    for generation in generations:
        prompt = generation.request.prompt_ids
        ids_L, first = np.array([*prompt, *generation.output_ids]), len(prompt)
        tokens = len(generation.output_ids) - 1
        c_TK = np.full((max(tokens, 1), max_k), np.nan)
        for root in range(tokens):
            known_L = ids_L[: first + root + 1]
            start = find_continuation(known_L, max_ngram)
            drafted_K = known_L[start : start + min(max_k, tokens - root)]
            c_TK[root, : len(drafted_K)] = drafted_K == ids_L[len(known_L) : len(known_L) + len(drafted_K)]
        lengths = range(1, max_k + 1)
        tallies.append([expected_tallies(c_TK[None], np.array([tokens]), k)[0] for k in lengths])
    return Simulation(tallies, off_text=0)
