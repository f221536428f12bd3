"""Exact acceptance from one teacher-forced pass (02-algorithms, "Exact acceptance").

Given text that the target produced under the same sampling settings, drafted token x was accepted with
probability min(1, q(x) / p(x)), independently at every position; the recursion below turns these
probabilities into expected rounds. Shapes: S answers, T roots, K speculative tokens, B rows, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.eval.sampling import Sampling, law
from draftsmith.eval.tally import Tally
from draftsmith.heads.base import HeadOutput, StepOutput
from draftsmith.heads.target import TargetHead

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Acceptance:
    """c_BLK: probability that row t's draft of x_{t+2+k} was accepted given the text; NaN where none is drafted.

    off_text: supervised tokens that differ from the target's argmax (temperature 0 only): there the
    text is not what the target would have written, or rounding decided a tie.
    """

    c_BLK: Tensor
    off_text: int


@torch.no_grad()
def chain_acceptance(
    output: HeadOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab_W: Tensor | None,
    sampling: Sampling,
    *,
    greedy_drafts: bool = False,
) -> Acceptance:
    """Turn the logits of a head's training pass into acceptance probabilities of the batch's text.

    greedy_drafts: the draft proposes its argmax at every temperature (as vLLM does by default).
    Raises UserError when the text has probability 0 under the settings: it was not sampled with them.
    """
    rows, length = batch.ids.shape
    c_BLK = torch.full((rows * length, len(output.steps)), torch.nan, dtype=torch.float64, device=batch.ids.device)
    off_text = 0
    for step in output.steps:
        for start in range(0, len(step.rows), _CHUNK_ROWS):
            piece = StepOutput(
                step.offset, step.rows[start : start + _CHUNK_ROWS], step.logits[start : start + _CHUNK_ROWS]
            )
            if sampling.greedy:
                c_R, off = _greedy(piece, batch, draft_vocab_W)
                off_text += off if step.offset == 0 else 0
            else:
                c_R = _sampled(piece, batch, target_head, draft_vocab_W, sampling, greedy_drafts)
            c_BLK[piece.rows, step.offset] = c_R.double()
    return Acceptance(c_BLK.view(rows, length, -1), off_text)


def _to_target_ids(choice_R: Tensor, draft_vocab_W: Tensor | None) -> Tensor:
    return choice_R if draft_vocab_W is None else draft_vocab_W[choice_R]


def _greedy(step: StepOutput, batch: TrainBatch, draft_vocab_W: Tensor | None) -> "tuple[Tensor, int]":
    """c = 1 where the draft's argmax is the text's token; also count tokens that are not the target's argmax."""
    token_R = batch.ids.flatten()[step.rows + 2 + step.offset]
    top1_R = batch.top1.flatten()[step.rows + 1 + step.offset]
    choice_R = _to_target_ids(step.logits.argmax(-1), draft_vocab_W)
    return choice_R == token_R, int((top1_R != token_R).sum())


def _sampled(
    step: StepOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab_W: Tensor | None,
    sampling: Sampling,
    greedy_drafts: bool,
) -> Tensor:
    """c = min(1, q(x) / p(x)) with both laws as the decoder processes them."""
    token_R = batch.ids.flatten()[step.rows + 2 + step.offset]
    p_RV = law(target_head.logits(batch.last.flatten(0, 1)[step.rows + 1 + step.offset]), sampling)
    p_R = p_RV.gather(1, token_R[:, None])[:, 0]
    if bool((p_R <= 0).any()):
        raise UserError(
            f"The text holds a token of probability 0 under {sampling}: it was not sampled from this target with these "
            "settings; simulate with the settings that the answers were made with."
        )
    if greedy_drafts:
        # q is one-hot, so min(1, q/p) is 1 at the draft's argmax and 0 elsewhere.
        return _to_target_ids(step.logits.argmax(-1), draft_vocab_W) == token_R
    q_RW = law(step.logits, sampling)
    if draft_vocab_W is None:
        q_R = q_RW.gather(1, token_R[:, None])[:, 0]
    else:
        column_R = torch.searchsorted(draft_vocab_W, token_R).clamp(max=len(draft_vocab_W) - 1)
        inside_R = draft_vocab_W[column_R] == token_R
        q_R = q_RW.gather(1, column_R[:, None])[:, 0] * inside_R
    return (q_R.double() / p_R.double()).clamp(max=1)


