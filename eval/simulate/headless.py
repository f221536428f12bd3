"""Simulate drafters that are no trained heads on finished answers: those that read texts, and draft models.

Shapes: B rows, L tokens of a text, R supervised rows, T roots, K drafted tokens, D hidden, W ids of the distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import Generation, Tally
from draftsmith.decoder.drafters.draft_model import draft_vocab, readable
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixRules, speculate
from draftsmith.decoder.drafters.texts import MAX_NGRAM, Branches, find_continuation
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.simulate.acceptance import Acceptance, acceptance, expected_tallies
from draftsmith.eval.simulate.texts import Simulation, Simulator
from draftsmith.heads.base import HeadOutput, StepOutput, supervised_rows
from draftsmith.target.target import Target


def draft_model_simulator(model: Target, *, greedy_drafts: bool = False) -> Simulator:
    """Return the simulator of chains of 1..max_k drafts of `model`.

    A draft token depends only on the text before it, not on where the round began. So one pass of the draft model gives
    the acceptance of every token, and position k of a round has that of the token k positions on.
    """

    def accept(target: Target, batch: TrainBatch, sampling: Sampling, max_k: int) -> Acceptance:
        rows = supervised_rows(batch, 0).flatten().nonzero().flatten()
        last_RD = model.forward(readable(model, batch.ids)).last.flatten(0, 1)[rows + 1]
        logits_RW = model.head.logits(last_RD)[:, : min(target.vocab_size, model.vocab_size)]
        output, vocab_W = HeadOutput((StepOutput(0, rows, logits_RW),)), draft_vocab(model, target.vocab_size)
        chances = acceptance(output, batch, target.head, vocab_W, sampling, greedy_drafts=greedy_drafts)
        c_BLK = F.pad(chances.c_BLK[..., 0], (0, max_k - 1), value=torch.nan).unfold(1, max_k, 1)
        return Acceptance(c_BLK, chances.off_text)

    return Simulator(accept)


def simulate_prompt_lookup(generations: Sequence[Generation], max_k: int, *, max_ngram: int = MAX_NGRAM) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, see `simulate_from_texts`."""

    def draft(text_L: np.ndarray, most: list[int]) -> list[Branches]:
        start = find_continuation(text_L, max_ngram)
        return [Branches.chain(text_L[start : start + tokens].tolist()) for tokens in most]

    return simulate_from_texts(generations, max_k, draft)


def simulate_suffix_decoding(
    generations: Sequence[Generation], max_k: int, rules: SuffixRules, outputs: Outputs
) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, see `simulate_from_texts`."""

    def draft(text_L: np.ndarray, most: list[int]) -> list[Branches]:
        return [speculate(text_L, tokens, rules, outputs) for tokens in most]

    return simulate_from_texts(generations, max_k, draft)


def simulate_from_texts(
    generations: Sequence[Generation], max_k: int, draft: Callable[[np.ndarray, list[int]], list[Branches]]
) -> Simulation:
    """Simulate drafts of at most 1..max_k tokens on finished answers, exactly: the text alone decides, at any temperature,
    what was proposed and what was accepted.

    draft: from a text up to its root, and the most tokens that each of several drafts may hold, to these drafts.
    """
    return Simulation([_simulate_answer(generation, max_k, draft) for generation in generations], off_text=0)


def _simulate_answer(
    generation: Generation, max_k: int, draft: Callable[[np.ndarray, list[int]], list[Branches]]
) -> list[Tally]:
    prompt, output = generation.request.prompt_ids, generation.output_ids
    ids_L, first, tokens = np.array([*prompt, *output]), len(prompt), len(output) - 1
    c_KTK = np.full((max_k, max(tokens, 1), max_k), np.nan)
    drafted_KT = np.zeros((max_k, tokens))
    for root in range(tokens):
        # A decoder cuts its drafts at the limit of new tokens; it does not know where the answer will end.
        limit = generation.request.max_new_tokens - 1 - root
        drafts = draft(ids_L[: first + root + 1], [min(k, limit) for k in range(1, max_k + 1)])
        for k, branches in enumerate(drafts):
            depths, left = branches.depths, tokens - root
            c_KTK[k, root, : max(depths, default=0)] = 0
            c_KTK[k, root, : branches.followed(output[root + 1 :])] = 1
            drafted_KT[k, root] = sum(depth <= left for depth in depths)
    tallies = []
    for k in range(max_k):
        (tally,) = expected_tallies(c_KTK[k, None], np.array([tokens]), k + 1)
        assert tally.rounds_T is not None
        tallies.append(replace(tally, drafted=float(tally.rounds_T @ drafted_KT[k])))
    return tallies
