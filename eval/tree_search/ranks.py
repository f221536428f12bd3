"""Rank the tokens of answers among a head's predictions, which decide the tau of every static tree.

Shapes: S answers, T roots of the longest one, R supervised rows (flat b*L+t), D depth, B rows, L tokens, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch

from draftsmith.data.batch import Tokenized
from draftsmith.eval.simulate.acceptance import find_answers, token_ranks
from draftsmith.eval.simulate.texts import target_passes
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.target.target import Target


@dataclass(frozen=True)
class TextRanks:
    """The ranks of answers' tokens.

    ranks_STD[s, r, d]: in a round whose root is the r-th token of answer s, the rank of the token d + 1 places after the
    root in the head's step d, 0 for the most likely; `most` where it is not among the first `most`, -1 past the answer's
    end. tokens_S: tokens after an answer's first. conversations: that of each answer.
    """

    ranks_STD: np.ndarray
    tokens_S: np.ndarray
    conversations: tuple[str, ...]
    most: int

    @classmethod
    def of(cls, answers: Sequence[np.ndarray], conversations: Sequence[str], most: int) -> "TextRanks":
        """Gather the ranks [tokens, D] of every answer."""
        tokens_S = np.array([len(answer) for answer in answers])
        ranks_STD = np.full((len(answers), max(1, tokens_S.max()), answers[0].shape[1]), -1, dtype=np.int16)
        for row, answer in enumerate(answers):
            ranks_STD[row, : len(answer)] = answer
        return cls(ranks_STD, tokens_S, tuple(conversations), most)

    @property
    def depth(self) -> int:
        """Steps of the head."""
        return self.ranks_STD.shape[2]

    @property
    def answers(self) -> int:
        """Answers of more than one token: those that drafts are made for."""
        return int((self.tokens_S > 0).sum())

    @property
    def places(self) -> int:
        """Where a round may begin."""
        return int(self.tokens_S.sum())

    @property
    def roots_ST(self) -> np.ndarray:
        """True where a round may begin."""
        return np.arange(self.ranks_STD.shape[1]) < self.tokens_S[:, None]

    def some(self, chosen_S: np.ndarray) -> "TextRanks":
        """Return the answers that `chosen_S` (bool) marks."""
        conversations = tuple(compress(self.conversations, chosen_S))
        return TextRanks(self.ranks_STD[chosen_S], self.tokens_S[chosen_S], conversations, self.most)

    def cut(self, depth: int) -> "TextRanks":
        """Return the same for drafts of at most `depth` tokens."""
        return replace(self, ranks_STD=self.ranks_STD[:, :, :depth])


@torch.no_grad()
def read_ranks(target: Target, head: DraftHead, samples: Sequence[Tokenized], depth: int, most: int) -> TextRanks:
    """Run the target and the head over `samples` and return the ranks of their answers' tokens in steps 0..depth-1."""
    ordered = sorted(samples, key=lambda sample: len(sample.ids))
    ranks, conversations = [], []
    for indices, batch in target_passes(target, ordered, head.reads.layer_ids):
        with drafting(head):
            output = head(batch, depth)
        ranks_BLD = token_ranks(output, batch, head.draft_vocab, most).cpu().numpy()
        for answer in find_answers(batch):
            # The root x_r is drafted from by row t = r - 1.
            ranks.append(ranks_BLD[answer.row, answer.first - 1 : answer.last - 1])
            conversations.append(conversation_of(ordered[indices[answer.row]].sample_id))
    return TextRanks.of(ranks, conversations, most)


def conversation_of(sample_id: str) -> str:
    """Return the conversation that a sample belongs to: its turns are named `<id>#1`, `<id>#2`, ..."""
    stem, mark, turn = sample_id.rpartition("#")
    return stem if mark and turn.isdigit() else sample_id
