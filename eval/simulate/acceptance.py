"""Compute exact acceptance from one teacher-forced pass over finished answers (docs/algorithms.md, "Exact acceptance").

Given text that the target produced under the same sampling settings, the draft of its token x was accepted with
probability min(1, q(x) / p(x)), independently at every position. `expected_tallies` turns these probabilities into
expected rounds.

Shapes: S answers, T roots, K speculative tokens, B rows, L tokens, R rows of the flat [B*L] that are looked at, N tree
nodes, V target vocab, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import Tally
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling, penalize, probs
from draftsmith.decoder.trees import StaticTree
from draftsmith.decoder.verify import look_up
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, StepOutput, accepted
from draftsmith.target.target import TargetHead

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Acceptance:
    """Acceptance probabilities of a text's drafts.

    c_BLK: probability that row t's draft of x_{t+2+k} was accepted given the text; NaN where none is drafted.
    off_text: supervised tokens that the target would not choose in this pass: at temperature 0 not its argmax, above it
    outside its top-k, top-p or min-p set. A few come from rounding; many mean that the text is not the target's.
    nodes_BLK: tokens that row t drafts at each depth of a tree that is another in every row; None where all draft alike.
    """

    c_BLK: Tensor
    off_text: int
    nodes_BLK: Tensor | None = None


@torch.no_grad()
def acceptance(
    output: HeadOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab_W: Tensor | None,
    sampling: Sampling,
    *,
    tree: StaticTree | None = None,
    greedy_drafts: bool = False,
    rule: LengthRule | None = None,
) -> Acceptance:
    """Return the acceptance probabilities of the batch's text from the logits of a head's training pass.

    tree: a static tree instead of a chain; c[t, k] is then 1 where the text follows the tree from row t's root down to
    depth k + 1, else 0. greedy_drafts: a chain's tokens are the draft's argmax at every temperature (as vLLM drafts by
    default). rule: a chain ends where it says. Raises UserError when the text has probability 0 under the settings: it was not sampled with them.
    """
    if tree is not None:
        return _follow_tree(output, batch, target_head, draft_vocab_W, sampling, tree)
    if output.tuned is not None:
        return _tuned_acceptance(output, batch, sampling, greedy_drafts, rule)
    ids = batch.ids.flatten()
    c = torch.full((len(ids), len(output.steps)), torch.nan, dtype=torch.float64, device=ids.device)
    # Position t + 1 + k of step k is position t' + 1 of some step-0 row t', so step 0 covers them all.
    positions = output.steps[0].rows + 1
    p, off_text = text_probs(batch, target_head, positions, sampling)
    reached = torch.ones_like(c[:, 0], dtype=torch.float32)
    for step in output.steps:
        for piece in torch.arange(len(step.rows), device=ids.device).split(_CHUNK_ROWS):
            at, logits_RW = step.rows[piece], check_drafted(step.logits_of(piece))
            token_R = ids[at + 2 + step.offset]
            if p is None or greedy_drafts:
                # A deterministic draft is accepted exactly where the text has its token.
                choice_R = logits_RW.argmax(-1)
                choice_R = choice_R if draft_vocab_W is None else draft_vocab_W[choice_R]
                c[at, step.offset] = (choice_R == token_R).double()
            else:
                q_R = look_up(probs(logits_RW, sampling), token_R, draft_vocab_W).q
                c[at, step.offset] = (q_R.double() / p[at + 1 + step.offset]).clamp(max=1)
            if rule is not None:
                _end(c, reached, step, piece, logits_RW, rule)
    return Acceptance(c.view(*batch.ids.shape, -1), off_text)


def check_drafted(logits_RW: Tensor) -> Tensor:
    """Return the logits of a draft step. Raises UserError where a row has no largest one: every comparison with NaN is false."""
    if not bool(logits_RW.amax(-1).isfinite().all()):
        raise UserError(
            "The draft head's logits are no numbers (NaN or infinite): its weights are damaged or it overflows; draft in float32, or train "
            "it again."
        )
    return logits_RW


def _end(c: Tensor, reached: Tensor, step: StepOutput, piece: Tensor, logits_RW: Tensor, rule: LengthRule) -> None:
    """End some rows' drafts before a step's token where a rule says so. reached: the chance [B*L] that the token before is accepted."""
    at = step.rows[piece]
    reached[at] *= chances(step, piece, logits_RW, rule)
    c[at[reached[at] < rule.floors[step.offset]], step.offset] = torch.nan


def chances(step: StepOutput, piece: Tensor, logits_RW: Tensor, rule: LengthRule) -> Tensor:
    """Return [R]: the chance that a step's token is accepted, given that those before it are, as a drafter estimates it."""
    if step.confidence is None or step.temperature is None:
        return rule.chance(logits_RW)
    return accepted(step.confidence[piece], step.temperature)


