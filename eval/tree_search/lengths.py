"""Search where a chain should end: floors of a `LengthRule` with which a head's drafts are fastest at a machine's costs.

A round that drafts n tokens takes draft(n) + pass(n + 1) milliseconds and gives 1 + c_1 + c_1 c_2 + ... tokens, all of which is known of
finished answers: their tokens, and the head's own estimates before each. So the speed of any floors follows without decoding, and each
floor is moved to the best of a few places in turn until none moves. A draft of one length is a special case, and where it begins. What
a draft is after a token that was rejected is not in the text; it is taken to go on as far as one that was not.

Shapes: S answers, T roots of the longest one, K tokens of a draft, R rows that a step drafts from, B rows of a batch, L tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.acceptance import acceptance, chances, expected_tallies, find_answers
from draftsmith.eval.simulate.texts import target_passes
from draftsmith.eval.tree_search.search import FOLDS, folds
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.progress import Bar
from draftsmith.target.target import Target

NEVER = 2.0
"""A floor that no chance reaches."""
_PLACES = 12
"""Places of a floor that are tried: shares of the rounds that end there."""
_SWEEPS = 3


@dataclass(frozen=True)
class TextChances:
    """What drafts from every token of some answers would bring.

    accepted_STK: the chance that the k-th token behind a root is accepted, given those before it; NaN behind the answer's end.
    score_STK: the head's own estimate that it is reached and accepted. tokens_S: tokens after an answer's first. slices, conversations: of
    each answer.
    """

    accepted_STK: np.ndarray
    score_STK: np.ndarray
    tokens_S: np.ndarray
    slices: tuple[str, ...]
    conversations: tuple[str, ...]

    def some(self, chosen_S: np.ndarray) -> "TextChances":
        """Return the answers that `chosen_S` (bool) marks."""
        slices, conversations = (tuple(compress(of, chosen_S)) for of in (self.slices, self.conversations))
        accepted_STK, score_STK, tokens_S = (of[chosen_S] for of in (self.accepted_STK, self.score_STK, self.tokens_S))
        return TextChances(accepted_STK, score_STK, tokens_S, slices, conversations)

    def spent(self, floors: Sequence[float], cost: Callable[[np.ndarray], np.ndarray]) -> "Spent":
        """Return what every answer takes with these floors. cost: of rounds that draft so many tokens, in ms."""
        ended_STK = (self.score_STK < np.array(floors)).cumsum(2) > 0
        accepted_STK = np.where(ended_STK, np.nan, self.accepted_STK)
        drafted_ST = (~np.isnan(accepted_STK)).sum(2)
        rounds_ST = np.zeros(drafted_ST.shape)
        for row, tally in enumerate(expected_tallies(accepted_STK, self.tokens_S, len(floors))):
            assert tally.rounds_T is not None
            rounds_ST[row, : len(tally.rounds_T)] = tally.rounds_T
        of_S = (rounds_ST.sum(1), (rounds_ST * drafted_ST).sum(1), (rounds_ST * cost(drafted_ST)).sum(1))
        return Spent(self.tokens_S.astype(float), *of_S)


@dataclass(frozen=True)
class Spent:
    """Tokens, rounds, drafted tokens and milliseconds of each answer."""

    tokens_S: np.ndarray
    rounds_S: np.ndarray
    drafted_S: np.ndarray
    ms_S: np.ndarray

    def some(self, chosen_S: np.ndarray) -> "Spent":
        """Return the answers that `chosen_S` (bool) marks."""
        return Spent(*(of_S[chosen_S] for of_S in (self.tokens_S, self.rounds_S, self.drafted_S, self.ms_S)))

    @property
    def tau(self) -> float:
        """Tokens of a round."""
        return float(self.tokens_S.sum() / self.rounds_S.sum())

    @property
    def drafted(self) -> float:
        """Drafted tokens of a round."""
        return float(self.drafted_S.sum() / self.rounds_S.sum())

    @property
    def ms(self) -> float:
        """Milliseconds of a token."""
        return float(self.ms_S.sum() / self.tokens_S.sum())


@torch.no_grad()
def read_chances(
    target: Target, head: DraftHead, samples: Sequence[Tokenized], depth: int, sampling: Sampling
) -> TextChances:
    """Run the target and the head over texts of the target's; drafts of `depth` tokens from every place of their answers."""
    found, slices, conversations = list[tuple[np.ndarray, np.ndarray]](), list[str](), list[str]()
    ordered = sorted(samples, key=lambda sample: len(sample.ids))
    for indices, batch in target_passes(target, ordered, head.reads.layer_ids):
        with drafting(head):
            output = head(batch, depth)
            accepted_BLK = acceptance(output, batch, target.head, head.draft_vocab, sampling).c_BLK
            score_BLK = torch.ones_like(accepted_BLK)
            for step in output.steps:
                for piece in torch.arange(len(step.rows), device=score_BLK.device).split(1024):
                    chance_R = chances(step, piece, step.logits_of(piece), LengthRule(()))
                    score_BLK.flatten(0, 1)[step.rows[piece], step.offset] = chance_R.double()
        for answer in find_answers(batch):
            sample = ordered[indices[answer.row]]
            # The root x_r is drafted from by row t = r - 1.
            place = (answer.row, slice(answer.first - 1, answer.last - 1))
            found.append((accepted_BLK[place].cpu().numpy(), score_BLK[place].cumprod(1).cpu().numpy()))
            slices.append(sample.slice)
            conversations.append(sample.conversation or sample.sample_id)
    tokens_S = np.array([len(accepted_TK) for accepted_TK, _ in found])
    accepted_STK = np.full((len(found), max(1, tokens_S.max(initial=0)), depth), np.nan)
    score_STK = np.zeros_like(accepted_STK)
    for row, (accepted_TK, score_TK) in enumerate(found):
        accepted_STK[row, : len(accepted_TK)], score_STK[row, : len(score_TK)] = accepted_TK, score_TK
    return TextChances(accepted_STK, score_STK, tokens_S, tuple(slices), tuple(conversations))


