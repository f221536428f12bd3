"""Rank the tokens of answers among a head's predictions, which decide the tau of every static tree.

Shapes: S answers, T roots of the longest one, R supervised rows (flat b*L+t), D depth, B rows, L tokens, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized, TrainBatch
from draftsmith.data.features.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.eval.simulate.acceptance import find_answers
from draftsmith.heads.base import DraftHead, HeadOutput, drafting
from draftsmith.heads.target.target import Target

_SAMPLES_PER_PASS = 8
_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class TextRanks:
    """The ranks of answers' tokens.

    ranks_STD[s, r, d]: in a round whose root is the r-th token of answer s, the rank of the token d + 1 places after the
    root in the head's step d, 0 for the most likely; `most` where it is not among the first `most`, -1 past the answer's
    end. tokens_S: tokens after an answer's first. talks: the conversation of each answer.
    """

    ranks_STD: np.ndarray
    tokens_S: np.ndarray
    talks: tuple[str, ...]
    most: int

    @classmethod
    def of(cls, answers: Sequence[np.ndarray], talks: Sequence[str], most: int) -> "TextRanks":
        """Gather the ranks [tokens, D] of every answer."""
        tokens_S = np.array([len(answer) for answer in answers])
        ranks_STD = np.full((len(answers), max(1, tokens_S.max()), answers[0].shape[1]), -1, dtype=np.int16)
        for place, answer in enumerate(answers):
            ranks_STD[place, : len(answer)] = answer
        return cls(ranks_STD, tokens_S, tuple(talks), most)

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
        talks = tuple(talk for talk, chosen in zip(self.talks, chosen_S, strict=True) if chosen)
        return TextRanks(self.ranks_STD[chosen_S], self.tokens_S[chosen_S], talks, self.most)

    def cut(self, depth: int) -> "TextRanks":
        """Return the same for drafts of at most `depth` tokens."""
        return TextRanks(self.ranks_STD[:, :, :depth], self.tokens_S, self.talks, self.most)


@torch.no_grad()
def read_ranks(target: Target, head: DraftHead, samples: Sequence[Tokenized], depth: int, most: int) -> TextRanks:
    """Run the target and the head over `samples` and return the ranks of their answers' tokens in steps 0..depth-1."""
    ordered = sorted(samples, key=lambda sample: len(sample.ids))
    found, talks = [], []
    for start in range(0, len(ordered), _SAMPLES_PER_PASS):
        some = ordered[start : start + _SAMPLES_PER_PASS]
        features = compute_features(target, some, head.reads.layer_ids, target.dtype)
        batch = collate([[f] for f in features], max(len(s.ids) for s in some)).to(target.device)
        with drafting(head):
            output = head(batch, depth)
        ranks_BLD = token_ranks(output, batch, head.draft_vocab, most).cpu().numpy()
        for answer in find_answers(batch):
            # The root x_r is drafted from by row t = r - 1.
            found.append(ranks_BLD[answer.row, answer.first - 1 : answer.last - 1])
            talks.append(talk_of(some[answer.row].sample_id))
    return TextRanks.of(found, talks, most)


def token_ranks(output: HeadOutput, batch: TrainBatch, draft_vocab_W: Tensor | None, most: int) -> Tensor:
    """Return [B, L, D]: the rank of x_{t+2+k} in step k's logits of row t (see `TextRanks`), -1 where none is drafted."""
    ids = batch.ids.flatten()
    ranks = torch.full((len(ids), len(output.steps)), -1, dtype=torch.int16, device=ids.device)
    for step in output.steps:
        for piece in torch.arange(len(step.rows), device=ids.device).split(_CHUNK_ROWS):
            at, logits_RW = step.rows[piece], step.logits_of(piece)
            best_RM = logits_RW.topk(min(most, logits_RW.shape[-1]), -1).indices
            best_RM = best_RM if draft_vocab_W is None else draft_vocab_W[best_RM]
            hit_RM = best_RM == ids[at + 2 + step.offset][:, None]
            rank_R = torch.where(hit_RM.any(1), hit_RM.int().argmax(1), most)
            ranks[at, step.offset] = rank_R.to(ranks.dtype)
    return ranks.view(*batch.ids.shape, -1)


def talk_of(sample_id: str) -> str:
    """Return the conversation that a sample belongs to: its turns are named `<id>#1`, `<id>#2`, ..."""
    stem, mark, turn = sample_id.rpartition("#")
    return stem if mark and turn.isdigit() else sample_id