def _follow_tree(
    output: HeadOutput,
    batch: TrainBatch,
    target_head: TargetHead,
    draft_vocab_W: Tensor | None,
    sampling: Sampling,
    tree: StaticTree,
) -> Acceptance:
    """Follow the text down a static tree whose nodes are ranks of each step's logits.

    Its children are chosen deterministically, so the text decides at any temperature which one was accepted.
    """
    ids, steps = batch.ids.flatten(), output.steps[: tree.depth]
    _, off_text = text_probs(batch, target_head, output.steps[0].rows + 1, sampling)
    # The child of a node at a rank [N + 1, ranks + 1], -1 for none. The last column stands for "not among the ranks",
    # the last row for "off the tree" (-1).
    shape = tree.on(ids.device)
    child_NR = torch.full((len(shape.parents_N) + 1, tree.ranks + 1), -1, device=ids.device)
    nodes = torch.arange(1, len(shape.parents_N), device=ids.device)
    child_NR[shape.parents_N[1:], shape.rank_N[1:]] = nodes
    ranks = token_ranks(HeadOutput(steps), batch, draft_vocab_W, tree.ranks).flatten(0, 1).long()
    node = torch.zeros_like(ids)
    c = torch.full((len(ids), len(steps)), torch.nan, dtype=torch.float64, device=ids.device)
    for step in steps:
        node[step.rows] = child_NR[node[step.rows], ranks[step.rows, step.offset]]
        c[step.rows, step.offset] = (node[step.rows] >= 0).double()
    return Acceptance(c.view(*batch.ids.shape, -1), off_text)


def token_ranks(output: HeadOutput, batch: TrainBatch, draft_vocab_W: Tensor | None, most: int) -> Tensor:
    """Return int16 [B, L, K]: the rank of x_{t+2+k} among step k's logits of row t, 0 for the most likely token; `most`
    where it is not among the first `most`, -1 where none is drafted."""
    ids = batch.ids.flatten()
    ranks = torch.full((len(ids), len(output.steps)), -1, dtype=torch.int16, device=ids.device)
    for step in output.steps:
        for piece in torch.arange(len(step.rows), device=ids.device).split(_CHUNK_ROWS):
            at, logits_RW = step.rows[piece], check_drafted(step.logits_of(piece))
            best_RM = logits_RW.topk(min(most, logits_RW.shape[-1]), -1).indices
            best_RM = best_RM if draft_vocab_W is None else draft_vocab_W[best_RM]
            hit_RM = best_RM == ids[at + 2 + step.offset][:, None]
            rank_R = torch.where(hit_RM.any(1), hit_RM.int().argmax(1), most)
            ranks[at, step.offset] = rank_R.to(ranks.dtype)
    return ranks.view(*batch.ids.shape, -1)


def text_probs(
    batch: TrainBatch, target_head: TargetHead, positions: Tensor, sampling: Sampling
) -> tuple[Tensor | None, int]:
    """Return the text's own probabilities [B*L] at flat positions (float64, NaN where not needed; None when greedy), and
    `Acceptance.off_text`."""
    if not sampling.greedy:
        return _text_probabilities(batch, target_head, positions, sampling)
    ids, choice = batch.ids.flatten(), batch.top1.flatten()[positions]
    if sampling.repetition_penalty != 1:
        pieces = positions.split(_CHUNK_ROWS)
        choice = torch.cat([_text_logits(batch, target_head, at, sampling).argmax(-1) for at in pieces])
    return None, int((choice != ids[positions + 1]).sum())


def _text_logits(batch: TrainBatch, target_head: TargetHead, at_R: Tensor, sampling: Sampling) -> Tensor:
    """Return the target's logits [R, V] at flat positions of [B*L], after the repetition penalty."""
    return _penalized(batch, target_head.logits(batch.last.flatten(0, 1)[at_R]), at_R, sampling)


def _penalized(batch: TrainBatch, logits_RV: Tensor, at_R: Tensor, sampling: Sampling) -> Tensor:
    """Return logits with the repetition penalty on the tokens that their document holds so far."""
    if sampling.repetition_penalty == 1:
        return logits_RV
    return penalize(logits_RV, seen_in_text(batch, at_R, logits_RV.shape[1]), sampling.repetition_penalty)