def expected_tallies(c_STK: np.ndarray, tokens_S: np.ndarray, num_speculative_tokens: int) -> list[Tally]:
    """Run the recursion for S answers at once.

    c_STK[s, i, k]: acceptance probability of the k-th draft of a round whose root is the i-th token of
    answer s. tokens_S: n = E - P, tokens after the first. Returns one Tally per answer. Drafts stop at
    the answer's end: K_r = min(K, tokens left).
    """
    answers, longest = c_STK.shape[0], int(tokens_S.max(initial=0))
    visits_ST = np.zeros((answers, longest + 1))
    visits_ST[:, 0] = tokens_S > 0
    accepted_SK = np.zeros((answers, num_speculative_tokens))
    reached_SK = np.zeros((answers, num_speculative_tokens))
    rounds_S, drafted_S = np.zeros(answers), np.zeros(answers)
    index_S = np.arange(answers)
    for root in range(longest):
        left_S = tokens_S - root
        arrive_S = visits_ST[:, root] * (left_S > 0)
        rounds_S += arrive_S
        drafted_S += arrive_S * np.clip(left_S, 0, num_speculative_tokens)
        for k in range(min(num_speculative_tokens, longest - root)):
            here_S = k < left_S
            reach_S = np.where(here_S, arrive_S, 0.0)
            accept_S = reach_S * np.where(here_S, c_STK[:, root, k], 0.0)
            reached_SK[:, k] += reach_S
            accepted_SK[:, k] += accept_S
            visits_ST[:, root + k + 1] += reach_S - accept_S
            arrive_S = np.where(here_S, accept_S, arrive_S)
        # What is left accepted every draft: a bonus token follows, or the answer ended on a draft.
        end_S = np.minimum(root + num_speculative_tokens + 1, np.maximum(tokens_S, 0))
        np.add.at(visits_ST, (index_S, end_S), np.where(left_S > 0, arrive_S, 0.0))
    return [
        Tally(1, float(tokens_S[s]), float(rounds_S[s]), float(drafted_S[s]), accepted_SK[s], reached_SK[s])
        for s in range(answers)
    ]


@dataclass(frozen=True)
class Answer:
    """Where an answer sits in a batch: its row, its document number, and its first and last token."""

    row: int
    document: int
    first: int
    last: int


def find_answers(batch: TrainBatch) -> list[Answer]:
    """Return the runs of supervised tokens within one document, in reading order."""
    mask_BL = batch.mask.cpu().numpy() & (batch.document.cpu().numpy() >= 0)
    document_BL = batch.document.cpu().numpy()
    answers = []
    for row in range(mask_BL.shape[0]):
        mask, document = mask_BL[row], document_BL[row]
        breaks = np.flatnonzero((np.diff(mask.astype(int)) != 0) | (np.diff(document) != 0)) + 1
        bounds = [0, *breaks.tolist(), len(mask)]
        for start, stop in pairwise(bounds):
            # A run that opens its document has no prompt, so its first token came from no prefill.
            if mask[start] and start > 0 and document[start - 1] == document[start]:
                answers.append(Answer(row, int(document[start]), start, stop - 1))
    return answers


def simulate(c_BLK: Tensor, answers: Sequence[Answer], num_speculative_tokens: int) -> list[Tally]:
    """Return the expected tally of every answer for one draft length (any length up to the K of `c_BLK`)."""
    if not answers:
        return []
    c = c_BLK.cpu().numpy()
    tokens_S = np.array([a.last - a.first for a in answers])
    c_STK = np.zeros((len(answers), max(int(tokens_S.max()), 1), num_speculative_tokens))
    for s, a in enumerate(answers):
        # The root x_r is drafted from by row t = r - 1.
        c_STK[s, : a.last - a.first] = c[a.row, a.first - 1 : a.last - 1, :num_speculative_tokens]
    return expected_tallies(c_STK, tokens_S, num_speculative_tokens)
