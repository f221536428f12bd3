"""Lookahead decoding: the target itself guesses n-grams in the pass that verifies those it guessed before; nothing is trained.

Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024), section 3. Beside
the draft the target reads a window of W columns and N - 1 rows, guesses of the tokens that lie ahead (the lookahead branch):

    row 0       x        g(0,1)   g(0,2)  ...     x is the last token of the text, which stands in column 0
    row 1       g(1,0)   g(1,1)   g(1,2)  ...     g(r,c) stands r + c tokens behind x
    ...

g(r,c) sees the text, row 0 up to column c, and its own column above it. So the window is a tree: row 0 is a branch at whose
nodes the columns hang. The most likely tokens behind its last row complete W n-grams, column by column, and are the last row
of the next window, in which all others have moved up. N-grams go into a pool by their first token; those of the pool that
begin with x are the draft (the verification branch). It is verified as any other tree: greedily, and in sampling with the same
distribution of accepted tokens as the paper's, which tries one guess after the other. As in the authors' code the window moves
on by one token a pass, however many are accepted.

Shapes: B rows of the batch, L tokens of a text, N nodes, V target vocab, W columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from draftsmith.decoder.draft import DecodeState, Draft, Prompts
from draftsmith.decoder.drafters.texts import Branches, TextDrafter, pack
from draftsmith.decoder.sampling import DRAFT, top1, uniforms

Ngram = tuple[int, ...]


class Pool:
    """The n-grams of one request, at most `guesses` for each first token: the latest ones."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._by_first: dict[int, dict[Ngram, None]] = {}

    def add(self, ngram: Ngram) -> None:
        """Add an n-gram; where there are too many, the one that was added the longest time ago goes."""
        known = self._by_first.setdefault(ngram[0], {})
        known.pop(ngram[1:], None)
        known[ngram[1:]] = None
        if len(known) > self._guesses:
            del known[next(iter(known))]

    def draft(self, first: int, most: int) -> Branches:
        """Return the n-grams that begin with `first`, up to `most` tokens behind it, as one tree in which each path stands
        once."""
        branches = Branches()
        nodes: dict[Ngram, int] = {(): 0}
        for ngram in self._by_first.get(first, ()):
            for end in range(1, min(len(ngram), most) + 1):
                if (path := ngram[:end]) not in nodes:
                    branches.tokens.append(path[-1])
                    branches.parents.append(nodes[path[:-1]])
                    nodes[path] = len(branches.tokens)
        return branches


@dataclass
class _Request:
    """What one row remembers. rows: the window, [N - 1][W], empty before the first draft."""

    pool: Pool
    rows: list[list[int]] = field(default_factory=list)


class Lookahead(TextDrafter):
    """Drafts the n-grams of the pool that begin with the last token.

    W: columns of the window. N: tokens of an n-gram, the first one included. G: most n-grams that are verified at once.
    """

    name = "lookahead"
    _requests: list[_Request]

    def __init__(self, W: int, N: int, G: int) -> None:
        assert W >= 1
        assert N >= 2
        assert G >= 1
        self.W, self.N, self.G = W, N, G
        self.max_nodes = most_nodes(W, N, G)
        # The window reaches further ahead than the draft.
        self.num_speculative_tokens = max(N - 1, W + N - 3)

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the texts and forget all requests."""
        super().start(rows, capacity)
        self._requests = [_Request(Pool(self.G)) for _ in range(rows)]

    def admit(self, prompts: Prompts) -> None:
        """Store the prompts; their windows begin with the rows' next proposal."""
        super().admit(prompts)
        for row in prompts.rows_b.tolist():
            self._requests[row] = _Request(Pool(self.G))

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        super().select(rows)
        self._requests = [self._requests[row] for row in rows.tolist()]

    def propose(self, state: DecodeState) -> Draft:
        """Draft from the pools, and lay the windows behind the drafts, where nothing is accepted."""
        texts = self.read(state)
        if not all(request.rows for request in self._requests):
            # The windows of new requests hold tokens of their texts, at random as in the authors' code.
            chance_BW = uniforms(state.keys_B, state.length_B, DRAFT, self.W * (self.N - 1)).tolist()
            for request, (text_L, _), chances in zip(self._requests, texts, chance_BW, strict=True):
                if not request.rows:
                    drawn = [int(text_L[int(chance * len(text_L))]) for chance in chances]
                    request.rows = [drawn[start : start + self.W] for start in range(0, len(drawn), self.W)]
        branches, windows, active = [], [], []
        for request, (text_L, limit) in zip(self._requests, texts, strict=True):
            request.rows[0][0] = root = int(text_L[-1])
            branches.append(request.pool.draft(root, min(self.N - 1, limit)))
            windows.append([token for row in request.rows for token in row][1:])
            active.append(request if limit else None)
        draft, device = pack(state.root_B, branches, linear=False), state.root_B.device
        # The window's nodes row by row, the first of which is the root.
        nodes = [0, *range(draft.tokens_BN.shape[1], draft.tokens_BN.shape[1] + len(windows[0]))]
        above = [nodes[i - (1 if i < self.W else self.W)] for i in range(1, len(nodes))]
        windows_BN = torch.tensor(windows, dtype=torch.long, device=device)
        above_BN = torch.tensor(above, dtype=torch.long, device=device).expand_as(windows_BN)
        return replace(
            draft,
            tokens_BN=torch.cat([draft.tokens_BN, windows_BN], 1),
            parents_BN=torch.cat([draft.parents_BN, above_BN], 1),
            listen=partial(self._listen, active, torch.tensor(nodes[-self.W :], device=device)),
        )

    @staticmethod
    def _listen(active: Sequence[_Request | None], node_W: Tensor, logits_BNV: Tensor) -> None:
        """Complete the n-grams with the most likely tokens behind the window's last row, and move the rows up."""
        chosen_BW = top1(logits_BNV[:, node_W])[1].tolist()
        for request, chosen in zip(active, chosen_BW, strict=True):
            if request is not None:
                for ngram in zip(*request.rows, chosen, strict=True):
                    request.pool.add(ngram)
                request.rows = [*request.rows[1:], chosen]


def most_nodes(W: int, N: int, G: int) -> int:
    """Return the most tokens of a pass: the draft, and the window with the root in it."""
    return (G + W) * (N - 1)