def fixed(k: int, depth: int) -> tuple[float, ...]:
    """Return the floors of drafts of k tokens, of at most `depth`."""
    return (0.0,) * k + (NEVER,) * (depth - k)


def search_floors(texts: TextChances, cost: Callable[[np.ndarray], np.ndarray]) -> tuple[float, ...]:
    """Return the floors with which the texts take the fewest milliseconds. cost: see `TextChances.spent`."""
    depth = texts.score_STK.shape[2]
    best_ms, best = min(
        (texts.spent(floors, cost).ms, floors) for k in range(1, depth + 1) for floors in [fixed(k, depth)]
    )
    # A place that no round reaches at these floors says nothing of the next one's, so scores of all places count.
    inside_STK = ~np.isnan(texts.accepted_STK)
    # None where every answer ends before.
    scores_K = [texts.score_STK[..., k][inside_STK[..., k]] for k in range(depth)]
    places_K = [np.quantile(one, np.arange(_PLACES) / _PLACES) if len(one) else one for one in scores_K]
    for _ in range(_SWEEPS):
        before = best
        for k in range(depth):
            for floor in (*places_K[k].tolist(), NEVER):
                floors = (*best[:k], round(floor, 4), *best[k + 1 :])
                if (ms := texts.spent(floors, cost).ms) < best_ms:
                    best_ms, best = ms, floors
        if best == before:
            break
    return best


def find_floors(texts: TextChances, cost: Callable[[np.ndarray], np.ndarray]) -> tuple[tuple[float, ...], Spent]:
    """Return the floors of all answers, and what each answer takes with floors that were searched on the other folds' answers. Shows a
    bar. Raises UserError for too few answers."""
    fold_S, whole = folds(texts.conversations, texts.tokens_S), np.zeros((4, len(texts.tokens_S)))
    floors: tuple[float, ...] = ()
    for fold in Bar(range(FOLDS + 1), desc="search-tree: floors", unit="search"):
        inside_S = fold_S == fold  # of the last one none
        floors = search_floors(texts.some(~inside_S), cost)
        if fold < FOLDS:
            spent = texts.some(inside_S).spent(floors, cost)
            whole[:, inside_S] = (spent.tokens_S, spent.rounds_S, spent.drafted_S, spent.ms_S)
    return floors, Spent(*whole)
