"""Record what a drafter proposes in each round of decoding, for the checks of heads/conformance/suite.py.

Shapes: B batch rows, b admitted rows, k drafted tokens, N nodes of a tree, M those up to the last with children, W draft
vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.eval.decode.answers import Decoded, Request
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import DecodeState, Draft, Drafter, Prompts
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.heads.target.target import Target

Draw = tuple[Tensor, int]
"""A distribution [W] and the column that was drawn from it."""


@dataclass(frozen=True)
class Drafted:
    """A chain drafted in one round of an answer.

    text: up to the root. tokens: drafted after it. probs_kW: the distributions that they were drawn from, None where
    they were chosen deterministically. vocab_W: the target ids of the columns, None for the target's whole vocabulary.
    """

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    probs_kW: Tensor | None
    vocab_W: Tensor | None

    @property
    def sample(self) -> Tokenized:
        """The text followed by the draft, as a training sample whose first supervised row is the round's."""
        ids = torch.tensor([*self.text, *self.tokens])
        return Tokenized(ids, torch.arange(len(ids)) >= len(self.text) - 1, "", "")

    def draws(self) -> list[Draw]:
        """Return each token's distribution and the column that was drawn from it."""
        assert self.probs_kW is not None
        return [
            (probs_W, _column(self.vocab_W, token)) for probs_W, token in zip(self.probs_kW, self.tokens, strict=True)
        ]


@dataclass(frozen=True)
class DraftedTree:
    """A tree drawn in one round of an answer.

    text: up to the root. tokens, parents: of the nodes; node 0 is the root. probs_MW: the distribution that each node's
    children were drawn from. vocab_W: the target ids of the columns, None for the target's whole vocabulary.
    """

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs_MW: Tensor
    vocab_W: Tensor | None

    def draws(self) -> list[Draw]:
        """Return, for every node but the root, the distribution without its earlier siblings, and the column drawn from
        it. Children drawn when no probability was left are never accepted, and are left out."""
        found = []
        for node in range(len(self.probs_MW)):
            left_W = self.probs_MW[node].double()
            for child in self._children(node):
                if float(left_W.sum()) < 1e-4:
                    break
                column = _column(self.vocab_W, self.tokens[child])
                left_W = left_W / left_W.sum()
                found.append((left_W, column))
                left_W = left_W.index_fill(0, torch.tensor(column), 0.0)
        return found

    def branches(self) -> list[Drafted]:
        """Return each path from the root to a leaf as a chain."""
        chains = []
        for leaf in range(1, len(self.tokens)):
            if self._children(leaf):
                continue
            path = [leaf]
            while self.parents[path[0]] > 0:
                path.insert(0, self.parents[path[0]])
            above = [self.parents[node] for node in path]
            chains.append(
                Drafted(self.text, tuple(self.tokens[node] for node in path), self.probs_MW[above], self.vocab_W)
            )
        return chains

    def _children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


def _column(vocab_W: Tensor | None, token: int) -> int:
    return token if vocab_W is None else int(torch.searchsorted(vocab_W.cpu(), token))


class Recorder:
    """A drafter that passes on another one's drafts and keeps them, row by row, per prompt."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.layer_ids, self.max_nodes = drafter.name, drafter.layer_ids, drafter.max_nodes
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.found: dict[tuple[int, ...], list[Draft]] = {}
        self._prompts: list[tuple[int, ...]] = []

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch."""
        self._prompts = [()] * rows
        self.drafter.start(rows, capacity)

    def admit(self, prompts: Prompts) -> None:
        """Remember which prompts take which rows."""
        for row, ids, length in zip(prompts.rows_b.tolist(), prompts.ids_bL, prompts.length_b, strict=True):
            self._prompts[row] = tuple(ids[: int(length)].tolist())
        self.drafter.admit(prompts)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._prompts = [self._prompts[row] for row in rows.tolist()]
        self.drafter.select(rows)

    def propose(self, state: DecodeState) -> Draft:
        """Keep the draft of every row, without its padding."""
        draft = self.drafter.propose(state)
        for row, prompt in enumerate(self._prompts):
            nodes = int(draft.count_B[row])
            draft_probs = None if draft.draft_probs_BMW is None else draft.draft_probs_BMW[row : row + 1].float().cpu()
            tokens, parents = (x[row : row + 1, :nodes].cpu() for x in (draft.tokens_BN, draft.parents_BN))
            kept = Draft(tokens, parents, torch.tensor([nodes]), draft_probs, draft.vocab_W, linear=draft.is_chain)
            self.found.setdefault(prompt, []).append(kept)
        return draft


def record(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None = None
) -> tuple[Decoded, list[list[Drafted]]]:
    """Answer `requests`, whose prompts differ, with chains; return the answers and the rounds of each."""
    decoded, answers = _record(target, drafter, requests, sampling, rows)
    chains: list[list[Drafted]] = []
    for answer in answers:
        chains.append([])
        for text, draft in answer:
            if not draft.is_chain:
                raise AssertionError(f"{drafter.name} drafts no chain although it was given no tree.")
            tokens = tuple(draft.tokens_BN[0, 1:].tolist())
            draft_probs = None if draft.draft_probs_BMW is None else draft.draft_probs_BMW[0, : len(tokens)]
            chains[-1].append(Drafted(text, tokens, draft_probs, draft.vocab_W))
    return decoded, chains


def record_trees(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None = None
) -> list[DraftedTree]:
    """Answer `requests`, whose prompts differ, with drawn trees; return the trees that have more nodes than the
    root."""
    trees = []
    for text, draft in (found for answer in _record(target, drafter, requests, sampling, rows)[1] for found in answer):
        tokens, parents = (tuple(x[0].tolist()) for x in (draft.tokens_BN, draft.parents_BN))
        if draft.draft_probs_BMW is None:
            raise AssertionError(
                f"The drawn trees of {drafter.name} do not name the probabilities that they are drawn from."
            )
        if len(tokens) > 1:
            trees.append(DraftedTree(text, tokens, parents, draft.draft_probs_BMW[0], draft.vocab_W))
    return trees


def _record(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None
) -> tuple[Decoded, list[list[tuple[tuple[int, ...], Draft]]]]:
    """Return the answers, and for each round of each the text up to the root and the row's draft."""
    recorder = Recorder(drafter)
    decoded = decode_batch(target, recorder, requests, sampling, rows=rows)
    answers = []
    for generation in decoded.generations:
        prompt = generation.request.prompt_ids
        text = (*prompt, *generation.output_ids)
        # Finished rows go on drafting for a while; those drafts are not used.
        rounds = zip(generation.rounds, recorder.found.get(prompt, ()), strict=False)
        answers.append([(text[: len(prompt) + r.root + 1], draft) for r, draft in rounds])
    return decoded, answers