def seen_in_text(batch: TrainBatch, at_R: Tensor, vocab_size: int) -> Tensor:
    """Return bool [R, V]: the tokens of a position's document up to and including it, at flat positions of [B*L]."""
    length = batch.ids.shape[1]
    row_R, column_R1 = at_R // length, (at_R % length)[:, None]
    document_RL, ids_RL = batch.document[row_R], batch.ids[row_R]
    before_RL = document_RL == document_RL.gather(1, column_R1)
    before_RL &= torch.arange(length, device=at_R.device) <= column_R1
    # The position's own token stands in for those that do not count.
    ids_RL = torch.where(before_RL, ids_RL, ids_RL.gather(1, column_R1))
    return torch.zeros(len(at_R), vocab_size, dtype=torch.bool, device=at_R.device).scatter_(1, ids_RL, True)


def _tuned_acceptance(
    output: HeadOutput, batch: TrainBatch, sampling: Sampling, greedy_drafts: bool, rule: LengthRule | None
) -> Acceptance:
    """Return the acceptance of drafts under the target that is tuned with the head and will verify them.

    The text is the original target's, so its tokens decide nothing: a draft is accepted with sum_x min(p(x), q(x)),
    which is exact at each position but not along the text.
    """
    tuned, shape = cast(StepOutput, output.tuned), (*batch.ids.shape, len(output.steps))
    c = torch.full(shape, torch.nan, dtype=torch.float64, device=batch.ids.device).flatten(0, 1)
    reached = torch.ones_like(c[:, 0], dtype=torch.float32)
    for step in output.steps:
        for piece in torch.arange(len(step.rows), device=c.device).split(_CHUNK_ROWS):
            positions, logits_RV = step.rows[piece] + 1 + step.offset, step.logits_of(piece)
            p_RV = _penalized(batch, tuned.logits_of(torch.searchsorted(tuned.rows, positions)), positions, sampling)
            p_RV = _certain(p_RV) if sampling.greedy else probs(p_RV, sampling)
            q_RV = _certain(logits_RV) if sampling.greedy or greedy_drafts else probs(logits_RV, sampling)
            c[step.rows[piece], step.offset] = torch.minimum(p_RV, q_RV).sum(-1).double()
            if rule is not None:
                _end(c, reached, step, piece, logits_RV, rule)
    return Acceptance(c.view(shape), 0)


def _certain(logits_RV: Tensor) -> Tensor:
    """Return the distribution with all mass on the likeliest token."""
    return torch.zeros_like(logits_RV).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 1.0)


def _text_probabilities(
    batch: TrainBatch, target_head: TargetHead, positions: Tensor, sampling: Sampling
) -> tuple[Tensor, int]:
    """Return p(x_{i+1} | x_{<=i}) at the flat positions `positions` of [B*L] (float64, NaN elsewhere), and count
    the tokens outside their top-k, top-p or min-p set.

    Decoding rounds differently from one long pass, so a token at the edge of the set may fall out of it here. Within a
    margin of the set's smallest logit it keeps the probability that it would have just inside.
    """
    ids = batch.ids.flatten()
    p = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=ids.device)
    exact = target_head.weight.dtype == batch.last.dtype == torch.float32
    # A penalty stretches logits, and their rounding with them.
    margin = (0.01 if exact else 0.5) * max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    off_text = 0
    for at in positions.split(_CHUNK_ROWS):
        logits_RV = _text_logits(batch, target_head, at, sampling)
        token_R1 = ids[at + 1][:, None]
        p_RV = probs(logits_RV, sampling)
        p_R = p_RV.gather(1, token_R1)[:, 0].double()
        out_R = p_R <= 0
        if bool(out_R.any()):
            ahead_RV, token_r1 = logits_RV[out_R], token_R1[out_R]
            ahead_RV.scatter_add_(1, token_r1, torch.full_like(ahead_RV[:, :1], margin))
            if bool((probs(ahead_RV, sampling).gather(1, token_r1) <= 0).any()):
                raise UserError(
                    f"The text holds a token of probability 0 under {sampling}: it was not sampled from this target with "
                    "these settings; simulate with the settings that the answers were made with."
                )
            full_RV = (logits_RV / sampling.temperature).softmax(-1)
            share_R = full_RV.gather(1, token_R1)[:, 0] / (full_RV * (p_RV > 0)).sum(1)
            p_R = torch.where(out_R, share_R.double(), p_R)
            off_text += int(out_R.sum())
        p[at] = p_R
    return p, off_text


def expected_tallies(
    c_STK: np.ndarray, tokens_S: np.ndarray, num_speculative_tokens: int, levels: Sequence[int] | None = None
) -> list[Tally]:
    """Return the expected tally of each of S answers: run every root's expected rounds forward through the answer.

    c_STK[s, i, k]: acceptance probability of the k-th draft of a round whose root is the i-th token of answer s, NaN
    where a round drafts no k-th token. tokens_S: n = E - P, tokens after the first. levels: tokens proposed at each
    depth, one each by default. Drafts stop at the answer's end: K_r is at most the tokens left.
    """
    proposed_K = np.concatenate([[0], np.cumsum(levels or [1] * num_speculative_tokens)])
    drafted_ST = (~np.isnan(c_STK[..., :num_speculative_tokens])).cumprod(2).sum(2)
    answers, longest = c_STK.shape[0], int(tokens_S.max(initial=0))
    visits_ST = np.zeros((answers, longest + 1))
    visits_ST[:, 0] = tokens_S > 0
    accepted_SK = np.zeros((answers, num_speculative_tokens))
    reached_SK = np.zeros((answers, num_speculative_tokens))
    drafted_S, rounds_ST, tokens_ST = np.zeros(answers), np.zeros((answers, longest)), np.zeros((answers, longest))
    index_S = np.arange(answers)
    for root in range(longest):
        left_S = tokens_S - root
        depth_S = np.clip(left_S, 0, drafted_ST[:, root])
        arrive_S = visits_ST[:, root] * (left_S > 0)
        rounds_ST[:, root] = tokens_ST[:, root] = arrive_S
        drafted_S += arrive_S * proposed_K[depth_S]
        for k in range(min(num_speculative_tokens, longest - root)):
            here_S = k < depth_S
            reach_S = np.where(here_S, arrive_S, 0.0)
            accept_S = reach_S * np.where(here_S, c_STK[:, root, k], 0.0)
            reached_SK[:, k] += reach_S
            tokens_ST[:, root] += accept_S
            accepted_SK[:, k] += accept_S
            visits_ST[:, root + k + 1] += reach_S - accept_S
            arrive_S = np.where(here_S, accept_S, arrive_S)
        # What is left accepted every draft: a bonus token follows, or the answer ended on a draft.
        tokens_ST[:, root] -= np.where(depth_S >= left_S, arrive_S, 0.0)
        end_S = np.minimum(root + depth_S + 1, np.maximum(tokens_S, 0))
        np.add.at(visits_ST, (index_S, end_S), np.where(left_S > 0, arrive_S, 0.0))
    tallies = []
    for s, n in enumerate(tokens_S.tolist()):
        # Copies, as a slice would keep the array of all answers.
        rounds_T, tokens_T = (of_ST[s, : max(n, 0)].astype(np.float32) for of_ST in (rounds_ST, tokens_ST))
        counts = (float(n), float(rounds_ST[s].sum()), float(drafted_S[s]))
        tallies.append(Tally(1, *counts, accepted_SK[s], reached_SK[s], rounds_T, tokens_T))
    return tallies


@dataclass(frozen=True)
class Answer:
    """An answer's place in a batch: its row, its document number, and its first and last token."""

    row: int
    document: int
    first: int
    last: int


def find_answers(batch: TrainBatch) -> list[Answer]:
    """Return the answers of a batch (runs of supervised tokens within one document), in reading order."""
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


def simulate(
    c_BLK: Tensor,
    answers: Sequence[Answer],
    num_speculative_tokens: int,
    levels: Sequence[int] | None = None,
    nodes_BLK: Tensor | None = None,
) -> list[Tally]:
    """Return the expected tally of every answer for one draft length (any length up to the K of `c_BLK`).

    levels: tokens proposed at each depth up to `num_speculative_tokens`, one each by default. nodes_BLK: see `Acceptance`.
    """
    if not answers:
        return []
    tokens_S = np.array([a.last - a.first for a in answers])

    def gather(x_BLK: Tensor) -> np.ndarray:
        x = x_BLK.cpu().numpy()
        x_STK = np.zeros((len(answers), max(int(tokens_S.max()), 1), num_speculative_tokens))
        for s, a in enumerate(answers):
            # The root x_r is drafted from by row t = r - 1.
            x_STK[s, : a.last - a.first] = x[a.row, a.first - 1 : a.last - 1, :num_speculative_tokens]
        return x_STK

    tallies = expected_tallies(gather(c_BLK), tokens_S, num_speculative_tokens, levels)
    if nodes_BLK is None:
        return tallies
    left_ST = tokens_S[:, None] - np.arange(max(int(tokens_S.max()), 1))
    # Nodes behind the answer's end do not count.
    counted_STK = np.arange(num_speculative_tokens) < left_ST[..., None]
    drafted_ST = (gather(nodes_BLK) * counted_STK).sum(2)
    return [
        replace(tally, drafted=float(cast(np.ndarray, tally.rounds_T) @ drafted_T[: int(tally.tokens)]))
        for tally, drafted_T in zip(tallies, drafted_ST, strict=True)
    ]
